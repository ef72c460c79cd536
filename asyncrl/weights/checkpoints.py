"""Recovery checkpoints: `<run>/checkpoints/recover/a0001-s00000010/` is the state of attempt 1 after train step 10.

    part-*.safetensors   models, optimizers; state-*.json: random state      model/checkpoint.py, at every model worker
    master.json          MasterState: the master's state                     sent by the master, written by the committing worker
    checkpoint.json      Manifest: size and xxh3 of all of these

A checkpoint is written under a temporary name and renamed, so one that has its final name was complete. `verify` checks that it
still is. `newest` verifies the checkpoint that it returns, and skips a torn one with a warning.

A run that begins anew in a folder (recover=off, or the run before has finished) must not use the checkpoints there. `begin_anew`
records this in a file, and the first checkpoint of the new run removes the old ones.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl import __version__
from asyncrl.config.schema import AUTO
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.protocol.trajectories import Locator
from asyncrl.runtime.disk import write_file, write_when_there_is_room
from asyncrl.weights.form import WeightsError
from asyncrl.weights.versions import FileEntry, check_files

if TYPE_CHECKING:
    from asyncrl.data.prompts import PromptSource

MANIFEST = "checkpoint.json"
MASTER_FILE = "master.json"
FORMAT = 3
_ANEW_FILE = "began_anew.json"
_NAME = re.compile(r"a(\d{4,})-s(\d{8,})")
_MOST_KEPT, _DISK_SHARE = (
    2,
    0.5,
)  # by keep_last=auto: checkpoints; share of the disk, with the one that is being written
_NUM_READERS = 4  # threads that check files in parallel: hashing releases the GIL


class CheckpointError(WeightsError):
    """A checkpoint that must not be loaded, or does not fit the run. The message says why."""


class NewerCheckpointError(CheckpointError):
    """A checkpoint of a release that writes another format. No older checkpoint is used instead."""


class _Written(msgspec.Struct, frozen=True):
    """The part of checkpoint.json that every format has."""

    format: int


class Manifest(_Written, frozen=True):
    """checkpoint.json: the files, and the workers that wrote them."""

    files: dict[str, FileEntry]
    workers: list[int]


class DataIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies the prompts and their order. The `done` positions of MasterState are only valid with the same data."""

    num_prompts: int
    num_epochs: int
    seed: int
    shuffle: bool
    fingerprint: str  # of the prompts, in the source's order

    @classmethod
    def of(cls, source: PromptSource, num_epochs: int) -> DataIdentity:
        return cls(
            num_prompts=len(source),
            num_epochs=num_epochs,
            seed=source.seed,
            shuffle=source.config.shuffle,
            fingerprint=source.fingerprint(),
        )


class ScheduleState(msgspec.Struct, frozen=True, kw_only=True):
    """When a schedule was last due."""

    step: int
    epoch: int
    elapsed_s: float  # since then


class CurriculumState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of master/curriculum.py. A task that has no gate any more is left out when it is restored."""

    opened: list[str] = []
    shares: dict[str, list[float]] = {}  # by task with a gate: of the newest groups, the share of responses that passed


class MasterState(msgspec.Struct, frozen=True, kw_only=True):
    """The state from which the master continues. It contains exactly the events up to the step that the models contain."""

    attempt: int
    step: int
    time: float  # seconds since the epoch
    # (attempt, step) of the checkpoint that the attempt continued from; None: it began anew
    parent: tuple[int, int] | None
    data: DataIdentity
    done_cursor: Locator
    done_beyond: list[Locator]
    num_trained: int
    rejected: dict[str, int]  # by reason
    schedules: dict[str, ScheduleState]
    summary: dict[str, Any]  # of master.report.RunSummary
    recent_rewards: list[float]
    recent_outcomes: list[bool]
    batch_size: int
    wall_s: float = 0.0  # seconds since the run began, without the time between attempts
    evaluating: bool = False  # an evaluation of these weights was due and not finished
    mfcs: dict[str, dict[str, float]] = {}  # the states of the MFCs' functions
    curriculum: CurriculumState = CurriculumState()


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    path: Path
    attempt: int
    step: int
    state: MasterState


class _Anew(msgspec.Struct, frozen=True):
    """began_anew.json: checkpoints of attempts before `attempt` belong to another run's lineage."""

    attempt: int


class _Shapes(msgspec.Struct, frozen=True):
    """The part of a worker's state file that this module reads."""

    shapes: dict[str, tuple[int, ...]]


# --------------------------------------------------------------------------------------------------------------- where


def recover_dir(run_dir: str | Path) -> Path:
    return Path(run_dir) / "checkpoints" / "recover"


def checkpoint_dir(run_dir: str | Path, attempt: int, step: int) -> Path:
    """Path of a checkpoint, whether or not it exists yet."""
    return recover_dir(run_dir) / f"a{attempt:04d}-s{step:08d}"


def list_checkpoints(run_dir: str | Path) -> list[tuple[int, int]]:
    """(attempt, step) of all checkpoints that have their final name, oldest first. They may be torn."""
    folder = recover_dir(run_dir)
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), int(match[2])) for name in names if (match := _NAME.fullmatch(name)))


# ----------------------------------------------------------------------------------------------------- reading, checking


def read_manifest(path: Path) -> Manifest:
    """Read checkpoint.json. Raises CheckpointError if it is missing or cannot be read."""
    try:
        data = (path / MANIFEST).read_bytes()
        written = msgspec.json.decode(data, type=_Written)
        if written.format != FORMAT:
            raise NewerCheckpointError(
                f"{path} has format {written.format}; this is asyncrl {__version__}, which reads format {FORMAT}: continue with "
                "the release that wrote it"
            )
        return msgspec.json.decode(data, type=Manifest)
    except FileNotFoundError:
        raise CheckpointError(f"{path} has no {MANIFEST}: not a checkpoint, or an incomplete one") from None
    except (*DECODE_ERRORS, OSError) as error:
        raise CheckpointError(f"{path / MANIFEST} cannot be read: {error}") from error


def check(path: Path, files: Mapping[str, FileEntry]) -> None:
    """Check these files (size, then xxh3). Raises CheckpointError that names the file and the difference."""
    with ThreadPoolExecutor(_NUM_READERS, "check-files") as pool:
        checks = [pool.submit(check_files, path, {name: entry}) for name, entry in files.items()]
    for done in checks:
        try:
            done.result()
        except (WeightsError, OSError) as error:
            raise CheckpointError(str(error)) from error


def verify(path: Path) -> Manifest:
    """Check every file. Raises CheckpointError that names the file and the difference."""
    manifest = read_manifest(path)
    check(path, manifest.files)
    return manifest


def read_state(path: Path) -> MasterState:
    """Read master.json. Raises CheckpointError if it is missing or cannot be read."""
    try:
        return msgspec.json.decode((path / MASTER_FILE).read_bytes(), type=MasterState)
    except (*DECODE_ERRORS, OSError) as error:
        raise CheckpointError(f"{path / MASTER_FILE} cannot be read: {error}") from error


def state_file(worker: int) -> str:
    return f"state-{worker:05d}.json"


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors in a checkpoint, by global name, such as `actor.lm_head.weight`. Raises CheckpointError."""
    found: dict[str, tuple[int, ...]] = {}
    for worker in read_manifest(path).workers:
        file = path / state_file(worker)
        try:
            found |= msgspec.json.decode(file.read_bytes(), type=_Shapes).shapes
        except (*DECODE_ERRORS, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
    return found


def newest(run_dir: str | Path, notice: Callable[[str], None]) -> Checkpoint | None:
    """The newest complete checkpoint of the current run in this folder; None if there is none. Reads all its files to verify them.

    notice: receives a message for each torn checkpoint that is skipped. Raises NewerCheckpointError, and CheckpointError if
    began_anew.json cannot be read.
    """
    floor = _first_attempt(run_dir)
    for attempt, step in reversed(list_checkpoints(run_dir)):
        if attempt < floor:
            break
        path = checkpoint_dir(run_dir, attempt, step)
        try:
            manifest = verify(path)
            if MASTER_FILE not in manifest.files:
                raise CheckpointError(f"{path} has no {MASTER_FILE}")
            return Checkpoint(path=path, attempt=attempt, step=step, state=read_state(path))
        except NewerCheckpointError:
            raise
        except CheckpointError as error:
            notice(f"the checkpoint of step {step}, attempt {attempt}, is torn; using the one before it: {error}")
    return None


def newest_step(run_dir: str | Path) -> int | None:
    """The step of the newest complete checkpoint of the current run in this folder; None if there is none. Unlike `newest`, it does
    not read the files to verify them. Raises CheckpointError as `newest`."""
    floor = _first_attempt(run_dir)
    for attempt, step in reversed(list_checkpoints(run_dir)):
        with contextlib.suppress(CheckpointError):
            if attempt >= floor and MASTER_FILE in read_manifest(checkpoint_dir(run_dir, attempt, step)).files:
                return step
    return None


def _first_attempt(run_dir: str | Path) -> int:
    try:
        return msgspec.json.decode((recover_dir(run_dir) / _ANEW_FILE).read_bytes(), type=_Anew).attempt
    except FileNotFoundError:
        return 0
    except (*DECODE_ERRORS, OSError) as error:
        raise CheckpointError(f"{recover_dir(run_dir) / _ANEW_FILE} cannot be read: {error}; delete it") from error


# -------------------------------------------------------------------------------------------------------------- keeping


def begin_anew(run_dir: str | Path, attempt: int) -> None:
    """Record that the existing checkpoints, if any, belong to an earlier run: neither `attempt` nor a later attempt continues from
    them. Removes nothing yet."""
    folder = recover_dir(run_dir)
    if not list_checkpoints(run_dir):
        return
    write_file(folder / _ANEW_FILE, msgspec.json.encode(_Anew(attempt)))


def num_kept(asked: int | str, num_bytes: int, room: float) -> int:
    """Return how many checkpoints stay on the disk: `asked`, or for auto _MOST_KEPT if these and the one that is being written take
    at most _DISK_SHARE of the room, else 1.

    num_bytes: of each. room: bytes that are free, or that checkpoints take; inf: unknown.
    """
    if asked != AUTO:
        return int(asked)
    return _MOST_KEPT if (_MOST_KEPT + 1) * num_bytes <= room * _DISK_SHARE else 1


def prune(run_dir: str | Path, keep_last: int | str) -> list[Path]:
    """Remove unfinished checkpoints, and all finished ones except the newest in the newest checkpoint's lineage, as many as
    `num_kept` returns for keep_last.

    Returns the finished checkpoints that were removed. Call it only while no checkpoint is being written. A checkpoint is renamed
    before its files are removed.
    """
    folder = recover_dir(run_dir)
    there = list_checkpoints(run_dir)
    for left in (entry for entry in folder.glob("*.*") if entry.is_dir()):  # .writing, .removing
        shutil.rmtree(left, ignore_errors=True)
    if not there:
        return []
    void = _void(run_dir, there)
    sizes = [_size(checkpoint_dir(run_dir, *entry)) for entry in there]
    number = num_kept(keep_last, sizes[-1], shutil.disk_usage(folder).free + sum(sizes))
    kept = [entry for entry in there if entry not in void][-number:]
    removed = []
    for attempt, step in there:
        if (attempt, step) in kept:
            continue
        path = checkpoint_dir(run_dir, attempt, step)
        grave = folder / f".{path.name}.removing"
        with contextlib.suppress(FileNotFoundError):
            write_when_there_is_room(path, partial(path.rename, grave))
        shutil.rmtree(grave, ignore_errors=True)
        removed.append(path)
    if _first_attempt(run_dir) <= kept[0][0]:
        (folder / _ANEW_FILE).unlink(missing_ok=True)
    return removed


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def _void(run_dir: str | Path, there: list[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return the checkpoints outside the lineage of the newest one. They are of earlier attempts than the newest one, and later
    than the checkpoint that the newest one's attempt continued from. Empty if the newest one is torn."""
    attempt, step = there[-1]
    try:
        parent = read_state(checkpoint_dir(run_dir, attempt, step)).parent or (0, 0)
    except CheckpointError:  # torn: its parent is unknown
        return set()
    return {entry for entry in there if parent < entry < (attempt, 0)}
