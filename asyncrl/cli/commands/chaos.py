"""`asyncrl-launch chaos`."""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from asyncrl.cli.commands.audit import audit_lines
from asyncrl.cli.commands.common import FAILED, Commands, add_config_command, print_json, say
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.runtime.clock import Clock, wait_until
from asyncrl.runtime.process import python_module
from asyncrl.testing.faults.costs import Costs, cost_lines, read_costs
from asyncrl.testing.faults.injector import Injector
from asyncrl.testing.faults.processes import RunProcesses
from asyncrl.testing.faults.schedule import KINDS, PHASES, TARGETS, Fault, schedule
from asyncrl.testing.runs import train_steps
from asyncrl.weights.lineage import Audit, audit

_POLL_S = 0.1
_STOP_LIMIT_S = 60.0
_GONE_LIMIT_S = 10.0  # within this time after the launcher's end, all its processes must have ended
_DEFAULT_TARGETS = ("rollout_worker", "generation_server", "gserver_manager", "model_worker", "master")

_DESCRIPTION = """Run a config while faults kill, freeze and restart its processes, to test whether your agent, your reward
function and your machine tolerate them. A seed determines the faults. They occur for --for seconds after the first train
step; then the run continues to its end without faults. A killed launcher is started again with `resume`. The final report
lists the faults, how long each process was away, the time that the faults cost (frozen, detection, restart, refill), and
the audit of the journals: whether every prompt was trained exactly once or rejected with a reason."""

_EPILOG = f"""

faults:
  --kinds    kill: SIGKILL. stop: SIGSTOP, and SIGCONT after --stop seconds; a process that is stopped for longer than
             runtime.frozen_after_s is killed and restarted. restart: SIGTERM
  --targets  {", ".join(TARGETS[:6])},
             {", ".join(TARGETS[6:])}; or one process by name: rollout_worker/1
  --phases   strike only while the run is in one of these phases: {", ".join(PHASES)}
The same seed gives the same schedule; the effect depends on the state of the run at that time. journal/faults.jsonl lists every
fault.

examples:
  asyncrl-launch chaos configs/quickstart_cpu.yaml trial=chaos --seed 7
  asyncrl-launch chaos my_agent.yaml --targets rollout_worker --kinds kill,stop --every 3-6 --for 120
                                                    does my agent tolerate kills between two tool calls?
  asyncrl-launch chaos my_run.yaml --targets model_worker,master --phases weight_write checkpoint.every_steps=5
  asyncrl-launch chaos my_run.yaml --targets launcher --kinds kill --every 60-120 --for 600      like a crash of the machine
  asyncrl-launch chaos my_run.yaml runtime.faults.drop=0.01 runtime.faults.corrupt=0.01 runtime.faults.delay=0.05
                                                    additionally a bad network between the processes

Faults use up restarts: allow as many as there will be faults (runtime.max_restarts=100, per process and hour), and write
checkpoints often (checkpoint.every_steps=10), so that master and model workers lose little work.

exit codes: 0 the run is complete and the audit finds no problem; 1 the run failed, or the audit found problems, which are
printed; 2 the config or the schedule cannot work; 130 stopped by Ctrl-C, after an audit of the incomplete run."""


def add_to(commands: Commands) -> None:
    parser = add_config_command(commands, "chaos", chaos, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--seed", type=int, default=1, help="seed of the schedule (default 1)")
    parser.add_argument("--every", metavar="A-B", default="5-15", help="seconds between two faults (default 5-15)")
    parser.add_argument(
        "--for", metavar="SECONDS", dest="for_s", type=float, default=300.0, help="duration of the faults (default 300)"
    )
    parser.add_argument(
        "--kinds",
        metavar="K,...",
        default="kill,stop",
        help=f"kinds of faults, of {','.join(KINDS)} (default kill,stop)",
    )
    parser.add_argument(
        "--targets",
        metavar="T,...",
        default=",".join(_DEFAULT_TARGETS),
        help="kinds or names of processes (default: all workers)",
    )
    parser.add_argument(
        "--phases", metavar="P,...", default="", help="strike only in these phases (default: at any time)"
    )
    parser.add_argument("--stop", metavar="A-B", default="1-20", help="seconds that `stop` lasts (default 1-20)")


def chaos(arguments: argparse.Namespace, console: Console) -> int:
    """Run a config while faults, drawn from a seed, kill and freeze its processes; audit the result."""
    config = load_experiment(arguments.config, arguments.overrides)
    faults = _schedule(arguments)
    run_dir = run_directory(config)
    say(console, f"{run_dir}: {len(faults)} faults in {arguments.for_s:g} s")
    command = ["run", str(arguments.config), *arguments.overrides]
    subject = _Subject(config, run_dir, command, console, quiet=arguments.json, clock=arguments.clock)
    try:
        code = subject.run_faults(faults)
    except KeyboardInterrupt:
        code = subject.stop()
    finally:
        subject.close()
    return _tell(subject, code, arguments, console)


def _schedule(arguments: argparse.Namespace) -> list[Fault]:
    try:
        return schedule(
            seed=arguments.seed,
            every=_span("--every", arguments.every),
            for_s=arguments.for_s,
            kinds=_words(arguments.kinds),  # type: ignore[arg-type]  # schedule rejects unknown words
            targets=_words(arguments.targets),
            phases=_words(arguments.phases) or ("",),  # type: ignore[arg-type]
            stop_s=_span("--stop", arguments.stop),
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _span(option: str, text: str) -> tuple[float, float]:
    least, _, most = text.partition("-")
    with contextlib.suppress(ValueError):
        return float(least), float(most or least)
    raise ConfigError(f"{option} {text}: write a range of seconds, such as 5-15")


@dataclass
class _Subject:
    """The run under test: its launchers, one after another, and the injector."""

    config: ExperimentConfig
    run_dir: Path
    command: Sequence[str]
    console: Console
    quiet: bool
    clock: Clock
    injector: Injector | None = None
    problems: list[str] = field(default_factory=list)
    resumes: int = 0

    def __post_init__(self) -> None:
        self.began = self.clock.time()
        self.before = len(train_steps(self.run_dir))  # train steps of earlier runs in this folder
        self._launcher = self._launch(self.command)

    def run_faults(self, faults: Sequence[Fault]) -> int:
        """Inject the faults and wait for the end of the run. Return the exit code of its last launcher."""
        # Wait for the first train step. This needs no limit, because a run that cannot start ends by itself
        while len(train_steps(self.run_dir)) == self.before:
            if self._ended():
                return self._launcher.wait()
            self.clock.sleep(_POLL_S)
        self.injector = Injector(self.run_dir, notice=partial(say, self.console))
        self.injector.run(faults, until=self._ended, after_each=self._resume_if_struck)
        say(self.console, "no more faults; the run continues to its end")
        while not self._ended():
            self.injector.turn()
            self.clock.sleep(_POLL_S)
        return self._launcher.wait()

    def stop(self) -> int:
        """Wait for the launcher, at most _STOP_LIMIT_S. It received the Ctrl-C too, because it is in the same process group. Return
        130, the exit code after Ctrl-C."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_STOP_LIMIT_S)
        return 128 + signal.SIGINT

    def close(self) -> None:
        if self.injector is not None:
            self.injector.close()
        if not self._ended():
            self._launcher.send_signal(signal.SIGTERM)
            try:
                self._launcher.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
                self._launcher.wait()

    def _ended(self) -> bool:
        return self._launcher.poll() is not None

    def _resume_if_struck(self) -> None:
        """If the latest fault ended the launcher (kill or restart): check that the run's processes end within _GONE_LIMIT_S. Then
        continue with `resume` or, if there is no checkpoint, begin anew."""
        assert self.injector is not None
        strike = self.injector.strikes[-1] if self.injector.strikes else None
        if strike is None or strike.pid != self._launcher.pid or strike.fault.kind == "stop":
            return
        self._launcher.wait()
        left: list[str] = []

        def is_gone() -> bool:
            left[:] = sorted(RunProcesses(self.run_dir).by_name())
            return not left

        if not wait_until(is_gone, limit_s=_GONE_LIMIT_S, every_s=_POLL_S, clock=self.clock):
            self.problems.append(
                f"{_GONE_LIMIT_S:g} s after the launcher's end these processes still run: {', '.join(left)}"
            )
        self.resumes += 1
        there = any(self.run_dir.glob("checkpoints/recover/a*-s*"))  # without a checkpoint it begins anew
        self._launcher = self._launch(["resume", str(self.run_dir)] if there else self.command)

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            python_module("asyncrl.cli.main", *command),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if self.quiet else None,  # stdout is for the JSON object at the end
        )


def _tell(subject: _Subject, code: int, arguments: argparse.Namespace, console: Console) -> int:
    """Print the report. Return the exit code."""
    costs: Costs | None = None
    try:
        found: Audit | None = audit(subject.run_dir)
        costs = read_costs(subject.run_dir, since=subject.began)
    except (ValueError, OSError) as error:
        found = None
        subject.problems.append(f"no audit: {error}")
    injector = subject.injector
    strikes = injector.strikes if injector is not None else []
    problems = [*subject.problems, *(found.problems if found is not None else ())]
    if code == 0 and (found is None or not found.complete):
        problems.append("the launcher reports a complete run, but the journal does not show one")
    result = code if code else FAILED if problems else 0
    back = injector.recovered_s if injector is not None else {}
    if arguments.json:
        faults = [{**msgspec.to_builtins(strike), "back_after_s": back.get(strike.fault.number)} for strike in strikes]
        print_json(
            {
                "run_dir": str(subject.run_dir),
                "exit_code": result,
                "faults": faults,
                "costs": costs,
                "audit": found,
                "problems": problems,
            }
        )
        return result
    for strike in strikes:
        after = back.get(strike.fault.number)
        what = f"{strike.fault.kind} {strike.name}" + (f" in {strike.fault.phase}" if strike.fault.phase else "")
        back_text = f"back after {after:.1f} s" if after is not None else "continued"
        say(console, f"  {strike.fault.number:3d}  {what:<45} {back_text}")
    say(
        console,
        f"{len(strikes)} faults, {subject.resumes} resumes, launcher's exit code {code}",
        *(cost_lines(costs) if costs is not None else ()),
        *(audit_lines(found) if found is not None else ()),
        *(f"PROBLEM   {text}" for text in subject.problems),
    )
    return result
