"""Trajectories on disk, one file per group. `inspect` shows them and `mode=train_only` trains on them.

    <run>/trajectories/attempt_N/step_00000003-group_0007-model_worker_0.safetensors

A file has the format of sample_files.py: complete or absent, with a checksum, no torch, no pickle. Names sort in the order of
recording: by train step (in a rollout-only run: by batch), then by the group's position in the batch.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import xxhash
from msgspec import Struct

from asyncrl.data.sample_files import FileFormat
from asyncrl.data.sequence import SequenceSample
from asyncrl.protocol.errors import DECODE_ERRORS, Failures
from asyncrl.protocol.trajectories import TrajectoryMeta
from asyncrl.runtime.clock import SYSTEM_CLOCK, Clock
from asyncrl.runtime.disk import write_when_there_is_room

FORMAT = 1
FOLDER = "trajectories"  # of a run
SUFFIX = ".safetensors"
_NAME = re.compile(r"step_(\d{8,})-group_(\d{4,})-\w+\.safetensors")
_ATTEMPT = re.compile(r"attempt_(\d+)")
_FULL_LIMIT_S = 5.0  # a full disk delays the files of a step for at most this long
_SAY_AGAIN_S = 60.0  # minimum time between two warnings about trajectories that were not recorded

logger = logging.getLogger(__name__)


class TrajectoryError(ValueError):
    """A file is not a complete trajectory; the message names the file and the cause."""


class RecordingFullError(RuntimeError):
    """The recording has reached its maximum size."""


class TrajectoryHeader(Struct, frozen=True, kw_only=True):
    """Header of a group's file: everything but the tensors."""

    format: int = FORMAT
    meta: TrajectoryMeta  # as the rollout worker sent it; its `keys` are the keys sent, and the file may hold more
    seqlens: dict[str, list[int]]  # key -> length of each sequence
    step: int  # version in training when the group was used; in a rollout-only run: number of the batch
    position: int  # index in the batch, in canonical order
    batch: int  # number of groups in the whole batch, over all heads
    trained: bool  # whether a train step used it; False: rollout only
    recorded_by: str  # name of the worker
    time: float  # seconds since the epoch
    tokenizer: str = ""  # tokenizer_fingerprint; "": unknown


@dataclass(frozen=True)
class Trajectory:
    """Content of a file."""

    header: TrajectoryHeader
    sample: SequenceSample


# ---------------------------------------------------------------------------------------------------------- one file


_TRAJECTORIES = FileFormat("trajectory", TrajectoryHeader, FORMAT, TrajectoryError)


def file_name(header: TrajectoryHeader) -> str:
    return f"step_{header.step:08d}-group_{header.position:04d}-{header.recorded_by.replace('/', '_')}{SUFFIX}"


def write_trajectory(folder: Path, header: TrajectoryHeader, sample: SequenceSample) -> Path:
    """Write a group's file, completely or not at all. Raises OSError."""
    path = folder / file_name(header)
    _TRAJECTORIES.write(path, header, sample.data)
    return path


def read_trajectory(path: Path) -> Trajectory:
    """Read and verify a whole trajectory. Raises TrajectoryError for a file that is damaged, truncated or no trajectory."""
    header, arrays = _TRAJECTORIES.read(path)
    if header.seqlens.keys() != arrays.keys():
        raise TrajectoryError(f"{path} holds the keys {sorted(arrays)}, its header names {sorted(header.seqlens)}")
    seqlens = {key: [lengths] for key, lengths in header.seqlens.items()}
    try:
        sample = SequenceSample((header.meta.ticket_id,), seqlens, {key: arrays[key] for key in seqlens})
    except ValueError as error:
        raise TrajectoryError(f"{path} holds no group: {error}") from error
    return Trajectory(header, sample)


def read_header(path: Path) -> TrajectoryHeader:
    """Read only the header, without reading (or verifying) the tensors. Raises TrajectoryError."""
    return _TRAJECTORIES.read_header(path)


# ------------------------------------------------------------------------------------------------------ a recording


def recording_dir(run_dir: Path, attempt: int) -> Path:
    """Folder of an attempt's trajectories."""
    return run_dir / FOLDER / f"attempt_{attempt}"


def find_recording(path: Path) -> Path:
    """Find the folder of one attempt's trajectories: path itself, or the newest one below a run's folder or `trajectories`.

    Raises TrajectoryError if there is none.
    """
    if any(_matches(path)):
        return path
    folder = path / FOLDER if (path / FOLDER).is_dir() else path
    attempts = [entry for entry in folder.iterdir() if _ATTEMPT.fullmatch(entry.name)] if folder.is_dir() else []
    for attempt in sorted(attempts, key=lambda entry: int(entry.name.partition("_")[2]), reverse=True):
        if any(_matches(attempt)):
            return attempt
    raise TrajectoryError(
        f"{path} holds no recorded trajectories. Record them with `record.trajectories=true` (in any run) or `mode=rollout_only`"
    )


def list_recording(folder: Path) -> list[Path]:
    """List the files of a recording, in the order of recording."""
    matches = sorted(_matches(folder), key=lambda match: (int(match[1]), int(match[2]), match[0]))
    return [folder / match[0] for match in matches]


def step_of(path: Path) -> int:
    """The step in the name of a recorded file."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _matches(folder: Path) -> Iterator[re.Match[str]]:
    """Of _NAME, one for each recorded file."""
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from (match for entry in entries if (match := _NAME.fullmatch(entry.name)))


# --------------------------------------------------------------------------------------------------------- recording


@dataclass(frozen=True)
class Entry:
    """One group to record."""

    sample: SequenceSample
    meta: TrajectoryMeta
    position: int


class TrajectoryStore:
    """Writes the files of one worker, about max_bytes in total.

    Once they exceed max_bytes, a store with `prune` deletes whole steps, the oldest first. It keeps the newest step, whatever its
    size. A store without `prune` refuses further groups.
    """

    def __init__(
        self,
        folder: Path,
        worker: str,
        *,
        trained: bool,
        max_bytes: int,
        prune: bool,
        tokenizer: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """prune: delete old steps once the files exceed max_bytes. False: refuse new groups from then on."""
        self.folder = folder
        self._worker = worker
        self._trained = trained
        self._max_bytes = max_bytes
        self._prune = prune
        self._tokenizer = tokenizer
        self._clock = clock
        self._failures = Failures(_FULL_LIMIT_S)
        self._steps: deque[tuple[list[Path], int]] = deque()  # (files of a step, their size in bytes)
        self.num_bytes = 0
        self.num_files = 0

    def write(self, step: int, batch: int, entries: Sequence[Entry]) -> None:
        """Write this worker's groups of a step. Raises OSError, and RecordingFullError if the store is full and must not prune."""
        write_when_there_is_room(self.folder, lambda: self.folder.mkdir(parents=True, exist_ok=True), self._failures)
        paths: list[Path] = []
        try:
            for entry in entries:
                paths.append(self._write_one(step, batch, entry))
        finally:  # count also the files that were written before an error
            self._steps.append((paths, sum(path.stat().st_size for path in paths)))
        self._make_room()

    def _write_one(self, step: int, batch: int, entry: Entry) -> Path:
        if not self._prune and self.num_bytes > self._max_bytes:
            raise RecordingFullError(
                f"record.max_bytes={self._max_bytes}: {self.folder} holds {self.num_bytes} bytes in {self.num_files} "
                "trajectories; use a larger limit, or fewer batches (train.max_steps)"
            )
        header = TrajectoryHeader(
            meta=entry.meta,
            seqlens={key: lengths[0] for key, lengths in entry.sample.seqlens.items()},
            step=step,
            position=entry.position,
            batch=batch,
            trained=self._trained,
            recorded_by=self._worker,
            time=self._clock.time(),
            tokenizer=self._tokenizer,
        )
        write = partial(write_trajectory, self.folder, header, entry.sample)
        path = write_when_there_is_room(self.folder, write, self._failures)
        self.num_bytes += path.stat().st_size
        self.num_files += 1
        return path

    def _make_room(self) -> None:
        while self._prune and self.num_bytes > self._max_bytes and len(self._steps) > 1:
            paths, size = self._steps.popleft()
            for path in paths:
                path.unlink(missing_ok=True)
            self.num_bytes -= size
            self.num_files -= len(paths)


class BackgroundRecorder:
    """A TrajectoryStore on a thread of its own, so that recording takes no time from training.

    consumes: `record_nowait`, one step at a time; at most two are queued.  produces: files.
    waits for: a step; the disk.  unblocked by: train steps; close.
    If the queue is full or the disk fails, groups are not recorded: a warning says so, and training continues.
    """

    MAX_WAITING = 2

    def __init__(self, store: TrajectoryStore, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._clock = store, clock
        self._queue: queue.Queue[tuple[int, int, Sequence[Entry]] | None] = queue.Queue(self.MAX_WAITING)
        self._said = float("-inf")
        self.num_lost = 0  # groups
        self._thread = threading.Thread(target=self._run, name="trajectory recorder", daemon=True)
        self._thread.start()

    def record_nowait(self, step: int, batch: int, entries: Sequence[Entry]) -> None:
        """Queue groups for writing. The samples' arrays must not change afterwards (samples are immutable)."""
        try:
            self._queue.put_nowait((step, batch, entries))
        except queue.Full:
            self._lose(len(entries), "the disk is slower than training; use record.every")

    def close(self, limit_s: float) -> None:
        """Wait until the queued steps are written, at most limit_s."""
        deadline = self._clock.monotonic() + limit_s
        try:
            self._queue.put(None, timeout=limit_s)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - self._clock.monotonic()))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._store.write(*item)
            except Exception as error:  # mostly disk errors; recording is optional and must not end training
                self._lose(len(item[2]), repr(error))

    def _lose(self, count: int, why: str) -> None:
        self.num_lost += count
        if (now := self._clock.monotonic()) - self._said > _SAY_AGAIN_S:
            self._said = now
            logger.warning("%d trajectories were not recorded so far: %s", self.num_lost, why)


def tokenizer_fingerprint(path: str) -> str:
    """Hash of a tokenizer's vocabulary in 16 hex digits, equal for copies of it; "" without a readable tokenizer.json."""
    try:
        raw = msgspec.json.decode((Path(path).expanduser() / "tokenizer.json").read_bytes())
        vocabulary = raw["model"]["vocab"]
        added = {token["content"]: token["id"] for token in raw.get("added_tokens") or ()}
        if isinstance(vocabulary, dict):
            vocabulary = sorted({**vocabulary, **added}.items())
        else:  # of Unigram: pairs of token and score, in the order of the ids
            there = {token: number for number, (token, _) in enumerate(vocabulary)}
            vocabulary = [*vocabulary, *sorted(added.items() - there.items())]
    except (OSError, *DECODE_ERRORS, KeyError, TypeError, ValueError, AttributeError):
        return ""
    return xxhash.xxh3_64(msgspec.json.encode(vocabulary)).hexdigest()
