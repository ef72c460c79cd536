"""A recorded trajectory as somebody looks at it: text, and per token version, logprobs, mask, reward and advantage side by side.

What the file does not hold is found in the run it was recorded in: the tokenizer, and the config from which the trainer would
compute advantages, where none are recorded. It works without either: token ids only. No torch, but where advantages are computed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec import Struct
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from asyncrl.config.schema import MasterWorkerConfig, RolloutWorkerConfig
from asyncrl.data.sequence import Array, SequenceSample
from asyncrl.data.trajectories import (
    FOLDER,
    Trajectory,
    TrajectoryError,
    TrajectoryHeader,
    list_recording,
    read_trajectory,
)
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.launch.program import ProcessConfig, load_process_config
from asyncrl.launch.rundir import configs_dir
from asyncrl.protocol.messages import WeightVersion

_TOKENIZER_OF = ("rollout_worker_0", "recorder_0", "model_worker_0")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what a piece of a character decodes to
_METASPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a leading space, which decoding one token drops


class TokenRow(Struct, frozen=True, kw_only=True):
    """One token, everything about it side by side. None: there is no such thing for it."""

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
    finish: str  # stop: ended by EOS; length: cut
    prompt_tokens: int
    response_tokens: int
    version_start: str
    version_end: str
    offpolicyness: int | None  # of its oldest token, in the train step that used it
    text: str | None


class View(Struct, frozen=True, kw_only=True):
    """What `asyncrl-launch inspect` shows, and prints with --json."""

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
    notes: list[str]  # what could not be shown, and why


@dataclass(frozen=True)
class Surroundings:
    """What the run knows that the file does not."""

    master: MasterWorkerConfig | None
    rollout: RolloutWorkerConfig | None
    texts: Texts | None
    notes: list[str]


class Texts:
    """Token ids to text, without torch."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))

    def piece(self, token: int) -> str:
        """One token's text, a leading space included. A part of a character is shown as the vocabulary writes it."""
        written = self._tokenizer.id_to_token(token) or ""
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        if not text or _REPLACEMENT in text:
            return written or f"<{token}>"
        return f" {text}" if written.startswith(_METASPACE) and not text.startswith(" ") else text

    def text(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def visible(text: str, *, lines: bool = False) -> str:
    """Text that does nothing to a terminal: what is not printable is escaped. lines: line ends stay."""
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown.replace("\\n", "\n") if lines and "\\n" not in text else shown


def surroundings_of(path: Path) -> Surroundings:
    """Of a trajectory's file: <run>/trajectories/attempt_N/<file>."""
    match = re.fullmatch(r"attempt_(\d+)", path.parent.name)
    if match is None or path.parent.parent.name != FOLDER:
        return Surroundings(None, None, None, ["the file lies in no run: no text, no advantages"])
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
    except (OSError, ValueError, YAMLError, OmegaConfBaseException):  # of another release, say
        return None


def _tokenizer_of_run(run_dir: Path) -> str:
    try:
        config = OmegaConf.load(run_dir / "config.yaml")
    except (OSError, YAMLError, OmegaConfBaseException):
        return ""
    return str(OmegaConf.select(config, "tokenizer_path") or OmegaConf.select(config, "model_path") or "")


def _texts(tokenizer_path: str, notes: list[str]) -> Texts | None:
    if not tokenizer_path:
        notes.append("the run's config is not there: token ids only")
        return None
    try:
        return Texts(Path(tokenizer_path).expanduser())
    except Exception as error:  # tokenizers raises nothing narrower
        notes.append(f"no text: the tokenizer at {tokenizer_path} cannot be read: {error}")
        return None


# ---------------------------------------------------------------------------------------------------------- the view


def make_view(path: Path, *, sequence: int = 0, advantages: bool = True) -> View:
    """Read a file and gather what there is about it. Raises TrajectoryError, and IndexError for a sequence it does not have."""
    trajectory = read_trajectory(path)
    header, sample = trajectory.header, trajectory.sample
    around = surroundings_of(path.absolute())
    notes = list(around.notes)
    sequences = sequence_rows(trajectory, around.texts)
    if not 0 <= sequence < len(sequences):
        raise IndexError(f"--sequence {sequence}: the group has the sequences 0 to {len(sequences) - 1}")
    advantages_T = _advantages(path, trajectory, around.master, notes) if advantages else None
    prompt_text = around.texts.text(sample.data["packed_prompts"].tolist()) if around.texts else None
    meta = header.meta
    return View(
        file=str(path),
        ticket=meta.ticket_id,
        prompt=f"e{meta.locator.epoch}-p{meta.locator.position}",
        attempt=meta.attempt,
        head=meta.head,
        task=_task_name(meta.task_id, around.rollout),
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


def _task_name(task_id: int, rollout: RolloutWorkerConfig | None) -> str:
    """Tasks are numbered in the order of their names."""
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
                reward=float(sample.data["rewards"][index]),
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
    mask = sample.data["loss_mask"][start:end]
    sampled = np.flatnonzero(mask)
    last = int(sampled[-1]) if len(sampled) else -1

    def column(key: str) -> list[float] | None:
        return sample.data[key][start:end].tolist() if key in sample.data else None

    ids, prompt = sample.data["packed_input_ids"][start:end].tolist(), sample.data["prompt_mask"][start:end].tolist()
    versions, dense = sample.data["versions"][start:end].tolist(), column("dense_rewards")
    behaviour, proximal, ref = (column(key) for key in ("packed_logprobs", "proximal_logprobs", "packed_ref_logprobs"))
    advantages = advantages_T[start:end].tolist() if advantages_T is not None else None
    rows = []
    for position, token in enumerate(ids):
        trained = bool(mask[position])
        reward = dense[position] if dense is not None and dense[position] else None
        if position == last:
            reward = (reward or 0.0) + float(sample.data["rewards"][sequence])
        rows.append(
            TokenRow(
                position=position,
                text=texts.piece(token) if texts else None,
                id=token,
                prompt=prompt[position],
                loss_mask=trained,
                version=str(WeightVersion.unpack(versions[position])) if versions[position] >= 0 else None,
                behaviour_logprob=_at(behaviour, position, trained),
                proximal_logprob=_at(proximal, position, trained),
                ref_logprob=_at(ref, position, trained),
                reward=reward,
                advantage=_at(advantages, position, trained),
            )
        )
    return rows


def _at(values: list[float] | None, position: int, there: bool) -> float | None:
    return values[position] if values is not None and there else None


# -------------------------------------------------------------------------------------------------------- advantages


def _advantages(
    path: Path, trajectory: Trajectory, master: MasterWorkerConfig | None, notes: list[str]
) -> Array | None:
    """Per token of the group: as trained on, else (rollout_only) computed from the run's config; None: a note says why."""
    if "advantages" in trajectory.sample.keys:
        trained: Array = trajectory.sample.data["advantages"]
        return trained
    if master is None:
        notes.append("no advantages: the config of the run's master is not there")
        return None
    samples = [trajectory.sample]
    if master.train.ppo.advantage_norm == "batch":  # which takes the whole batch to normalise over
        samples += _others_of_batch(path, trajectory.header)
        if len(samples) < trajectory.header.batch:
            notes.append(
                f"advantages are normalised over {len(samples)} of the batch's {trajectory.header.batch} groups"
            )
    from asyncrl.model.interfaces import AdvantagesInterface, LocalBatch, OneRank  # imports torch

    interface = AdvantagesInterface(build_dataflow(master.train).mfcs["advantages"], master.train)
    missing = sorted({key for sample in samples for key in interface.keys if key not in sample.keys})
    if missing:
        notes.append(f"no advantages: they need the keys {missing}, which are recorded where a train step runs")
        return None
    if master.train.ppo.kl_coef > 0 and master.train.ppo.kl_adaptive:
        notes.append("advantages with the KL coefficient that the run began with (train.ppo.kl_adaptive changes it)")
    if interface.value_norm is not None:
        notes.append(
            "advantages with values in the units that the run began with (train.critic.value_norm changes them)"
        )
    batch = LocalBatch.make(
        SequenceSample.gather([sample.select_keys(interface.keys) for sample in samples]), interface.keys
    )
    made, _ = interface.compute(OneRank(), batch)
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
            continue  # one that is broken: the note says how many there are
    return others
