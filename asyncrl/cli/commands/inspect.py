"""`asyncrl-launch inspect`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncrl.cli.commands.common import Commands, add_command, print_json, run_dir_of
from asyncrl.cli.inspection import SequenceRow, TokenRow, View, make_view, visible
from asyncrl.config.schema import ConfigError
from asyncrl.data.trajectories import (
    SUFFIX,
    TrajectoryError,
    TrajectoryHeader,
    find_recording,
    list_recording,
    read_header,
    recording_dir,
    step_of,
)
from asyncrl.launch.rundir import LaunchError
from asyncrl.protocol.messages import WeightVersion
from asyncrl.weights.lineage import lineage_of, read_attempts

_LISTED = 20  # files, where --limit says nothing
_TOKENS = 100
_TEXT_CHARACTERS = 2000

_DESCRIPTION = """Show a recorded trajectory: prompt and responses, then token by token the text, id, weight version,
logprobs, loss mask, reward and advantage side by side. Given a run, list what it recorded, newest first, too.

A run records with record.trajectories=true; mode=rollout_only always does. Advantages that were not recorded are
computed as the trainer would, from the run's config."""

_EPILOG = """examples:
  asyncrl-launch inspect runs/mine/t0                          what was recorded, and the newest
  asyncrl-launch inspect runs/mine/t0 --index 3 --sequence 1   the fourth of the list, its second response
  asyncrl-launch inspect runs/mine/t0 --ticket a1-e0-p17       the group of a prompt (a part of the ticket's id will do)
  asyncrl-launch inspect FILE.safetensors --limit 1000         one file, up to 1000 tokens
  asyncrl-launch inspect FILE.safetensors --json | jq '.trajectory.tokens[] | select(.advantage < 0) | .text'

exit codes: 0 shown; 1 nothing is recorded there, or the file is broken; 2 wrong arguments."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "inspect", inspect, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="FILE_OR_RUN", help="a recorded file, a run's folder, or the run's CONFIG")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides the run was started with")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ticket", metavar="T", help="the newest one whose ticket id contains T")
    which.add_argument("--index", metavar="N", type=int, help="number N of the list; 0 is the newest")
    parser.add_argument(
        "--sequence", metavar="K", type=int, default=0, help="response of the group, from 0 (default 0)"
    )
    parser.add_argument(
        "--limit", metavar="N", type=int, help=f"rows at most (default {_LISTED} files, {_TOKENS} tokens; --json all)"
    )
    parser.add_argument("--prompt", action="store_true", help="show the prompt's tokens in the table too")


def inspect(arguments: argparse.Namespace, console: Console) -> int:
    """Show a recorded trajectory: text, tokens, versions, logprobs, rewards and advantages side by side."""
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: show at least one row")
    listed: list[tuple[Path, TrajectoryHeader]] = []
    try:
        if arguments.target.endswith(SUFFIX):
            chosen, total = Path(arguments.target), 1
        else:
            files = _recorded(_folder(arguments))[::-1]
            total = len(files)
            chosen = _choose(arguments, files)
            limit = arguments.limit or (total if arguments.json else _LISTED)
            if arguments.ticket is None and arguments.index is None:
                listed = [(file, read_header(file)) for file in files[:limit]]
        view = make_view(chosen, sequence=arguments.sequence)
    except TrajectoryError as error:
        raise LaunchError(str(error)) from error
    except IndexError as error:
        raise ConfigError(str(error)) from error
    if arguments.json:
        entries = [_entry(index, file, header) for index, (file, header) in enumerate(listed)]
        if arguments.limit:
            view = msgspec.structs.replace(view, tokens=view.tokens[: arguments.limit])
        print_json({"total": total, "trajectories": entries, "trajectory": view})
        return 0
    if listed:
        _print_list(listed, total, console)
    print_view(view, console, limit=arguments.limit or _TOKENS, with_prompt=arguments.prompt)
    return 0


def _folder(arguments: argparse.Namespace) -> Path:
    return run_dir_of(arguments.target, arguments.overrides)


def _recorded(folder: Path) -> list[Path]:
    """What a folder holds; of a run that has gone on from checkpoints what led to its newest weights, without what was void."""
    newest = find_recording(folder)
    try:
        lineage = lineage_of(read_attempts(folder))
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if lineage is None or newest != recording_dir(folder, lineage.newest):
        return list_recording(newest)
    stretches = [(recording_dir(folder, stretch.attempt), stretch) for stretch in lineage.stretches]
    return [
        file
        for place, stretch in stretches
        for file in list_recording(place)
        if stretch.has(step_of(file) + 1)  # recorded under the version that it was trained on
    ]


def _choose(arguments: argparse.Namespace, files: list[Path]) -> Path:
    if arguments.ticket is not None:
        for file in files:
            if arguments.ticket in read_header(file).meta.ticket_id:
                return file
        raise IndexError(f"--ticket {arguments.ticket}: none of the {len(files)} recorded ones has it")
    index = arguments.index or 0
    if not 0 <= index < len(files):
        raise IndexError(f"--index {index}: there are 0 to {len(files) - 1}")
    return files[index]


# ------------------------------------------------------------------------------------------------------------ the list


def _entry(index: int, file: Path, header: TrajectoryHeader) -> dict[str, object]:
    """A line of the list, for machines."""
    meta = header.meta
    return {
        "index": index,
        "file": str(file),
        "ticket": meta.ticket_id,
        "step": header.step,
        "trained": header.trained,
        "rewards": meta.rewards,
        "response_lengths": meta.response_lengths,
        "version_min": str(WeightVersion.unpack(min(meta.version_start))),
        "version_max": str(WeightVersion.unpack(max(meta.version_end))),
        "time": header.time,
    }


def _print_list(listed: list[tuple[Path, TrajectoryHeader]], total: int, console: Console) -> None:
    title = f"{listed[0][0].parent}: {total} trajectories" + (
        f", the newest {len(listed)}" if len(listed) < total else ""
    )
    console.print(Text(title, "italic"), highlight=False, soft_wrap=True)
    table = Table()
    step = "step" if listed[0][1].trained else "batch"
    for column in ("", step, "ticket", "reward (mean, of each)", "response tokens", "versions", "recorded"):
        table.add_column(column)
    for index, (_, header) in enumerate(listed):
        meta = header.meta
        rewards = " ".join(f"{reward:g}" for reward in meta.rewards[:8]) + (" ..." if len(meta.rewards) > 8 else "")
        table.add_row(
            str(index),
            str(header.step),
            Text(visible(meta.ticket_id)),
            f"{sum(meta.rewards) / len(meta.rewards):.3f}  ({rewards})",
            f"{min(meta.response_lengths)} to {max(meta.response_lengths)}",
            _versions(WeightVersion.unpack(min(meta.version_start)), WeightVersion.unpack(max(meta.version_end))),
            time.strftime("%H:%M:%S", time.localtime(header.time)),
        )
    console.print(table)


def _versions(oldest: WeightVersion, newest: WeightVersion) -> str:
    return str(oldest) if oldest == newest else f"{oldest} to v{newest.version}"


# ------------------------------------------------------------------------------------------------------ one trajectory


def print_view(view: View, console: Console, *, limit: int, with_prompt: bool) -> None:
    """Show a trajectory, with at most limit tokens, those of the prompt among them if with_prompt."""
    used = f"train step {view.step + 1} (on version {view.step})" if view.trained else f"batch {view.step}, not trained"
    born = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(view.birth_time))
    for label, text in (
        ("file", view.file),
        (
            "ticket",
            f"{view.ticket}   prompt {view.prompt}   task {view.task}   attempt {view.attempt}   head {view.head}",
        ),
        ("used in", f"{used}, group {view.position} of {view.batch}"),
        ("born", f"{born}, recorded {view.recorded - view.birth_time:.1f} s later by {view.recorded_by}"),
        ("keys", " ".join(view.keys)),
        *(("note", note) for note in view.notes),
    ):
        line = Text(f"{label:<9}", "bold").append(visible(text), "yellow" if label == "note" else "not bold")
        console.print(line, highlight=False, soft_wrap=True)
    _print_text("prompt", view.prompt_text, console)
    console.print(_sequence_table(view))
    chosen = view.sequences[view.sequence]
    _print_text(f"response {view.sequence}", chosen.text, console)
    rows = [row for row in view.tokens if with_prompt or not row.prompt]
    console.print(_token_table(rows[:limit], f"sequence {view.sequence}, token by token"))
    hidden = len(view.tokens) - len(rows)
    if hidden:
        console.print(f"{hidden} tokens of the prompt are not shown (--prompt)", highlight=False)
    if len(rows) > limit:
        console.print(f"{len(rows) - limit} more tokens are not shown (--limit)", highlight=False)


def _print_text(label: str, text: str | None, console: Console) -> None:
    if text is None:
        return
    shown = visible(text[:_TEXT_CHARACTERS], lines=True) + (" ..." if len(text) > _TEXT_CHARACTERS else "")
    console.print(Text(label, "bold"))
    console.print(Text(shown), highlight=False, soft_wrap=True)


def _sequence_table(view: View) -> Table:
    table = Table(title="the group", title_justify="left")
    for column in ("", "reward", "end", "tokens", "versions", "off-policy", "response"):
        table.add_column(column, no_wrap=True, overflow="ellipsis")
    for row in view.sequences:
        table.add_row(*_sequence_cells(row), style="bold" if row.index == view.sequence else None)
    return table


def _sequence_cells(row: SequenceRow) -> list[str | Text]:
    versions = _versions(WeightVersion.parse(row.version_start), WeightVersion.parse(row.version_end))
    return [
        str(row.index),
        f"{row.reward:g}",
        row.finish,
        f"{row.prompt_tokens} + {row.response_tokens}",
        versions,
        "" if row.offpolicyness is None else str(row.offpolicyness),
        Text(visible(row.text or "")[:200]),
    ]


def _token_table(rows: list[TokenRow], title: str) -> Table:
    columns = ["", "text", "id", "version", "behaviour", "proximal", "reference", "trained", "reward", "advantage"]
    cells = [_token_cells(row) for row in rows]
    there = [index for index, name in enumerate(columns) if name in ("", "id") or any(str(row[index]) for row in cells)]
    table = Table(title=title, title_justify="left")
    for index in there:
        table.add_column(columns[index], justify="left" if columns[index] == "text" else "right")
    for row in cells:
        table.add_row(*(row[index] for index in there))
    return table


def _token_cells(row: TokenRow) -> list[str | Text]:
    colour = "" if not row.advantage else "green" if row.advantage > 0 else "red"
    return [
        str(row.position),
        Text(f"'{visible(row.text)}'" if row.text is not None else "", "dim" if not row.loss_mask else ""),
        str(row.id),
        row.version or "",
        _number(row.behaviour_logprob),
        _number(row.proximal_logprob),
        _number(row.ref_logprob),
        "yes" if row.loss_mask else "no",
        "" if row.reward is None else f"{row.reward:g}",
        Text(_number(row.advantage, sign="+"), colour),
    ]


def _number(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{value:{sign}.4f}"
