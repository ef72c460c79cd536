"""`asyncrl-launch check`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    sizes,
    sizes_text,
)
from asyncrl.cli.doctor import package_versions
from asyncrl.cli.hub import find_local_models
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
lists the processes. It also checks a small copy of the model's architecture (60 s and 4 GiB at most), imports each agent
and environment, and calls each reward function once: on the first training prompt of its task, with the answer as the
response, in a process with the run's limits (rollout.reward_timeout_s, rollout.reward_memory_bytes). Secrets (passwords
in URLs, tokens, API keys) are shown as ***."""

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
    if arguments.config is None:
        return _check_machine(arguments, console)
    draft = draft_experiment(arguments.config, arguments.overrides)
    config, missing = find_local_models(draft.config, download=False)
    report = make_checks(checks_of("files", "tasks"), Case(config), [*draft.wrong, *missing])
    if report.problems:
        return _refuse(report, arguments, console)
    num_prompts, files, tasks = report.case.num_prompts, report.of("files"), report.of("tasks")
    views = [_Phase.of(replace(report.case, config=phase)) for phase in phases(config)]
    findings = [*files, *(finding for view in views for finding in view.machine), *tasks]
    if arguments.json:
        first, *later = views
        print_json(
            {
                "ok": not _failed(findings),
                "run_dir": str(run_directory(config)),
                "processes": process_objects(first.specs),
                "sizes": sizes(config, num_prompts),
                "machine": first.machine,
                "phases": [
                    {
                        "allocation": view.allocation,
                        "processes": process_objects(view.specs),
                        "machine": view.machine,
                    }
                    for view in later
                ],
                "files": files,
                "tasks": tasks,
                "versions": package_versions(),
            }
        )
    else:
        for view in views:
            title = f": {view.allocation}" if len(views) > 1 else ""
            console.print(process_table(f"{run_directory(config)}{escape(title)}", view.specs))
            _print_findings("this machine", view.machine, console)
        _print_findings("files", files, console)
        _print_findings("model and tasks", tasks, console)
        console.print(sizes_text(config, num_prompts), highlight=False)
        console.print(_verdict(findings, "this config"), highlight=False)
    return FAILED if _failed(findings) else 0


def _check_machine(arguments: argparse.Namespace, console: Console) -> int:
    findings = _examine(Case(ExperimentConfig()))
    if arguments.json:
        print_json({"ok": not _failed(findings), "machine": findings, "versions": package_versions()})
    else:
        _print_findings("this machine", findings, console)
        console.print(_verdict(findings, "this machine"), highlight=False)
    return FAILED if _failed(findings) else 0


def _refuse(report: Report, arguments: argparse.Namespace, console: Console) -> int:
    """Report all problems of a config that cannot work, after what is known about the machine and the tasks."""
    machine, tasks = _examine(Case(ExperimentConfig())), report.of("tasks")
    message = redact_text("\n".join(report.lines()))
    failed = _failed([*machine, *tasks])
    if arguments.json:
        found = {"problems": [redact_text(text) for text in report.problems], "machine": machine, "tasks": tasks}
        print_json({"ok": False, **error_object("config", message), **found, "versions": package_versions()})
        return CONFIG_ERROR
    _print_findings("this machine", [finding for finding in machine if finding.state != "ok"], console)
    _print_findings("files", report.of("files"), console)
    _print_findings("model and tasks", tasks, console)
    console.print("[bold red]config:[/]")
    for text in message.splitlines():
        console.print(f"  {text}", markup=False, highlight=False, soft_wrap=True)
    problems = f"{len(report.problems)} problem{'s' if len(report.problems) > 1 else ''} of the config"
    also = f", and {', '.join(failed)}" if failed else ""
    console.print(f"[bold red]not yet[/]: this config cannot run here until these are fixed: {escape(problems + also)}")
    return CONFIG_ERROR


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


def _verdict(findings: Sequence[Finding], what: str) -> str:
    if failed := _failed(findings):
        return f"[bold red]not yet[/]: {what} cannot run here until this is fixed: {escape(', '.join(failed))}"
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
