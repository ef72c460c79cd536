"""`asyncrl-launch audit`."""

from __future__ import annotations

import argparse

from rich.console import Console

from asyncrl.cli.commands.common import FAILED, Commands, add_run_command, print_json, say
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.launch.rundir import LaunchError
from asyncrl.weights.lineage import Audit, Stretch, audit

_DESCRIPTION = """Check the journals of a run. In the lineage of its newest weights:
  - every prompt was trained exactly once or rejected with a reason, whichever processes were killed and restarted;
  - no prompt was rejected because processes were lost (max_issues);
  - every trained group was admitted, pushed and stored once;
  - no trained group was older than manager.max_head_offpolicyness allows."""

_EPILOG = """examples:
  asyncrl-launch audit runs/sloppy-sorter/t0
  asyncrl-launch audit runs/sloppy-sorter/t0 --json | jq .problems

It reads journal/*.jsonl, and also works while the run is running.

exit codes: 0 no problem found; 1 problems were found and printed, or there is nothing to audit."""


def add_to(commands: Commands) -> None:
    add_run_command(commands, "audit", show, description=_DESCRIPTION, epilog=_EPILOG)


def show(arguments: argparse.Namespace, console: Console) -> int:
    """Check that every prompt was trained exactly once or rejected, despite all restarts."""
    run_dir = run_dir_of(arguments.run, arguments.overrides)
    try:
        found = audit(run_dir)
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if not found.lineage:
        raise LaunchError(f"{run_dir} has no journal/master.jsonl with an attempt in it: no run has begun there")
    if arguments.json:
        print_json(found)
    else:
        say(console, *audit_lines(found))
    return FAILED if found.problems else 0


def audit_lines(found: Audit) -> list[str]:
    """The audit as text lines."""
    reasons = ", ".join(f"{reason}: {count}" for reason, count in sorted(found.rejected.items()))
    lines = [
        f"{found.run_dir}: {'a complete run' if found.complete else 'an incomplete run'}",
        f"lineage   {', then '.join(map(_stretch_text, found.lineage))}",
        f"trained   {found.trained} prompts, in {found.steps} steps",
        f"rejected  {sum(found.rejected.values())} prompts{f' ({reasons})' if reasons else ''}",
    ]
    if found.voided_steps or found.voided_prompts:
        lines.append(f"void      {found.voided_steps} steps, {found.voided_prompts} prompts: outside this lineage")
    if found.unconfirmed:
        lines.append(
            f"          {found.unconfirmed} trained groups came from rollout workers that died before they recorded the push"
        )
    lines += [f"unchecked {text}" for text in found.unchecked]
    lines += [f"PROBLEM   {text}" for text in found.problems]
    if not found.problems:
        lines.append("ok: each of these prompts was trained or rejected once; no problem found")
    return lines


def _stretch_text(stretch: Stretch) -> str:
    return f"attempt {stretch.attempt} {f'to step {stretch.last}' if stretch.last is not None else f'from step {stretch.first}'}"
