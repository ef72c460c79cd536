"""`asyncrl-launch inspect`: a recorded trajectory as text, and per token its version, logprobs, mask, reward and advantage.

The tokenizer comes from the run that recorded the file. If no advantages are recorded, they are computed from that run's config,
as the trainer would. Without the run's configs, tokens are shown by their ids and without text. torch is imported only to compute
advantages.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape
from rich.text import Text
from yaml import YAMLError

from asyncrl.cli.commands.common import Commands, add_command, print_json, say
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.cli.run_files import RunFiles
from asyncrl.cli.tables import Column, FittedTable
from asyncrl.config.processes import MasterWorkerConfig, RolloutWorkerConfig
from asyncrl.config.schema import ConfigError
from asyncrl.data.evaluation_files import list_results, read_results
from asyncrl.data.sequence import KEY_SPECS, Array, SequenceSample
from asyncrl.data.trajectories import (
    FOLDER,
    SUFFIX,
    Trajectory,
    TrajectoryError,
    TrajectoryHeader,
    list_recording,
    read_header,
    read_trajectory,
)
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.launch.program import ProcessConfig, load_process_config
from asyncrl.launch.rundir import LaunchError, configs_dir
from asyncrl.protocol.versions import WeightVersion

_TOKENIZER_OF = ("rollout_worker_0", "recorder_0", "model_worker_0")
_OF_TOKENS = {key for key, spec in KEY_SPECS.items() if spec.layout == "token"}
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoding a token that is only a part of a character gives this
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's leading space, which decoding a single token drops


class TokenRow(Struct, frozen=True, kw_only=True):
    """One token and all its values. A field is None if the token has no such value."""

    position: int
    text: str | None
    id: int
    prompt: bool
    loss_mask: bool
    version: str | None
    behaviour_logprob: float | None
    proximal_logprob: float | None
    ref_logprob: float | None
    reward: float | None
    advantage: float | None


class SequenceRow(Struct, frozen=True, kw_only=True):
    """One response of the group."""

    index: int
    reward: float
    finish: str  # stop: ended by EOS; length: truncated
    prompt_tokens: int
    response_tokens: int
    version_start: str
    version_end: str
    offpolicyness: int | None  # versions by which its oldest token was behind when it was trained; None: not trained
    text: str | None


class View(Struct, frozen=True, kw_only=True):
    """One trajectory as `asyncrl-launch inspect` shows it. In the output of --json it is the field `trajectory`."""

    file: str
    ticket: str
    prompt: str  # e{epoch}-p{position}
    attempt: int
    head: int
    task: str
    trained: bool
    step: int
    position: int
    batch: int
    birth_time: float
    recorded_by: str
    recorded: float
    keys: list[str]
    prompt_text: str | None
    sequences: list[SequenceRow]
    sequence: int
    tokens: list[TokenRow]
    notes: list[str]  # what cannot be shown, and why


@dataclass(frozen=True)
class Surroundings:
    """The run's configs and tokenizer, which the file of a trajectory does not contain. None: not available."""

    master: MasterWorkerConfig | None
    rollout: RolloutWorkerConfig | None
    texts: Texts | None
    notes: list[str]


class Texts:
    """Decodes token ids, without torch."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    def piece(self, token: int) -> str:
        """Return the text of one token, including a leading space.

        A token that is only a part of a character is shown as the vocabulary writes it.
        """
        written = self._tokenizer.id_to_token(token) or ""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        if not text or _REPLACEMENT in text:
            return written or f"<{token}>"
        return f" {text}" if written.startswith(_METASPACE) and not text.startswith(" ") else text

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def visible(text: str, *, lines: bool = False) -> str:
    """Escape all characters that are not printable, so that text cannot control the terminal. lines: keep line ends."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown.replace("\\n", "\n") if lines and "\\n" not in text else shown


def surroundings_of(path: Path) -> Surroundings:
    """Read the configs and the tokenizer of the run that recorded <run>/trajectories/attempt_N/<file>. Notes say what is
    missing."""
    match = re.fullmatch(r"attempt_(\d+)", path.parent.name)
    if match is None or path.parent.parent.name != FOLDER:
        return Surroundings(None, None, None, ["the file is not in a run's folder: no text, no advantages"])
    run_dir, attempt = path.parents[2], int(match[1])
    configs = {name: _config(configs_dir(run_dir, attempt) / f"{name}.yaml") for name in ("master_0", *_TOKENIZER_OF)}
    master, rollout = configs["master_0"], configs["rollout_worker_0"]
    notes: list[str] = []
    tokenizer = next((config.tokenizer_path for name in _TOKENIZER_OF if (config := configs[name]) is not None), "")  # type: ignore[union-attr]
    texts = _texts(tokenizer or _tokenizer_of_run(run_dir), notes)
    return Surroundings(
        master if isinstance(master, MasterWorkerConfig) else None,
        rollout if isinstance(rollout, RolloutWorkerConfig) else None,
        texts,
        notes,
    )


def _config(path: Path) -> ProcessConfig | None:
    try:
        return load_process_config(path) if path.is_file() else None
    except (OSError, ValueError):  # for example of another release
        return None


def _tokenizer_of_run(run_dir: Path) -> str:
    try:
        config = OmegaConf.load(run_dir / "config.yaml")
    except (OSError, YAMLError, OmegaConfBaseException):
        return ""
    return str(OmegaConf.select(config, "tokenizer_path") or OmegaConf.select(config, "model_path") or "")


def _texts(tokenizer_path: str, notes: list[str]) -> Texts | None:
    if not tokenizer_path:
        notes.append("the run's config is missing: token ids only")
        return None
    try:
        return Texts(Path(tokenizer_path).expanduser())
    except Exception as error:  # tokenizers raises plain Exception
        notes.append(f"no text: the tokenizer at {tokenizer_path} cannot be read: {error}")
        return None


# ---------------------------------------------------------------------------------------------------------- the view


def make_view(path: Path, *, sequence: int = 0, around: Surroundings | None = None, compute: bool = True) -> View:
    """Read a trajectory's file. around: the configs and tokenizer of its run; None: read them, too. compute: advantages that are
    not recorded, which imports torch. Raises TrajectoryError; IndexError if the group has no such sequence."""
    trajectory = read_trajectory(path)
    header, sample = trajectory.header, trajectory.sample
    around = around or surroundings_of(path.absolute())
    notes = list(around.notes)
    sequences = sequence_rows(trajectory, around.texts)
    if not 0 <= sequence < len(sequences):
        raise IndexError(f"--sequence {sequence}: the group has the sequences 0 to {len(sequences) - 1}")
    advantages_T = _advantages(path, trajectory, around.master, notes, compute=compute)
    prompt_text = around.texts.text(sample.data["packed_prompts"].tolist()) if around.texts else None
    meta = header.meta
    return View(
        file=str(path),
        ticket=meta.ticket_id,
        prompt=f"e{meta.locator.epoch}-p{meta.locator.position}",
        attempt=meta.attempt,
        head=meta.head,
        task=task_name(meta.task_id, around.rollout),
        trained=header.trained,
        step=header.step,
        position=header.position,
        batch=header.batch,
        birth_time=meta.birth_time,
        recorded_by=header.recorded_by,
        recorded=header.time,
        keys=list(sample.keys),
        prompt_text=prompt_text,
        sequences=sequences,
        sequence=sequence,
        tokens=token_rows(sample, sequence, around.texts, advantages_T),
        notes=notes,
    )


def task_name(task_id: int, rollout: RolloutWorkerConfig | None) -> str:
    """The name of a task id: ids number the tasks in alphabetical order."""
    names = sorted(rollout.rollout.tasks) if rollout is not None else []
    return names[task_id] if 0 <= task_id < len(names) else str(task_id)


def sequence_rows(trajectory: Trajectory, texts: Texts | None) -> list[SequenceRow]:
    header, sample = trajectory.header, trajectory.sample
    tokens, prompts = sample.slices("packed_input_ids")[0], sample.slices("prompt_mask")[0]
    rows = []
    for index, (ids, prompt_mask) in enumerate(zip(tokens, prompts, strict=True)):
        oldest = WeightVersion.unpack(int(sample.data["version_start"][index]))
        newest = WeightVersion.unpack(int(sample.data["version_end"][index]))
        rows.append(
            SequenceRow(
                index=index,
                reward=header.meta.rewards[index],
                finish="length" if sample.data["seq_no_eos_mask"][index] else "stop",
                prompt_tokens=int(prompt_mask.sum()),
                response_tokens=header.meta.response_lengths[index],
                version_start=str(oldest),
                version_end=str(newest),
                offpolicyness=header.step - oldest.version if header.trained else None,
                text=texts.text(ids[~prompt_mask].tolist()) if texts else None,
            )
        )
    return rows


def token_rows(
    sample: SequenceSample, sequence: int, texts: Texts | None, advantages_T: Array | None
) -> list[TokenRow]:
    """Every token of one sequence."""
    start, end = sample.cu_seqlens()[sequence : sequence + 2].tolist()
    here = {key: array[start:end].tolist() for key, array in sample.data.items() if key in _OF_TOKENS}
    here["advantages"] = advantages_T[start:end].tolist() if advantages_T is not None else None
    mask, nothing = here["loss_mask"], [None] * (end - start)
    rewards = [value or None for value in here.get("dense_rewards", nothing)]
    if True in mask:
        last = end - start - 1 - mask[::-1].index(True)
        rewards[last] = (rewards[last] or 0.0) + float(sample.data["rewards"][sequence])

    def of_trained(key: str) -> list[float | None]:
        return [value if on else None for value, on in zip(here.get(key) or nothing, mask, strict=True)]

    columns = {
        "position": range(end - start),
        "text": [texts.piece(token) for token in here["packed_input_ids"]] if texts else nothing,
        "id": here["packed_input_ids"],
        "prompt": here["prompt_mask"],
        "loss_mask": mask,
        "version": [str(WeightVersion.unpack(packed)) if packed >= 0 else None for packed in here["versions"]],
        "behaviour_logprob": of_trained("packed_logprobs"),
        "proximal_logprob": of_trained("proximal_logprobs"),
        "ref_logprob": of_trained("packed_ref_logprobs"),
        "reward": rewards,
        "advantage": of_trained("advantages"),
    }
    return [TokenRow(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)]


# -------------------------------------------------------------------------------------------------------- advantages


def _advantages(
    path: Path, trajectory: Trajectory, master: MasterWorkerConfig | None, notes: list[str], *, compute: bool
) -> Array | None:
    """Advantages per token of the group: the recorded ones or, if none were recorded (mode=rollout_only), computed from the run's
    config. None if they cannot be computed; a note gives the reason.
    """
    if "advantages" in trajectory.sample.keys:
        trained: Array = trajectory.sample.data["advantages"]
        return trained
    if not compute:
        notes.append("no advantages are recorded; `asyncrl-launch inspect` computes them")
        return None
    if master is None:
        notes.append("no advantages: the config of the run's master was not found")
        return None
    samples = [trajectory.sample]
    if master.train.ppo.advantage_norm == "batch":  # normalization needs the whole batch
        samples += _others_of_batch(path, trajectory.header)
        if len(samples) < trajectory.header.batch:
            notes.append(
                f"advantages are normalised over {len(samples)} of the batch's {trajectory.header.batch} groups"
            )
    from asyncrl.model.cpu_ranks import CpuRanks  # imports torch
    from asyncrl.model.interfaces import AdvantagesInterface, LocalBatch

    interface = AdvantagesInterface(build_dataflow(master.train).mfcs["advantages"], master.train)
    missing = sorted({key for sample in samples for key in interface.keys if key not in sample.keys})
    if missing:
        notes.append(f"no advantages: they need the keys {missing}, which only runs with train steps record")
        return None
    if master.train.ppo.kl_coef > 0 and master.train.ppo.kl_adaptive:
        notes.append("advantages use the run's initial KL coefficient (train.ppo.kl_adaptive changes it during a run)")
    if interface.value_norm is not None:
        notes.append(
            "advantages use the run's initial units of values (train.critic.value_norm changes them during a run)"
        )
    batch = LocalBatch.make(
        SequenceSample.gather([sample.select_keys(interface.keys) for sample in samples]), interface.keys
    )
    made, _ = interface.compute(CpuRanks("inspect", None), batch)
    whole: Array = made.advantages_T.numpy()
    return whole[: trajectory.sample.total_tokens()]


def _others_of_batch(path: Path, header: TrajectoryHeader) -> list[SequenceSample]:
    others = []
    for file in list_recording(path.parent):
        if not file.name.startswith(f"step_{header.step:08d}-") or file.name == path.name:
            continue
        try:
            others.append(read_trajectory(file).sample)
        except TrajectoryError:
            continue  # skip a broken file; a note shows how many groups of the batch were read
    return others


_LISTED = 20  # files listed without --limit
_TOKENS = 100  # tokens shown without --limit
_TEXT_CHARACTERS = 2000

_DESCRIPTION = """Show a recorded trajectory: prompt and responses, then a table with text, id, weight version, logprobs, loss
mask, reward and advantage of each token. For a run, first list its recorded trajectories, newest first. With
--evaluation: the results of an evaluation by prompt.

A run records trajectories with record.trajectories=true; mode=rollout_only always records. Advantages that were not
recorded are computed from the run's config, as the trainer would."""

_EPILOG = """examples:
  asyncrl-launch inspect runs/mine/t0                          list the trajectories, and show the newest
  asyncrl-launch inspect runs/mine/t0 --index 3 --sequence 1   the fourth of the list, its second response
  asyncrl-launch inspect runs/mine/t0 --ticket a1-e0-p17       the group of a prompt (part of the ticket's id is enough)
  asyncrl-launch inspect runs/mine/t0 --evaluation --limit 500 the rewards and answers of the newest evaluation, by prompt
  asyncrl-launch inspect FILE.safetensors --limit 1000         one file, up to 1000 tokens
  asyncrl-launch inspect FILE.safetensors --json | jq '.trajectory.tokens[] | select(.advantage < 0) | .text'

exit codes: 0 shown; 1 nothing is recorded, or the file is broken; 2 wrong arguments."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "inspect", inspect, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument(
        "target",
        metavar="FILE_OR_RUN",
        nargs="?",
        default="",
        help="a recorded file, a run's folder, or the run's CONFIG (default: the only run under ./runs)",
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="the overrides the run was started with")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ticket", metavar="T", help="show the newest trajectory whose ticket id contains T")
    which.add_argument("--index", metavar="N", type=int, help="show number N of the list; 0 is the newest")
    which.add_argument(
        "--evaluation",
        metavar="ID",
        nargs="?",
        const="",
        help="show the results by prompt of this evaluation, such as a1-s20 (without ID: the newest one)",
    )
    parser.add_argument(
        "--sequence", metavar="K", type=int, default=0, help="number of the response in the group (default 0)"
    )
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        help=f"most rows to show (default {_LISTED} files, {_TOKENS} tokens; with --json all)",
    )
    parser.add_argument("--prompt", action="store_true", help="show the prompt's tokens in the table too")


def inspect(arguments: argparse.Namespace, console: Console) -> int:
    """Show a recorded trajectory: text, tokens, versions, logprobs, rewards and advantages side by side."""
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: must be at least 1")
    if arguments.evaluation is not None:
        return _show_evaluation(run_dir_of(arguments.target, arguments.overrides), arguments, console)
    listed: list[tuple[Path, TrajectoryHeader]] = []
    try:
        if arguments.target.endswith(SUFFIX):
            chosen, total = Path(arguments.target), 1
        else:
            files = RunFiles(run_dir_of(arguments.target, arguments.overrides)).read().recorded()[::-1]
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


def _show_evaluation(run_dir: Path, arguments: argparse.Namespace, console: Console) -> int:
    files = list_results(run_dir)
    names = [file.stem for file in files]
    wanted = arguments.evaluation or (names[-1] if names else "")
    if wanted not in names:
        there = f"it has {', '.join(names[-8:])}" if names else "it has none (eval.keep, eval.prompts and eval.sets)"
        raise LaunchError(f"{run_dir} has no results of evaluation {wanted!r}; {there}")
    try:
        results = read_results(files[names.index(wanted)])
    except ValueError as error:
        raise LaunchError(str(error)) from error
    shown = results[: arguments.limit or (len(results) if arguments.json else _LISTED)]
    if arguments.json:
        print_json({"evaluation": wanted, "total": len(results), "results": shown})
        return 0
    columns: list[Column | str] = ["set", "mode", "line", "task", "reward", "tokens", Column("answers", "text")]
    rows = [
        (
            escape(result.eval_set),
            result.mode,
            str(result.line),
            escape(result.task),
            f"{_mean(result.rewards):.3f}" if result.rewards else "-",
            f"{_mean(result.response_lengths):.0f}" if result.rewards else "-",
            escape(result.reason or ", ".join("none" if answer is None else answer for answer in result.answers)),
        )
        for result in shown
    ]
    console.print(FittedTable(f"Evaluation {wanted}", columns, rows))
    say(console, f"{len(shown)} of {len(results)} prompts; all: {files[names.index(wanted)]}")
    return 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _choose(arguments: argparse.Namespace, files: list[Path]) -> Path:
    if arguments.ticket is not None:
        for file in files:
            if arguments.ticket in read_header(file).meta.ticket_id:
                return file
        raise IndexError(f"--ticket {arguments.ticket}: none of the {len(files)} recorded trajectories has it")
    index = arguments.index or 0
    if not 0 <= index < len(files):
        raise IndexError(f"--index {index}: use 0 to {len(files) - 1}")
    return files[index]


# ------------------------------------------------------------------------------------------------------------ the list


def _entry(index: int, file: Path, header: TrajectoryHeader) -> dict[str, object]:
    """One entry of the list of trajectories, for JSON."""
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
    rows: list[Sequence[str | Text]] = []
    for index, (_, header) in enumerate(listed):
        meta = header.meta
        rewards = " ".join(f"{reward:g}" for reward in meta.rewards[:8]) + (" ..." if len(meta.rewards) > 8 else "")
        rows.append(
            (
                str(index),
                str(header.step),
                Text(visible(meta.ticket_id)),
                f"{sum(meta.rewards) / len(meta.rewards):.3f}  ({rewards})",
                f"{min(meta.response_lengths)} to {max(meta.response_lengths)}",
                _versions(WeightVersion.unpack(min(meta.version_start)), WeightVersion.unpack(max(meta.version_end))),
                time.strftime("%H:%M:%S", time.localtime(header.time)),
            )
        )
    step, reward = "step" if listed[0][1].trained else "batch", Column("reward (mean, of each)", "text")
    console.print(FittedTable("", ["", step, "ticket", reward, "response tokens", "versions", "recorded"], rows))


def _versions(oldest: WeightVersion, newest: WeightVersion) -> str:
    return str(oldest) if oldest == newest else f"{oldest} to v{newest.version}"


# ------------------------------------------------------------------------------------------------------ one trajectory


def print_view(view: View, console: Console, *, limit: int, with_prompt: bool) -> None:
    """Print a trajectory with at most `limit` tokens. with_prompt: include the prompt's tokens."""
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
        say(console, f"{hidden} tokens of the prompt are not shown (--prompt)")
    if len(rows) > limit:
        say(console, f"{len(rows) - limit} more tokens are not shown (--limit)")


def _print_text(label: str, text: str | None, console: Console) -> None:
    if text is None:
        return
    shown = visible(text[:_TEXT_CHARACTERS], lines=True) + (" ..." if len(text) > _TEXT_CHARACTERS else "")
    console.print(Text(label, "bold"))
    console.print(Text(shown), highlight=False, soft_wrap=True)


def _sequence_table(view: View) -> FittedTable:
    """The responses of the group. Only the response is cropped; columns that do not fit are left out, from the right."""
    optional = (Column("versions", "optional"), Column("off-policy", "optional"))
    return FittedTable(
        "the group",
        ["", "reward", "end", "tokens", *optional, Column("response", "free")],
        map(_sequence_cells, view.sequences),
        bold_row=view.sequence,
    )


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


def _token_table(rows: list[TokenRow], title: str) -> FittedTable:
    columns = ["", "text", "id", "version", "behaviour", "proximal", "reference", "trained", "reward", "advantage"]
    cells = [_token_cells(row) for row in rows]
    there = [index for index, name in enumerate(columns) if name in ("", "id") or any(str(row[index]) for row in cells)]
    shown = [Column(columns[index], justify="left" if columns[index] == "text" else "right") for index in there]
    return FittedTable(title, shown, [[row[index] for index in there] for row in cells])


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
