"""`asyncrl-launch eval`: evaluate a model without training."""

from __future__ import annotations

import argparse
import shutil
import uuid
from functools import partial
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import FAILED, Commands, add_command, print_json, say, supervises
from asyncrl.cli.commands.run import checked, launched, refuse_too_large
from asyncrl.cli.evaluation_table import evaluation_table, failed_parts
from asyncrl.cli.progress import RunView
from asyncrl.cli.run_files import read_summary
from asyncrl.config.schema import ConfigError
from asyncrl.launch.evaluation import to_evaluate
from asyncrl.launch.experiment import Draft, draft_experiment, load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.launch.rundir import newest_experiment
from asyncrl.launch.submission import is_to_submit
from asyncrl.weights.adapter import ABOUT

_DESCRIPTION = """Evaluate a model on the evaluation sets of a config, without training, and print the results.

The target is a config, whose model_path is evaluated; a run, whose final model is evaluated; or a model's folder in a run,
such as RUN/checkpoints/step_00000020. A run is evaluated with its own config. Generation servers, gserver manager and
rollout workers are those of training, so a greedy result equals that of the run.

All files are in a folder of their own, <fileroot>/<experiment>/eval_..., which is removed after success. With trial=NAME
it stays, with the results by prompt in evaluations/."""

_EPILOG = """examples:
  asyncrl-launch eval my_run.yaml                                        the model before training
  asyncrl-launch eval runs/mine/t0                                       the final model of a run
  asyncrl-launch eval runs/mine/t0/checkpoints/step_00000020 eval.sets.aime.num_responses=64
  asyncrl-launch eval my_run.yaml model_path=/models/other trial=other   keep the results by prompt
  asyncrl-launch eval runs/mine/t0 --json | jq '."eval/aime/sampled_pass@4"'

exit codes: 0 every set has a result; 1 it failed, or every prompt of a set did; 2 the config cannot work; 130, 143 it was
stopped. However it ends, none of its processes is left."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "eval", evaluate, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="CONFIG_OR_CHECKPOINT", help="YAML file, a run's folder, or a model's in it")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that override those of the config")
    supervises(parser)


def evaluate(arguments: argparse.Namespace, console: Console) -> int:
    """Evaluate a model without training, and print the results."""
    config, num_prompts = checked(_draft(arguments), console, download=True)
    if is_to_submit(config):
        raise ConfigError("cluster='slurm': eval starts no job; in a job of yours use cluster=local")
    refuse_too_large(config, partial(say, console))
    run_dir = run_directory(config)
    stays = any(override.startswith("trial=") for override in arguments.overrides)
    parents = [folder for folder in (run_dir.parent, run_dir.parent.parent) if not folder.exists()]
    code: int | None = None
    try:
        code = launched(config, num_prompts, RunView(run_dir, 0, console))
        summary = read_summary(run_dir) if code == 0 else {}
    finally:
        if not stays and code not in (None, FAILED):
            _remove(run_dir, parents)
    if code != 0:
        say(console, f"no process of it is left{f'. Logs: {run_dir}/logs/latest' if run_dir.exists() else ''}")
        return code
    (evaluation,) = summary["evaluations"]
    if arguments.json:
        print_json({"model_path": config.model_path, **evaluation, "run_dir": str(run_dir) if stays else None})
    else:
        console.print(evaluation_table(f"Evaluation of {config.model_path}", evaluation))
        if stays:
            say(console, f"results by prompt: {run_dir}/evaluations")
    if failed := failed_parts(evaluation):
        say(console, f"every prompt failed: {', '.join(failed)}")
        return FAILED
    return 0


def _draft(arguments: argparse.Namespace) -> Draft:
    target, given = Path(arguments.target).expanduser(), [f"trial=eval_{uuid.uuid4().hex[:8]}"]
    if target.is_dir():
        target, about = _of_folder(target.absolute())
        given += about
    return draft_experiment(target, [*given, *arguments.overrides], change=to_evaluate)


def _of_folder(folder: Path) -> tuple[Path, list[str]]:
    """The config of the run in which a folder is, and the overrides that evaluate the model in it. Raises ConfigError."""
    found = ((run_dir, newest_experiment(run_dir)) for run_dir in (folder, *folder.parents))
    run_dir, kept = next((entry for entry in found if entry[1] is not None), (folder, None))
    if kept is None:
        raise ConfigError(
            f"{folder} is in no run's folder; name the config: asyncrl-launch eval CONFIG model_path={folder}"
        )
    final = folder / "checkpoints" / "final"
    merged = final.with_name("final-merged")  # of a run with train.lora.merge
    model = folder if folder != run_dir else merged if merged.is_dir() else final
    if (model / ABOUT).is_file():
        raise ConfigError(
            f"{model} holds an adapter, which is not evaluated without its base; train with train.lora.merge=true, and name the "
            "folder checkpoints/final-merged"
        )
    if not (model / "config.json").is_file():
        raise ConfigError(
            f"{model} has no config.json; name the folder of a model, such as {run_dir}/checkpoints/final"
        )
    overrides = [f"fileroot={run_dir.parent.parent}", f"experiment={run_dir.parent.name}", f"model_path={model}"]
    if not any((model / name).is_file() for name in _TOKENIZER_FILES):
        config = load_experiment(kept)
        overrides.append(f"tokenizer_path={config.tokenizer_path or config.model_path}")
    return kept, overrides


def _remove(run_dir: Path, parents: list[Path]) -> None:
    """Remove the folder, and those of `parents` that are empty then."""
    shutil.rmtree(run_dir, ignore_errors=True)
    for folder in parents:
        try:
            folder.rmdir()
        except OSError:  # another run is in it
            return
