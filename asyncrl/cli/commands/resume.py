"""`asyncrl-launch resume`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_command, supervises
from asyncrl.cli.commands.run import add_detach, start
from asyncrl.cli.commands.which_run import FILEROOT, only_run
from asyncrl.config.schema import ConfigError
from asyncrl.launch.experiment import Draft, draft_experiment, load_experiment
from asyncrl.launch.rundir import EXPERIMENT_FILE, newest_experiment, read_record

_DESCRIPTION = """Continue a run that was stopped or killed, from the newest checkpoint in its folder, with its own config.

Every prompt is trained once or rejected, as if the run had not been interrupted: steps after the checkpoint are void, and
their prompts are trained again. You may change layout, numbers of workers, batch size and learning rate, but not the
prompts, their order (seed) or the models."""

_EPILOG = """examples:
  asyncrl-launch resume runs/sloppy-sorter/t0
  asyncrl-launch resume runs/sloppy-sorter/t0 allocation=transformers.d1+d2      on other devices
  asyncrl-launch resume runs/sloppy-sorter/t0 train.max_steps=200                extend a complete run
  asyncrl-launch resume runs/sloppy-sorter/t0 cluster=slurm                      as a job, wherever it ran before
  asyncrl-launch audit  runs/sloppy-sorter/t0                                    check that each prompt was trained once

It is the same as `run` with the run's config and recover=required. checkpoint.every_s (default: 10 minutes or more, by size),
checkpoint.every_steps and checkpoint.every_epochs set how often checkpoints are written.

exit codes: those of `run`; 2 also if there is no checkpoint, if it does not fit the overrides, or if the run is complete
and the overrides give it no more steps."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "resume", resume, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("run", metavar="DIR", nargs="?", help="folder of the run (default: the only run under ./runs)")
    supervises(parser)
    add_detach(parser)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields to change")


def resume(arguments: argparse.Namespace, console: Console) -> int:
    """Continue a run that was stopped or killed, from its newest checkpoint."""
    if arguments.run is not None and "=" in arguments.run and not Path(arguments.run).exists():
        arguments.run, arguments.overrides = None, [arguments.run, *arguments.overrides]
    run_dir = only_run(FILEROOT) if arguments.run is None else Path(arguments.run).expanduser().absolute()
    if not run_dir.is_dir():
        raise ConfigError(
            f"{str(arguments.run)!r} is not a folder; name the folder of a run, <fileroot>/<experiment>/<trial>"
        )
    return start(draft_to_resume(run_dir, arguments.overrides), arguments, console)


def draft_to_resume(run_dir: Path, overrides: Sequence[str]) -> Draft:
    """The config of the newest launch in the run's folder, with the overrides. Raises ConfigError; LaunchError if run.json is
    damaged or has another format than this release's."""
    # First, because its error is clear: the config of another release may have fields that this release does not know
    read_record(run_dir)
    kept = newest_experiment(run_dir)
    if kept is None:
        raise ConfigError(
            f"{run_dir} has no configs/attempt_N/{EXPERIMENT_FILE}: no run was started there; "
            "`asyncrl-launch run CONFIG recover=required` continues with a config that you name"
        )
    if not kept.read_bytes().endswith(b"\n"):
        raise ConfigError(
            f"{kept} is empty or cut short; remove it to use the config of the previous attempt, or use "
            "`asyncrl-launch run CONFIG recover=required` with a config that you name"
        )
    here = [f"fileroot={run_dir.parent.parent}", f"experiment={run_dir.parent.name}", f"trial={run_dir.name}"]
    if load_experiment(kept).cluster == "slurm" or {"cluster=slurm", "cluster=local"} & set(overrides):
        # Forget the recorded hosts: the nodes of an earlier job or, if the overrides change the cluster, those of cluster=hosts
        here.append("hosts=[]")
    return draft_experiment(kept, [*here, "recover=required", *overrides])
