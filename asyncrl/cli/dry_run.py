"""What `asyncrl-launch run --dry-run` writes: every config of a run, resolved, as the processes would get it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from asyncrl.config.schema import ExperimentConfig
from asyncrl.launch.program import CONFIG_CLASSES, ProcessSpec, run_directory, save_config
from asyncrl.launch.rundir import LaunchError

_OURS = re.compile(rf"config\.yaml|(?:{'|'.join(CONFIG_CLASSES)})_\d+\.yaml")


def default_folder(config: ExperimentConfig) -> Path:
    return run_directory(config) / "dry_run"


def write_dry_run(config: ExperimentConfig, specs: Sequence[ProcessSpec], folder: Path) -> None:
    """config.yaml and <process>.yaml, without secrets. What an earlier dry run left in the folder goes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if _OURS.fullmatch(file.name):
                file.unlink()
        save_config(config, folder / "config.yaml", redacted=True)
        for spec in specs:
            save_config(spec.config, folder / f"{spec.file_stem}.yaml", redacted=True)
    except OSError as error:
        raise LaunchError(f"the dry run cannot be written to {folder}: {error}; choose --output DIR") from error
