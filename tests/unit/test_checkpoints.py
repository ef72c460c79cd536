"""Checkpoints: which one is the newest complete one, which ones are kept, what the master adds, and when they are written."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from asyncrl.config.schema import CheckpointConfig, PromptSourceConfig
from asyncrl.data.prompts import PromptSource
from asyncrl.master.checkpointing import Checkpointer
from asyncrl.master.files import MasterFiles
from asyncrl.protocol.calls import CallResult, CommitCheckpoint, SaveCheckpoint
from asyncrl.protocol.trajectories import Locator
from asyncrl.runtime.metrics import read_json_lines
from asyncrl.weights import checkpoints
from asyncrl.weights.checkpoints import (
    FORMAT,
    CheckpointError,
    DataIdentity,
    Manifest,
    MasterState,
    begin_anew,
    checkpoint_dir,
    list_checkpoints,
    newest,
    newest_step,
    prune,
)
from asyncrl.weights.versions import FileEntry
from tests.support.clock import ManualClock
from tests.support.master import make_books, master_config
from tests.support.services import make_services

DATA = DataIdentity(num_prompts=8, num_epochs=1, seed=1, shuffle=True, fingerprint="f")


def make_state(attempt: int, step: int, parent: tuple[int, int] | None = None, **fields: Any) -> MasterState:
    given = {
        "time": 0.0,
        "data": DATA,
        "done_cursor": Locator(0, step),
        "done_beyond": [],
        "num_trained": step,
        "rejected": {},
        "schedules": {},
        "summary": {},
        "recent_rewards": [],
        "recent_outcomes": [],
        "batch_size": 1,
    }
    return MasterState(attempt=attempt, step=step, parent=parent, **{**given, **fields})


def write_checkpoint(run_dir: Path, state: MasterState) -> Path:
    """Write a checkpoint as the committing worker does, with a small part and no worker's state."""
    path = checkpoint_dir(run_dir, state.attempt, state.step)
    path.mkdir(parents=True)
    contents = {"part-00000-00000.safetensors": b"tensors", "master.json": msgspec.json.encode(state)}
    for name, content in contents.items():
        (path / name).write_bytes(content)
    entries = {name: FileEntry(len(content), xxhash.xxh3_64(content).hexdigest()) for name, content in contents.items()}
    (path / "checkpoint.json").write_bytes(msgspec.json.encode(Manifest(FORMAT, entries, [0])))
    return path


class TestNewest:
    def test_by_attempt_then_step(self, tmp_path):
        assert newest(tmp_path, pytest.fail) is None
        for attempt, step, parent in ((1, 10, None), (1, 20, None), (2, 15, (1, 10))):
            write_checkpoint(tmp_path, make_state(attempt, step, parent))
        found = newest(tmp_path, pytest.fail)
        assert found is not None
        assert (found.attempt, found.step, found.state.parent) == (2, 15, (1, 10))
        assert found.path == checkpoint_dir(tmp_path, 2, 15)

    @pytest.mark.parametrize(
        ("damage", "told"),
        [
            (lambda path: (path / "part-00000-00000.safetensors").write_bytes(b"tensorz"), "another checksum"),
            (lambda path: (path / "part-00000-00000.safetensors").unlink(), "but not on disk"),
            (lambda path: (path / "master.json").write_bytes(b"{}"), "master.json has 2 bytes, the manifest says"),
            (lambda path: (path / "checkpoint.json").unlink(), "has no checkpoint.json"),
            (lambda path: (path / "checkpoint.json").write_bytes(b"{"), "cannot be read"),
        ],
    )
    def test_a_torn_checkpoint_is_skipped_with_a_warning(self, tmp_path, damage, told):
        write_checkpoint(tmp_path, make_state(1, 10))
        damage(write_checkpoint(tmp_path, make_state(1, 20)))
        notices: list[str] = []
        found = newest(tmp_path, notices.append)
        assert found is not None
        assert found.step == 10
        (notice,) = notices
        assert notice.startswith("the checkpoint of step 20, attempt 1, is torn; using the one before it: ")
        assert told in notice

    def test_its_step_is_known_without_reading_the_files(self, tmp_path):
        assert newest_step(tmp_path) is None
        write_checkpoint(tmp_path, make_state(1, 10))
        (write_checkpoint(tmp_path, make_state(1, 20)) / "checkpoint.json").unlink()
        assert newest_step(tmp_path) == 10
        begin_anew(tmp_path, 2)
        assert newest_step(tmp_path) is None

    def test_a_checkpoint_without_the_masters_part_is_ignored(self, tmp_path):
        """Such a checkpoint comes from an older release, which did not save the master's state."""
        path = write_checkpoint(tmp_path, make_state(1, 20))
        manifest = checkpoints.read_manifest(path)
        del manifest.files["master.json"]
        (path / "checkpoint.json").write_bytes(msgspec.json.encode(manifest))
        notices: list[str] = []
        assert newest(tmp_path, notices.append) is None
        assert "has no master.json" in notices[0]

    def test_a_checkpoint_is_not_listed_while_it_is_written(self, tmp_path):
        path = write_checkpoint(tmp_path, make_state(1, 10))
        path.rename(path.with_name(f"{path.name}.writing"))
        assert list_checkpoints(tmp_path) == []

    def test_a_run_that_began_anew_ignores_earlier_checkpoints(self, tmp_path):
        write_checkpoint(tmp_path, make_state(1, 10))
        begin_anew(tmp_path, 2)
        assert newest(tmp_path, pytest.fail) is None
        write_checkpoint(tmp_path, make_state(2, 5))
        found = newest(tmp_path, pytest.fail)
        assert found is not None
        assert (found.attempt, found.step) == (2, 5)
        prune(tmp_path, 2)  # removes those from before the run began anew
        assert list_checkpoints(tmp_path) == [(2, 5)]
        assert [entry.name for entry in checkpoints.recover_dir(tmp_path).iterdir()] == ["a0002-s00000005"]


class TestPrune:
    def test_keeps_the_newest(self, tmp_path):
        for step in (10, 20, 30):
            write_checkpoint(tmp_path, make_state(1, step))
        assert prune(tmp_path, 2) == [checkpoint_dir(tmp_path, 1, 10)]
        assert list_checkpoints(tmp_path) == [(1, 20), (1, 30)]

    @pytest.mark.parametrize(("free", "kept"), [(0, 1), (2999, 1), (3000, 2), (10**9, 2)])
    def test_auto_keeps_two_where_three_take_at_most_half_of_the_disk(self, tmp_path, monkeypatch, free, kept):
        """Three checkpoints of 1000 bytes are on the disk, and count as room. auto removes all but as many as fit."""
        for step in (10, 20, 30):
            path = write_checkpoint(tmp_path, make_state(1, step))
            held = sum(file.stat().st_size for file in path.iterdir())
            (path / "part-00000-00001.safetensors").write_bytes(bytes(1000 - held))
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(usage.total, usage.used, free))
        prune(tmp_path, "auto")
        assert list_checkpoints(tmp_path) == [(1, 20), (1, 30)][-kept:]

    def test_checkpoints_outside_the_newest_lineage_are_removed_first(self, tmp_path):
        """(1, 20) was torn when attempt 2 continued from (1, 10)."""
        for attempt, step, parent in ((1, 10, None), (1, 20, None), (2, 15, (1, 10))):
            write_checkpoint(tmp_path, make_state(attempt, step, parent))
        prune(tmp_path, 2)
        assert list_checkpoints(tmp_path) == [(1, 10), (2, 15)]

    def test_leftovers_are_removed(self, tmp_path):
        path = write_checkpoint(tmp_path, make_state(1, 10))
        for name in ("a0001-s00000005.writing", ".a0001-s00000001.removing"):
            (path.parent / name).mkdir()
            (path.parent / name / "part").write_bytes(b"x")
        prune(tmp_path, 1)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_data_is_identified_by_its_prompts_and_their_order(tmp_path):
    def identity(rows: list[dict[str, str]], **fields: Any) -> DataIdentity:
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = PromptSource(PromptSourceConfig(path=str(tmp_path / "p.jsonl"), **fields), None, 3)
        return DataIdentity.of(source, 2)

    rows = [{"prompt": str(number), "answer": "x"} for number in range(3)]
    first = identity(rows)
    assert (first.num_prompts, first.num_epochs, first.seed, first.shuffle) == (3, 2, 3, True)
    assert identity([{**row, "answer": "mended"} for row in rows]) == first  # the prompts keep their positions
    assert identity(rows[::-1]).fingerprint != first.fingerprint
    assert identity([*rows[:2], {"prompt": "3", "answer": "x"}]).fingerprint != first.fingerprint
    assert identity(rows, shuffle=False).shuffle is False


# ------------------------------------------------------------------------------------------------- the master's part


class Caller:
    """Model workers that write once `may_write` is set."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.calls: list[Any] = []
        self.may_write = asyncio.Event()

    def call(self, what: str, handlers: list[int], body: Any) -> asyncio.Task[list[CallResult]]:
        self.calls.append(body)
        return asyncio.create_task(self._reply(handlers, body))

    async def _reply(self, handlers: list[int], body: Any) -> list[CallResult]:
        if isinstance(body, CommitCheckpoint):
            assert handlers == (0,)
            write_checkpoint(self._run_dir, msgspec.json.decode(body.master, type=MasterState))
        else:
            await self.may_write.wait()
        return [CallResult() for _ in handlers]


async def test_checkpoints_do_not_overlap_and_belong_to_the_step_at_which_they_began(tmp_path):
    begun: list[asyncio.Task[None]] = []

    def spawn(coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        begun.append(asyncio.create_task(coroutine, name=name))
        return begun[-1]

    options = CheckpointConfig(every_steps=2, every_s=0.0, keep_last=1)
    config = master_config(tmp_path, num_model_workers=2, checkpoint=options)
    opened = AsyncExitStack()
    books = make_books(config, opened)
    tasks: Any = SimpleNamespace(spawn=spawn)
    caller: Any = Caller(tmp_path)
    services = make_services(config.worker, tasks=tasks)
    checkpointer = Checkpointer(config, books, caller, MasterFiles(config), services)
    taken: list[int] = []

    async def steps(first: int, last: int) -> None:
        for step in range(first, last + 1):

            def take(step: int = step) -> MasterState:
                taken.append(step)
                return make_state(1, step, mfcs={"advantages": {"kl_coef": 0.5}})

            before = len(caller.calls)
            books.step = step
            checkpointer.after_step(due=books.is_due("checkpoint"), take=take)
            assert len(caller.calls) - before == (step in taken)  # sent in the same turn
            await asyncio.sleep(0)

    await steps(1, 5)
    assert taken == [2]  # the checkpoint due at step 4 is deferred
    caller.may_write.set()
    await asyncio.wait_for(begun[0], 30)
    await steps(6, 7)
    await asyncio.wait_for(begun[1], 30)
    assert len(begun) == 2
    assert taken == [2, 6]
    assert list_checkpoints(tmp_path) == [(1, 6)]  # keep_last
    bodies = [type(body) for body in caller.calls]
    assert bodies == [SaveCheckpoint, CommitCheckpoint] * 2
    assert msgspec.json.decode(caller.calls[1].master, type=MasterState).mfcs == {"advantages": {"kl_coef": 0.5}}
    events = [(event["event"], event["step"]) for event in read_json_lines(tmp_path / "journal" / "master.jsonl")]
    assert events == [("snapshot", 2), ("checkpoint", 2), ("snapshot", 6), ("checkpoint", 6)]
    await opened.aclose()


def test_an_unreadable_state_is_reported_with_its_file(tmp_path):
    path = write_checkpoint(tmp_path, make_state(1, 10))
    assert checkpoints.read_state(path) == make_state(1, 10)
    (path / "master.json").write_bytes(b"[]")
    with pytest.raises(CheckpointError, match=r"master\.json cannot be read"):
        checkpoints.read_state(path)


async def test_a_long_write_sets_the_period_of_the_schedule(tmp_path):
    config = master_config(tmp_path, num_model_workers=2)
    clock = ManualClock()
    async with AsyncExitStack() as opened:
        books = make_books(config, opened, clock=clock)
    assert books.pace_checkpoints(40.0) == 2000.0
    clock.sleep(1999.0)
    assert not books.is_due("checkpoint")
    clock.sleep(1.0)
    assert books.is_due("checkpoint")
