"""Seconds from `asyncrl-launch run configs/quickstart_cpu.yaml` to the end of the first train step, by phase.

    python benchmarks/startup.py [--rounds 5] [--config CONFIG] [--steps 2] [--write-baseline] [key=value ...]

asyncrl: the config as it is, except for evaluations (off) and its folder (a scratch one). The model is made beforehand if it is
missing. separate_interpreters: the same with runtime.fork_server=false, where each process imports for itself. The sides alternate,
so that both see the same machine, with warm file caches.

Phases follow one another and add up. Each ends when the last process has finished it:
  launcher       its imports, the config, the preflight
  name_service   until etcd answers
  imports        the computing processes are forked or started, and import all that they need
  loading        they connect to one another and load the model
  weights_0      the initial weights are written, verified, loaded and echoed; then generation may begin
  first_batch    the first train batch is generated, judged, stored
  first_step     the first train step
`cpu` is the CPU time of all processes of the run, from its command to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from common import Numbers, alternate, finish, parser, table

from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.launch.rundir import logs_dir, read_record
from asyncrl.runtime.metrics import read_json_lines

ROOT = Path(__file__).parent.parent
PHASES = ("launcher", "name_service", "imports", "loading", "weights_0", "first_batch", "first_step")
KINDS = ("generation_server", "model_worker", "master", "gserver_manager", "rollout_worker")
_RUN_LIMIT_S = 300.0
_LINE = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}) \w+ +(\w+)/\d+: (.*)$", re.MULTILINE)


class RunFailedError(RuntimeError):
    """A measured run failed before its end."""


def measure(args: argparse.Namespace, *, fork_server: bool) -> Numbers:
    """Run once, from the command to the end. Returns seconds by phase, `total` to the first train step, and `cpu`."""
    with tempfile.TemporaryDirectory(prefix="asyncrl-startup-") as folder:
        overrides = [
            *args.overrides,
            f"fileroot={folder}",
            f"train.max_steps={args.steps}",
            "eval.prompts=null",
            f"runtime.fork_server={fork_server}",
        ]
        run_dir = run_directory(load_experiment(args.config, overrides))
        command = [sys.executable, "-m", "asyncrl.cli.main", "run", str(args.config), *overrides]
        began, cpu_before = time.time(), os.times()
        with open(Path(folder) / "output", "w+b") as output:
            launcher = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            with _stopped_at_the_end(launcher):
                code = launcher.wait(_RUN_LIMIT_S)
            output.seek(0)
            if code != 0:
                raise RunFailedError(f"`{' '.join(command)}` ended with {code}:\n{output.read().decode()}")
        cpu = os.times()  # of the launcher, and of the processes for which it waited
        cpu_s = cpu.children_user + cpu.children_system - cpu_before.children_user - cpu_before.children_system
        return {**phases(run_dir, began), "cpu": cpu_s}


@contextlib.contextmanager
def _stopped_at_the_end(launcher: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait(60)


def phases(run_dir: Path, began: float) -> dict[str, float]:
    """Seconds by phase, from a finished run's files, logs and journal."""
    record = read_record(run_dir)
    assert record is not None
    said = _log_lines(logs_dir(run_dir, record.attempt))
    (first,) = (line for line in read_json_lines(run_dir / "journal" / "master.jsonl") if line.get("step") == 1)
    imported = {
        kind: max(when for who, text, when in said if who == kind and text.startswith(_IMPORTED[kind]))
        for kind in KINDS
    }
    ends = {
        "launcher": (run_dir / "config.yaml").stat().st_mtime,
        "name_service": record.started,
        "imports": max(imported["generation_server"], imported["model_worker"]),
        "loading": _last(said, r"rank \d+ of|serving at"),
        "weights_0": _last(said, r"generation_server/\d+ serves a0*1-v0+ "),
        "first_batch": first["start"],
        "first_step": first["end"],
    }
    seconds, last = {}, began
    for phase in PHASES:
        seconds[phase] = max(0.0, ends[phase] - last)
        last = max(last, ends[phase])
    of_kinds = {f"imports of {kind}": when - record.started for kind, when in imported.items()}
    return {"total": last - began, **seconds, **of_kinds}


# The line that a process logs after its imports.
_IMPORTED = {**dict.fromkeys(KINDS, "setting up"), "generation_server": "loading the model"}


def _log_lines(folder: Path) -> list[tuple[str, str, float]]:
    """Return (kind of process, message, time) of all log lines."""
    return [
        (kind, text, datetime.strptime(when, "%Y-%m-%d %H:%M:%S.%f").timestamp())
        for log in folder.glob("*.log")
        for when, kind, text in _LINE.findall(log.read_text(errors="replace"))
    ]


def _last(said: list[tuple[str, str, float]], pattern: str) -> float:
    return max(when for _, text, when in said if re.match(pattern, text))


def prepare(args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "asyncrl.cli.main", "prepare", str(args.config), *args.overrides]
    output = subprocess.DEVNULL if args.json_only else sys.stderr
    if subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, check=False).returncode:
        raise SystemExit(f"`{' '.join(command)}` failed")


def main() -> None:
    options = parser(__doc__ or "")
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--config", type=Path, default=ROOT / "configs" / "quickstart_cpu.yaml")
    options.add_argument("--steps", type=int, default=2, help="train steps of each run; only the first is measured")
    options.add_argument("overrides", metavar="key=value", nargs="*", help="overrides of the config's fields")
    args = options.parse_args()
    args.config = args.config.absolute()
    prepare(args)
    sides = {
        "asyncrl": lambda: measure(args, fork_server=True),
        "separate_interpreters": lambda: measure(args, fork_server=False),
    }
    rounds = alternate(args, sides)
    ours, theirs = sides
    rows = [
        [case, *(number for side in sides for number in (rounds.median(side, case), rounds.spread(side, case)))]
        for case in rounds.cases(ours)
    ]
    table(args, "seconds", ["", *(column for side in sides for column in (side, "iqr"))], rows)
    finish(
        args,
        name="startup",
        value=rounds.median(ours, "total"),
        unit="s",
        ratio={theirs: rounds.ratio(ours, theirs, "total")},
        spread=rounds.spread(ours, "total"),
        phases={phase: round(rounds.median(ours, phase), 3) for phase in PHASES},
        cpu_ratio={theirs: rounds.ratio(ours, theirs, "cpu")},
        sides=rounds.summary(),
        peers_missing=[],
    )


if __name__ == "__main__":
    main()
