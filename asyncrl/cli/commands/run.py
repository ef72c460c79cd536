"""`asyncrl-launch run`, including --dry-run and --json.

A dry run writes all resolved configs of the run, as its processes would get them, except secrets and the endpoint of a private
etcd. With --json every event is one JSON object on a line of its own, for programs that watch a run.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console

from asyncrl.cli.advice import AdviceNews
from asyncrl.cli.checks import checks_of
from asyncrl.cli.commands.common import (
    FAILED,
    Commands,
    add_config_command,
    error_object,
    print_json,
    process_objects,
    process_table,
    say,
    sizes,
    sizes_text,
    supervises,
)
from asyncrl.cli.hub import with_local_models
from asyncrl.cli.progress import LongWaits, Notes, RunView, print_summary
from asyncrl.cli.run_files import is_evaluation, read_summary
from asyncrl.config.resolve import Facts, resolve, total_steps
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.data.trajectories import FOLDER as TRAJECTORIES
from asyncrl.dataflow.phases import phases
from asyncrl.launch.checks.checklist import Case, make_checks
from asyncrl.launch.checks.model_files import bytes_of_models
from asyncrl.launch.experiment import Draft, draft_experiment
from asyncrl.launch.local import LocalLauncher, View
from asyncrl.launch.program import CONFIG_CLASSES, ProcessSpec, plan, run_directory, save_config
from asyncrl.launch.redact import redact_urls
from asyncrl.launch.rundir import LaunchError, has_lock, keep_private, next_attempt
from asyncrl.launch.submission import follow, is_to_submit, job_script, submit_job
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime.background import on_thread
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock, wait_until
from asyncrl.runtime.devices import visible_devices
from asyncrl.runtime.metrics import METRICS_FILE, JsonLinesReader
from asyncrl.runtime.process import dying_with_parent, python_module, tail_of

_OURS = re.compile(rf"config\.yaml|(?:{'|'.join(CONFIG_CLASSES)})_\d+\.yaml")


def write_dry_run(config: ExperimentConfig, specs: Sequence[ProcessSpec], folder: Path) -> None:
    """Write config.yaml and <process>.yaml, without secrets. Remove the files of an earlier dry run from the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if _OURS.fullmatch(file.name):
                file.unlink()
        save_config(config, folder / "config.yaml", redacted=True)
        for spec in specs:
            save_config(spec.config, folder / f"{spec.file_stem}.yaml", redacted=True)
    except OSError as error:
        raise LaunchError(
            f"the dry run cannot be written to {folder}: {error}; choose another folder with --output DIR"
        ) from error


class JsonView:
    """Prints events as JSON lines. Every line has `event` and `time` (unix seconds): when the event happened, for a worker when
    its first status with the new state was made.

    Events: start (run_dir, processes, sizes); worker (name, state, pid, attempt: a process has changed its state); metrics (a
    record of metrics.jsonl: a train step or an evaluation); notice (text); end (exit_code, and summary or error).
    """

    def __init__(self, run_dir: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._metrics = JsonLinesReader(run_dir / METRICS_FILE, broken=self.notice, newest_bytes=0)
        self._states: dict[str, str] = {}
        self._long_waits, self._notes = LongWaits(), Notes()
        self._advice = AdviceNews()
        self._lock = threading.Lock()  # notices may come from other threads

    def emit(self, event: str, **fields: Any) -> None:
        self._emit(event, self._clock.time(), fields)

    def _emit(self, event: str, happened: float, fields: Mapping[str, Any]) -> None:
        line = msgspec.json.encode({"event": event, "time": round(happened, 3), **fields})
        with self._lock:
            sys.stdout.write(line.decode() + "\n")
            sys.stdout.flush()

    def turn(self, statuses: Sequence[WorkerStatus]) -> None:
        for status in statuses:
            if self._states.get(status.worker) != status.state:
                self._states[status.worker] = status.state
                about = {"name": status.worker, "state": status.state, "pid": status.pid, "attempt": status.attempt}
                self._emit("worker", status.time, about)
        for record in self._metrics.new_records():
            happened = record.get("time")
            at = happened if isinstance(happened, (int, float)) else self._clock.time()
            self._emit("metrics", at, _without_own_names(record))
            for text in [] if is_evaluation(record) else self._advice.new(record):
                self.notice(text)
        for text in [*self._notes.new(statuses), *self._long_waits.new(statuses)]:
            self.notice(text)

    def notice(self, text: str) -> None:
        self.emit("notice", text=redact_urls(text))

    def say(self, text: str) -> None:
        self.notice(text)

    def close(self) -> None:
        """Emit the remaining metrics."""
        self.turn(())


def _without_own_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record without the keys `event` and `time`, because the event sets them itself. Its `time` is the record's."""
    return {name: value for name, value in record.items() if name not in {"event", "time"}}


OUTPUT_FILE = "launcher.out"  # in the folder of a run that was started with --detach
_START_LIMIT_S = 600.0  # of such a run: its checks read files, and may download a model
_LOOK_S = 0.1
# Set by launcher/*.sh: the command that activates the Python environment that these scripts made
ACTIVATE_ENV = "ASYNCRL_ACTIVATE"

_DESCRIPTION = """Start all processes of a run on this machine, print a line per train step, and stop them all at the end.

All files of the run are in <fileroot>/<experiment>/<trial>/: config.yaml, configs/, logs/, metrics.jsonl, weights/,
checkpoints/final, summary.json. A second `run` of the same config is another attempt in the same folder: it continues
from the newest checkpoint of an interrupted run. After a complete one it is refused, because it would replace the final
model: choose another trial, `resume` it with more steps, or begin anew with recover=off."""

_EPILOG = """

examples:
  asyncrl-launch run configs/quickstart_cpu.yaml
  asyncrl-launch run configs/quickstart_cpu.yaml trial=sync manager.max_head_offpolicyness=0
  asyncrl-launch run configs/quickstart_cpu.yaml --ui          and show it on a web page
  asyncrl-launch run configs/quickstart_cpu.yaml --detach      go on without this terminal
  asyncrl-launch run my_run.yaml --dry-run                     write every process's resolved config, start nothing
  asyncrl-launch run my_run.yaml --dry-run --output /tmp/dry
  asyncrl-launch run my_run.yaml cluster=slurm slurm.nodes=4 slurm.gpus_per_node=8    as a job; --dry-run prints its script
  asyncrl-launch run my_run.yaml --json | jq -c 'select(.event == "metrics") | [.step, ."reward/mean"]'

--json prints one object per line: event start, worker, metrics, notice, end (exit_code, and summary or error).

exit codes: 0 the run is complete; 1 it failed, the first cause is printed; 2 the config cannot work;
130, 143 it was stopped (Ctrl-C, SIGTERM). A second Ctrl-C kills it at once. However the run ends, none of its
processes is left. In another terminal: asyncrl-launch status|logs|stop RUN."""


def add_to(commands: Commands) -> None:
    parser = add_config_command(commands, "run", run, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "--dry-run", action="store_true", help="write config.yaml and each process's resolved config; start nothing"
    )
    parser.add_argument(
        "--ui", action="store_true", help="show the run on a web page, as `asyncrl-launch ui` does, until it ends"
    )
    supervises(parser)
    add_detach(parser)
    parser.add_argument(
        "--output", metavar="DIR", type=Path, help="folder for --dry-run (default: dry_run/ in the run's folder)"
    )


def add_detach(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--detach",
        action="store_true",
        help="return when the run has started; it goes on without this terminal (cluster=slurm: submit the job and return)",
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Start a run, print a line per train step, and stop all its processes at the end."""
    if arguments.output and not arguments.dry_run:
        raise ConfigError("--output works with --dry-run only; set the folder of a run with fileroot=... and trial=...")
    draft = draft_experiment(arguments.config, arguments.overrides)
    if arguments.ui and (arguments.dry_run or is_to_submit(draft.config)):
        raise ConfigError(
            "--ui shows a run of this machine; for a job: asyncrl-launch ui RUN, where its folder is mounted"
        )
    if not arguments.dry_run:
        return start(draft, arguments, console)
    if is_to_submit(draft.config):
        sys.stdout.write(job_script(draft.checked()))
        return 0
    config, num_prompts = checked(draft, console, download=False)
    return _dry_run(config, num_prompts, arguments, console)


def start(draft: Draft, arguments: argparse.Namespace, console: Console) -> int:
    """Run a config to its end, with text output or, with --json, JSON output."""
    config, num_prompts = checked(draft, console, download=True)
    if is_to_submit(config):
        return _submit(config, arguments, console)
    refuse_too_large(config, partial(say, console))
    with_page = getattr(arguments, "ui", False)
    if arguments.detach:
        if with_page:
            raise ConfigError("--detach has no page; show the run with `asyncrl-launch ui RUN`")
        return _leave(config, arguments, console)
    if arguments.json:
        return _run_for_machines(config, num_prompts, with_page=with_page)
    return _run_for_people(config, num_prompts, console, with_page=with_page)


def checked(draft: Draft, console: Console, *, download: bool) -> tuple[ExperimentConfig, int]:
    """The config with the local folders of its models, and the number of its prompts. Raises ConfigError with all problems. Nothing
    is downloaded for a config with a wrong field."""
    fetch = download and not draft.wrong
    draft = with_local_models(draft, download=fetch, say=partial(say, console))
    report = make_checks(checks_of("files", cost="short"), Case(draft.config), draft.wrong)
    report.refuse()
    say(console, *(f"{finding.name}: {finding.value}; {finding.remedy}" for finding in report.findings))
    return draft.config, report.case.num_prompts


def refuse_too_large(config: ExperimentConfig, tell: Callable[[str], None]) -> None:
    """Plan each phase of the run if this machine has GPUs. Prints a warning, or raises ConfigError if a process does not fit its
    GPU."""
    cases = [Case(phase) for phase in phases(config)]
    if cases[0].devices:
        tell("computing the memory that each process needs, for up to minutes if the model is large")
    for case in cases:
        for finding in make_checks(checks_of("machine", cost="plan"), case).findings:
            text = f"{finding.value}; {finding.remedy}"
            if finding.state == "fail":
                raise ConfigError(f"allocation={case.config.allocation}: {text}")
            if finding.state == "warn":
                tell(f"{finding.name}: {text}")


def _submit(config: ExperimentConfig, arguments: argparse.Namespace, console: Console) -> int:
    """Submit the run as a Slurm job, in which the launcher itself runs, and follow it unless --detach is set."""
    run_dir, record = run_directory(config), submit_job(config)
    if arguments.json:
        print_json({"event": "submitted", "run_dir": str(run_dir), "job": record})
    say(console, f"{run_dir}: submitted as job {record.job_id}; its output is in {record.output}")
    if arguments.detach:
        return 0

    def write(text: str) -> None:
        (sys.stderr if arguments.json else sys.stdout).write(text)

    try:
        code = follow(record, write, partial(say, console))
    except KeyboardInterrupt:
        say(console, f"the job continues without this terminal; `asyncrl-launch stop {run_dir}` stops it")
        return 130
    if arguments.json:
        print_json({"event": "end", "exit_code": code})
    return code


def _leave(config: ExperimentConfig, arguments: argparse.Namespace, console: Console) -> int:
    """Start the launcher in a session of its own, wait until it runs the run, and return."""
    run_dir = run_directory(config)
    keep_private(run_dir, config.runtime.group)
    log = run_dir / OUTPUT_FILE
    words = [word for word in arguments.command_line if not _is_short_for(word, "--detach", "--json")]
    with log.open("ab") as output:  # the folder may be that of a running run, whose output stays
        launcher = subprocess.Popen(
            python_module("asyncrl.cli.main", *words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    started = False
    try:
        started = wait_until(
            lambda: launcher.poll() is not None or has_lock(launcher.pid, run_dir),
            limit_s=_START_LIMIT_S,
            every_s=_LOOK_S,
            clock=arguments.clock,
        )
    finally:
        if not started:  # also after Ctrl-C, which does not reach the launcher's session
            launcher.kill()
            launcher.wait()
    if launcher.returncode not in (None, 0):
        raise LaunchError(f"the run did not start; its output, in {log}:\n{tail_of(log)}")
    if arguments.json:
        print_json({"event": "left", "run_dir": str(run_dir), "pid": launcher.pid, "output": str(log)})
        return 0
    say(console, f"{run_dir}: runs without this terminal, as process {launcher.pid}. Its output is in {log}")
    for command, use in (("status", "its state"), ("logs", "its logs; -f follows them"), ("stop", "stop it")):
        say(console, f"  asyncrl-launch {command:<6} {run_dir}    {use}")
    return 0


def _is_short_for(word: str, *options: str) -> bool:
    """Whether argparse takes the word for one of the options."""
    return len(word) > len("--") and any(option.startswith(word) for option in options)


def _run_for_people(config: ExperimentConfig, num_prompts: int, console: Console, *, with_page: bool) -> int:
    run_dir = run_directory(config)
    steps = total_steps(config, num_prompts)
    say(console, f"{run_dir}: up to {steps} train steps; logs in {run_dir}/logs/latest")
    code = launched(config, num_prompts, RunView(run_dir, steps, console), with_page=with_page)
    if code == 0:
        print_summary(run_dir, console)
        say(console, _next_steps(run_dir))
    else:
        say(console, f"stopped; no process of the run is left. Logs: {run_dir}/logs/latest")
    return code


def _run_for_machines(config: ExperimentConfig, num_prompts: int, *, with_page: bool) -> int:
    run_dir = run_directory(config)
    view = JsonView(run_dir)
    processes = process_objects(_plan(phases(config)[0], num_prompts))
    view.emit("start", run_dir=str(run_dir), processes=processes, sizes=sizes(config, num_prompts))
    try:
        code = launched(config, num_prompts, view, with_page=with_page)
    except LaunchError as error:
        view.emit("end", exit_code=FAILED, **error_object("failed", redact_urls(str(error))))
        return FAILED
    if code == 0:
        view.emit("end", exit_code=0, summary=read_summary(run_dir))
    else:
        view.emit("end", exit_code=code)
    return code


def _plan(config: ExperimentConfig, num_prompts: int) -> list[ProcessSpec]:
    attempt = next_attempt(run_directory(config))
    return plan(config, attempt=attempt, num_prompts=num_prompts, devices=visible_devices())


class _ClosableView(View, Protocol):
    """A launcher's View that prints what is left at the end."""

    def close(self) -> None: ...


@contextlib.contextmanager
def _page(config: ExperimentConfig, view: View) -> Iterator[None]:
    """A page of the run, in a process of its own. It ends with the block, and with this process."""
    run_dir = run_directory(config)
    keep_private(run_dir, config.runtime.group)
    command = dying_with_parent(python_module("asyncrl.cli.main", "ui", str(run_dir), "--json"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as page:
        assert page.stdout is not None
        told = on_thread(page.stdout.readline)
        told.add_done_callback(lambda line: view.say(_page_text(line.result())))
        try:
            yield
        finally:
            page.kill()


def _page_text(line: bytes) -> str:
    try:
        return f"the page: {msgspec.json.decode(line)['url']}"
    except (*DECODE_ERRORS, KeyError):
        return f"there is no page: {line.decode(errors='replace').strip() or 'its process has ended'}"


def launched(config: ExperimentConfig, num_prompts: int, view: _ClosableView, *, with_page: bool = False) -> int:
    """Run a checked config to its end, and return the exit code. No process of the run is left. Raises LaunchError."""
    handler = _NoticeHandler(view)
    logging.getLogger("asyncrl").addHandler(handler)
    try:
        with _page(config, view) if with_page else contextlib.nullcontext():
            return LocalLauncher(config, num_prompts, view).run()
    finally:
        view.close()
        logging.getLogger("asyncrl").removeHandler(handler)


def shown_config(config: ExperimentConfig, num_prompts: int) -> ExperimentConfig:
    """The config as config.yaml shows it, of a run that starts anew on this machine."""
    facts = Facts(on_gpu=bool(visible_devices()), num_prompts=num_prompts, model_bytes=bytes_of_models(config))
    return resolve(config, facts)


def _dry_run(config: ExperimentConfig, num_prompts: int, arguments: argparse.Namespace, console: Console) -> int:
    folder = (arguments.output or run_directory(config) / "dry_run").expanduser().absolute()
    first, *later = phases(config)
    specs = _plan(first, num_prompts)
    shown = shown_config(config, num_prompts)
    write_dry_run(shown, specs, folder)
    for number, phase in enumerate(later, start=2):
        write_dry_run(shown, _plan(phase, num_prompts), folder / f"phase_{number}")
    if arguments.json:
        print_json(
            {
                "dry_run": str(folder),
                "run_dir": str(run_directory(config)),
                "processes": process_objects(specs),
                "sizes": sizes(config, num_prompts),
            }
        )
        return 0
    attempt = specs[0].config.worker.attempt
    console.print(process_table(f"{run_directory(config)}, attempt {attempt}: would start", specs))
    console.print(sizes_text(config, num_prompts), highlight=False)
    if not config.name_resolve.endpoints:
        say(console, "the run would also start a private etcd, and write its endpoint into the processes' configs")
    say(console, f"config.yaml and {len(specs)} resolved configs are in {folder}; nothing was started")
    return 0


def _next_steps(run_dir: Path) -> str:
    """A text with commands to try after a complete run."""
    activate = os.environ.get(ACTIVATE_ENV)
    program = "asyncrl-launch" if shutil.which("asyncrl-launch") else shlex.join(python_module("asyncrl.cli.main"))
    folder = os.path.relpath(run_dir) if run_dir.is_relative_to(Path.cwd()) else str(run_dir)
    lines = [f"  {activate}"] if activate else []
    lines += [
        f"  {program} plot {folder}        the curves: reward, off-policyness, lengths, throughput",
        f"  {program} logs {folder}        the logs of its processes, in time order",
    ]
    if (run_dir / TRAJECTORIES).is_dir():
        lines.append(f"  {program} inspect {folder}     its trajectories: text, versions, logprobs, rewards")
    else:
        lines.append(
            "  set record.trajectories=true in the next run, and `asyncrl-launch inspect` shows its trajectories token by token"
        )
    return "What next?\n" + "\n".join(lines)


class _NoticeHandler(logging.Handler):
    """Shows warnings that the launcher logs, for example about its session with etcd."""

    def __init__(self, view: _ClosableView) -> None:
        super().__init__(logging.WARNING)
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        self._view.notice(self.format(record))
