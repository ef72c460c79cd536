"""`asyncrl-launch check` checks a small copy of each architecture once per pytest session, because that takes 6 s of CPU time."""

from __future__ import annotations

from pathlib import Path

import msgspec

from asyncrl.cli.architecture_check import judge_architecture, task_of
from asyncrl.config.schema import ExperimentConfig
from asyncrl.launch.checks.checklist import Finding

_sound: dict[tuple[bytes, bytes], list[Finding]] = {}


def judge_each_architecture_once(config: ExperimentConfig) -> list[Finding]:
    """As judge_architecture. The findings of a sound architecture are kept for models with the same config.json; only where the
    names of the tensors in the folder matter, too, the check runs each time."""
    task = task_of(config)
    try:
        description = (Path(task.path) / "config.json").read_bytes()
    except OSError:
        return judge_architecture(config)
    key = description, msgspec.json.encode(msgspec.structs.replace(task, path=""))
    if task.by_folder or key not in _sound:
        findings = judge_architecture(config)
        if any(finding.state != "ok" for finding in findings):
            return findings
        _sound[key] = findings
    return _sound[key]
