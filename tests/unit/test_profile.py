"""Profiles of train steps: the master's part, the command, and the merged file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.processes import WorkerInfo
from asyncrl.config.schema import NameResolveConfig, RuntimeConfig
from asyncrl.master.profiling import Profiles
from asyncrl.protocol.calls import BeginProfile, CallResult, EndProfile
from asyncrl.protocol.names import Names
from asyncrl.protocol.profiling import ProfileAnswer
from asyncrl.runtime.board import StatusBoard
from asyncrl.runtime.directory import Directory
from asyncrl.runtime.names.interface import NameResolver
from asyncrl.runtime.trace import TraceHeader, merge, span_of
from tests.support.memory_names import open_names

LIMIT_S = 10.0
NAMES = Names("e", "t")


class Caller:
    """Records the calls. Worker 1 writes no file."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.called = asyncio.Event()

    async def call(self, _what: str, workers: list[int], body: Any) -> list[CallResult]:
        self.calls.append(body)
        self.called.set()
        return [CallResult(num_bytes=0 if worker == 1 else 100) for worker in workers]


@contextlib.asynccontextmanager
async def watching(run_dir: Path) -> AsyncIterator[tuple[Profiles, Any, NameResolver]]:
    config = NameResolveConfig(endpoints=[f"memory://{run_dir}"])
    info = WorkerInfo("master", 0, 1, "e", "t", 1, str(run_dir), 1, config, RuntimeConfig())
    with open_names(config) as resolver:
        board, caller = StatusBoard(info, logging.getLogger("test")), Caller()
        lease = resolver.grant_lease(LIMIT_S).id
        directory = Directory(resolver, NAMES, lease=lease, board=board, limit_s=LIMIT_S)
        profiles: Profiles = Profiles(directory, caller, [0, 1], run_dir, 1)  # type: ignore[arg-type]
        watch = asyncio.create_task(profiles.watch())
        try:
            yield profiles, caller, resolver
        finally:
            watch.cancel()
            await asyncio.wait({watch})


def answer(resolver: NameResolver) -> ProfileAnswer:
    return msgspec.json.decode(resolver.get(NAMES.profile_answer()), type=ProfileAnswer)


async def ask_until_it_begins(profiles: Profiles, caller: Caller, resolver: NameResolver, request_id: str) -> int:
    """Ask for two steps. Returns the number of the first step that is recorded."""
    resolver.add(NAMES.profile_request(), json.dumps({"id": request_id, "steps": 2}))
    for step in range(1, 1000):  # the watch delivers the request from a thread
        await profiles.before_step(step)
        if caller.calls and caller.calls[-1] == BeginProfile():
            return step
        await asyncio.sleep(0.01)
    raise AssertionError("no recording began")


async def test_the_next_steps_are_recorded_once(tmp_path: Path) -> None:
    for old in range(4):
        (tmp_path / "profile" / f"attempt_1_step_{old}").mkdir(parents=True)
    async with watching(tmp_path) as (profiles, caller, resolver):
        first = await ask_until_it_begins(profiles, caller, resolver, "r")
        begun = answer(resolver)
        assert (begun.id, begun.first_step, begun.last_step, begun.is_complete) == ("r", first, first + 1, False)
        await profiles.after_step(first)
        await profiles.before_step(first + 1)
        assert caller.calls == [BeginProfile()]
        await profiles.after_step(first + 1)
        assert caller.calls[1:] == [EndProfile(folder=f"profile/attempt_1_step_{first}")]
        done = answer(resolver)
        assert (done.is_complete, done.failed) == (True, ["model_worker/1"])
        assert resolver.get_subtree(NAMES.profile_request()) == {}  # a later master does not repeat it
        await profiles.before_step(first + 2)
        assert len(caller.calls) == 2
    assert len(list((tmp_path / "profile").iterdir())) == 3


async def test_a_request_of_too_many_steps_records_nothing(tmp_path: Path) -> None:
    async with watching(tmp_path) as (profiles, caller, resolver):
        resolver.add(NAMES.profile_request(), json.dumps({"id": "endless", "steps": 1_000_000}))
        for step in range(50):
            await profiles.before_step(step)
            await asyncio.sleep(0.01)
        assert caller.calls == []
        resolver.delete(NAMES.profile_request())
        assert await ask_until_it_begins(profiles, caller, resolver, "r")
        assert answer(resolver).id == "r"
        assert caller.calls == [BeginProfile()]


async def test_a_recording_ends_with_its_request(tmp_path: Path) -> None:
    """The command was interrupted: it has removed its request."""
    async with watching(tmp_path) as (profiles, caller, resolver):
        first = await ask_until_it_begins(profiles, caller, resolver, "r")
        caller.called.clear()
        resolver.delete(NAMES.profile_request())
        await asyncio.wait_for(caller.called.wait(), LIMIT_S)
        assert caller.calls[1:] == [EndProfile()]
        await profiles.after_step(first + 1)
        await profiles.before_step(first + 2)
        assert len(caller.calls) == 2
        assert await ask_until_it_begins(profiles, caller, resolver, "another")


def test_the_timeline_is_merged_for_the_time_of_the_profile(tmp_path: Path) -> None:
    """The profile was recorded on another machine, whose monotonic clock is 1,000 us behind that of the timeline's."""

    def write(path: Path, header: TraceHeader, *events: dict[str, Any]) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (header, *events)))

    def operation(name: str, ts: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "ts": ts, "dur": 1.0, "pid": 7, "tid": 7}

    profile, timeline = tmp_path / "profile", tmp_path / "timeline"
    about_worker = TraceHeader("model_worker/0", 7, 0, "one", 5_000)
    write(profile / "model_worker_0.jsonl", about_worker, operation("first", 100.0), operation("last", 200.0))
    about_master = TraceHeader("master/0", 8, 1, "other", 4_000)
    spans = [operation(name, ts) for name, ts in (("before", 1099.0), ("within", 1150.0), ("after", 1201.0))]
    write(timeline / "master_0.jsonl", about_master, {"ph": "M", "name": "thread_name", "pid": 8, "tid": 1}, *spans)
    span = span_of(profile)
    assert span == (100.0, 200.0)
    merge(profile, tmp_path / "out.json", timeline=timeline, span=span)
    events = json.loads((tmp_path / "out.json").read_text())["traceEvents"]
    assert {event["name"]: event["ts"] for event in events if event["ph"] == "X"} == {
        "first": 100.0,
        "last": 200.0,
        "within": 150.0,
    }
    assert "thread_name" in {event["name"] for event in events}


def test_a_full_file_lacks_the_shortest_events(tmp_path: Path) -> None:
    import torch

    from asyncrl.model.profiling import Profiler

    info = WorkerInfo("model_worker", 0, 1, "e", "t", 1, str(tmp_path), 1, NameResolveConfig(), RuntimeConfig())
    profiler = Profiler(info, max_bytes=4000)
    assert profiler.end(tmp_path / "nothing") == 0
    profiler.begin()
    for size in (1, 10, 100, 400):
        torch.ones(size, size) @ torch.ones(size, size)
    size = profiler.end(tmp_path)
    assert 1000 < size <= 4000
    assert [path.name for path in tmp_path.iterdir()] == ["model_worker_0.jsonl"]
    _, *events = map(json.loads, (tmp_path / "model_worker_0.jsonl").read_text().splitlines())
    durations = [event["dur"] for event in events if "dur" in event]
    assert durations == sorted(durations, reverse=True)
    assert "aten::matmul" in {event["name"] for event in events}


def test_a_kernel_of_a_gpu_is_shown_in_a_track_of_its_process() -> None:
    from asyncrl.model.profiling import _events

    kernel = {"ph": "X", "name": "kernel", "pid": 0, "tid": 7, "ts": 5.0, "dur": 1.0}
    mark = {"ph": "i", "name": "mark", "pid": "Traces", "tid": "Trace", "ts": 5.0}
    found = {"baseTimeNanoseconds": 3_000_000, "traceEvents": [kernel, mark]}
    assert _events(found, unix_us=1000) == [kernel | {"pid": os.getpid(), "tid": 10_000_007, "ts": 2005.0}]
