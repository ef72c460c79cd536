"""`asyncrl-launch resume`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from asyncrl.cli.commands.common import Commands, add_command
from asyncrl.cli.commands.run import add_detach, start
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.rundir import EXPERIMENT_FILE, newest_experiment, read_record

_DESCRIPTION = """Go on with a run that was stopped or killed, from the newest checkpoint in its folder, with its own config.

Every prompt is trained once or rejected, as if the run had never been interrupted: what was trained after the checkpoint is
void and trained again. Layout, numbers of workers, batch size and learning rate may be others than before; the prompts, their
order (seed) and the models may not."""

_EPILOG = """examples:
  asyncrl-launch resume runs/sloppy-sorter/t0
  asyncrl-launch resume runs/sloppy-sorter/t0 allocation=transformers.d1+d2      on other devices
  asyncrl-launch resume runs/sloppy-sorter/t0 train.max_steps=200                a complete run, for longer
  asyncrl-launch resume runs/sloppy-sorter/t0 cluster=slurm                      as a job, wherever it ran before
  asyncrl-launch audit  runs/sloppy-sorter/t0                                    was each prompt trained once?

The same as `run` with the run's config and recover=required. How often checkpoints are written: checkpoint.every_s (10 minutes
where nothing is said), checkpoint.every_steps, checkpoint.every_epochs.

exit codes: as of `run`; 2 where there is no checkpoint, it does not fit what the overrides say,
or the run is complete and the overrides give it no more steps."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "resume", resume, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("run", metavar="DIR", type=Path, help="folder of the run")
    add_detach(parser)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="fields that are to differ from before")


def resume(arguments: argparse.Namespace, console: Console) -> int:
    """Go on with a run that was stopped or killed, from its newest checkpoint."""
    run_dir = Path(arguments.run).expanduser().absolute()
    if not run_dir.is_dir():
        raise ConfigError(
            f"{str(arguments.run)!r} is not a folder; name that of a run, <fileroot>/<experiment>/<trial>"
        )
    return start(config_to_resume(run_dir, arguments.overrides), arguments, console)


def config_to_resume(run_dir: Path, overrides: Sequence[str]) -> ExperimentConfig:
    """That of the run's newest attempt, changed by the overrides. Raises ConfigError, or LaunchError for a newer release's run."""
    read_record(run_dir)  # first: the config of a newer release may have fields that are unknown here
    kept = newest_experiment(run_dir)
    if kept is None:
        raise ConfigError(
            f"{run_dir} has no configs/attempt_N/{EXPERIMENT_FILE}: no run was started there; "
            "`asyncrl-launch run CONFIG recover=required` goes on with the config that you name"
        )
    if not kept.read_bytes().endswith(b"\n"):
        raise ConfigError(
            f"{kept} is empty or cut short; remove it, and the config of the attempt before is used, or "
            "`asyncrl-launch run CONFIG recover=required` goes on with the config that you name"
        )
    here = [f"fileroot={run_dir.parent.parent}", f"experiment={run_dir.parent.name}", f"trial={run_dir.name}"]
    if load_experiment(kept).cluster == "slurm" or {"cluster=slurm", "cluster=local"} & set(overrides):
        here.append("hosts=[]")  # a job's nodes were that job's, and hosts are only for cluster=hosts
    return load_experiment(kept, [*here, "recover=required", *overrides])
