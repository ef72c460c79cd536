"""`asyncrl-launch check`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from asyncrl.cli.checks import checks_of
from asyncrl.cli.commands.common import (
    CONFIG_ERROR,
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
)
from asyncrl.cli.doctor import package_versions
from asyncrl.cli.hub import with_local_models
from asyncrl.cli.tables import Column, FittedTable
from asyncrl.config.schema import ExperimentConfig
from asyncrl.dataflow.phases import phases
from asyncrl.launch.checks.checklist import Case, Finding, Report, make_checks
from asyncrl.launch.experiment import draft_experiment
from asyncrl.launch.program import ProcessSpec, plan, run_directory
from asyncrl.launch.redact import redact_text

_DESCRIPTION = """Check whether a config can run on this machine, and list its processes. Starts no run, writes nothing.

Without CONFIG it examines only the machine: cores, memory, disk, shared memory, open files, ports, GPUs, versions,
etcd, SGLang. With CONFIG it first validates every field and the files that it names, reports all problems at once, and
lists the processes. It also names the kernels of the trainer's attention, checks a small copy of the model's
architecture (60 s and 4 GiB at most), imports each agent and environment, and calls each reward function once: on the
first training prompt of its task, with the answer as the response, in a process with the run's limits
(rollout.reward_timeout_s, rollout.reward_memory_bytes). Secrets (passwords in URLs, tokens, API keys) are shown as ***."""

_EPILOG = """

examples:
  asyncrl-launch check                                         before anything else: can this machine run asyncrl?
  asyncrl-launch check configs/quickstart_cpu.yaml             can this config run here, and what would it start?
  asyncrl-launch check my_run.yaml allocation=transformers.d4+d4
  asyncrl-launch check my_run.yaml --json | jq '.machine[] | select(.state != "ok")'

exit codes: 0 it can run (perhaps with warnings); 1 the machine or a task fails a check, see the lines marked FAIL; 2 the
config cannot work: all its problems are printed, each with field, value and remedy."""

_MARKS = {"ok": "[green]ok[/]", "warn": "[bold yellow]warn[/]", "fail": "[bold red]FAIL[/]"}


def add_to(commands: Commands) -> None:
    add_config_command(commands, "check", check, description=_DESCRIPTION, epilog=_EPILOG, optional=True)


def check(arguments: argparse.Namespace, console: Console) -> int:
    """Examine this machine; with CONFIG also validate it, call each reward function once, and list the processes."""
    report, views = Report(Case(ExperimentConfig())), list[_Phase]()
    if arguments.config is not None:
        draft = with_local_models(draft_experiment(arguments.config, arguments.overrides), download=False)
        report = make_checks(checks_of("files", "tasks"), Case(draft.config), draft.wrong)
        if not report.problems:
            views = [_Phase.of(replace(report.case, config=phase)) for phase in phases(draft.config)]
    machine = [finding for view in views for finding in view.machine] or _examine(Case(ExperimentConfig()))
    findings = [*report.of("files"), *machine, *report.of("tasks")]
    if arguments.json:
        print_json(_as_json(report, views, machine, ok=not _failed(findings)))
    else:
        _print(report, views, machine, console)
        what = "this machine" if arguments.config is None else "this config"
        console.print(_verdict(findings, len(report.problems), what), highlight=False)
    return CONFIG_ERROR if report.problems else FAILED if _failed(findings) else 0


def _as_json(report: Report, views: Sequence[_Phase], machine: Sequence[Finding], *, ok: bool) -> dict[str, Any]:
    config = report.case.config
    shown = {"ok": ok, "machine": machine, "files": report.of("files"), "tasks": report.of("tasks")}
    if report.problems:
        shown |= {"ok": False, **error_object("config", redact_text("\n".join(report.lines())))}
        shown["problems"] = [redact_text(text) for text in report.problems]
    if views:
        first, *later = [
            {"allocation": view.allocation, "processes": process_objects(view.specs), "machine": view.machine}
            for view in views
        ]
        shown |= {"run_dir": str(run_directory(config)), "sizes": sizes(config, report.case.num_prompts)}
        shown |= {"processes": first["processes"], "machine": first["machine"], "phases": later}
    return shown | {"versions": package_versions()}


def _print(report: Report, views: Sequence[_Phase], machine: Sequence[Finding], console: Console) -> None:
    config = report.case.config
    for view in views:
        title = f": {view.allocation}" if len(views) > 1 else ""
        console.print(process_table(f"{run_directory(config)}{escape(title)}", view.specs))
        _print_findings("this machine", view.machine, console)
    if not views:
        shown = [finding for finding in machine if finding.state != "ok" or not report.problems]
        _print_findings("this machine", shown, console)
    _print_findings("files", report.of("files"), console)
    _print_findings("model and tasks", report.of("tasks"), console)
    if views:
        console.print(sizes_text(config, report.case.num_prompts), highlight=False)
    if report.problems:
        console.print("[bold red]config:[/]")
        say(console, *(f"  {text}" for text in redact_text("\n".join(report.lines())).splitlines()))


def _examine(case: Case) -> list[Finding]:
    """The findings about this machine, for a phase of the config if the case has its processes."""
    return make_checks(checks_of("machine"), case).findings


@dataclass(frozen=True)
class _Phase:
    """The processes of a phase of the allocation, and the findings about this machine for it."""

    allocation: str
    specs: list[ProcessSpec]
    machine: list[Finding]

    @classmethod
    def of(cls, case: Case) -> _Phase:
        specs = plan(case.config, attempt=1, num_prompts=case.num_prompts, devices=case.devices)
        return cls(case.config.allocation, specs, _examine(replace(case, specs=specs)))


def _failed(findings: Sequence[Finding]) -> list[str]:
    return [finding.name for finding in findings if finding.state == "fail"]


def _verdict(findings: Sequence[Finding], num_problems: int, what: str) -> str:
    if num_problems or _failed(findings):
        problems = [f"{num_problems} problem{'s' if num_problems > 1 else ''} of the config"] if num_problems else []
        until = escape(", and ".join([*problems, *filter(None, [", ".join(_failed(findings))])]))
        these = "these are" if num_problems else "this is"
        return f"[bold red]not yet[/]: {what} cannot run here until {these} fixed: {until}"
    warned = [finding.name for finding in findings if finding.state == "warn"]
    fit = "can run" if what == "this config" else "is fit"
    return f"[green]ok[/]: {what} {fit}{escape(f'; see the warnings: {chr(44).join(warned)}') if warned else ''}"


def _print_findings(title: str, findings: Sequence[Finding], console: Console) -> None:
    if not findings:
        return
    rows = []
    for finding in findings:
        found = escape(finding.value)
        if finding.remedy:
            found += f"\n[yellow]-> {escape(finding.remedy)}[/]"
        rows.append((_MARKS[finding.state], finding.name, found))
    console.print(FittedTable(title, ["", "", Column("", "text")], rows, show_header=False))
