"""The timeline: the records of a tracer, the merged file, and the bounds of memory and disk use."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncrl.runtime.trace import OFF, TraceHeader, Tracer, merge


def events_of(folder: Path) -> list[dict[str, Any]]:
    out = folder / "merged.json"
    merge(folder, out)
    return json.loads(out.read_text())["traceEvents"]


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def test_spans_of_a_track_and_overlapping_spans(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "a.jsonl", process="master/0", order=3)
    with tracer.span("outer", track="steps", step=1), tracer.span("inner", track="steps"):
        pass
    first = tracer.now_us()
    with tracer.overlapping("second", kind="rollout", ticket="t"):
        tracer.add_overlapping("first", first, kind="rollout")
    tracer.count("stored", 3)
    tracer.count("stored", 3)  # an unchanged value is not recorded
    tracer.close()
    events = events_of(tmp_path)
    (process,) = named(events, "process_name")
    assert process["args"] == {"name": "master/0"}
    (track,) = named(events, "thread_name")
    (outer,), (inner,) = named(events, "outer"), named(events, "inner")
    assert outer["tid"] == inner["tid"] == track["tid"]
    assert outer["args"] == {"step": 1}
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    ids = {}
    for name in ("first", "second"):
        begin, end = named(events, name)
        assert (begin["ph"], end["ph"]) == ("b", "e")
        assert begin["id2"] == end["id2"]
        assert begin["ts"] <= end["ts"]
        ids[name] = begin["id2"]["local"]
    assert ids["first"] != ids["second"]
    assert [event["args"] for event in named(events, "stored")] == [{"value": 3}]


def test_a_span_that_raises_is_recorded(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "a.jsonl")
    with pytest.raises(KeyError), tracer.span("broken", track="t"):
        raise KeyError
    tracer.close()
    assert len(named(events_of(tmp_path), "broken")) == 1


def test_times_of_all_machines_are_put_on_one_clock(tmp_path: Path) -> None:
    """Processes of one boot share the monotonic clock. Times of another boot are shifted by the difference of the wall clocks."""

    def write(name: str, boot: str, unix_us: int) -> None:
        header = TraceHeader(process=name, pid=1, order=0, boot=boot, unix_us=unix_us)
        event = {"ph": "X", "name": name, "ts": 100, "dur": 1, "pid": 1, "tid": 1}
        encode = msgspec.json.encode
        (tmp_path / f"{name}.jsonl").write_bytes(encode(header) + b"\n" + encode(event) + b"\n")

    write("a", "here", 1_000)
    write("b", "here", 1_007)  # of the same boot: no shift, although its wall clock shows 7 us more
    write("c", "there", 4_000)
    times = {event["name"]: event["ts"] for event in events_of(tmp_path) if event["ph"] == "X"}
    assert times == {"a": 100, "b": 100, "c": 3_100}


def test_the_file_of_a_killed_process_can_be_merged(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "a.jsonl", process="killed")
    with tracer.span("whole", track="t"):
        pass
    tracer.flush()
    with (tmp_path / "a.jsonl").open("ab") as file:
        file.write(b'{"ph": "X", "name": "ha')
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "noise.jsonl").write_bytes(b"\xff\xfe\n{}\n")
    assert len(named(events_of(tmp_path), "whole")) == 1
    tracer.close()


def test_a_tracer_is_bounded_in_memory_and_on_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(tmp_path / "a.jsonl", max_buffered=10, max_file_bytes=2_000)
    for _ in range(50):
        tracer.count("depth", tracer.now_us() + tracer.num_buffered + tracer.num_dropped)
    assert tracer.num_buffered == 10
    assert tracer.num_dropped == 40
    while tracer.enabled:  # each flush adds ten
        tracer.flush()
        for number in range(10):
            tracer.count("depth", -number)
    assert "the timeline ends here" in caplog.text
    assert (tmp_path / "a.jsonl").stat().st_size < 6_000
    with tracer.span("late", track="t"):
        pass
    tracer.close()


def test_threads_share_a_tracer(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "a.jsonl")
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait(60)
        for _ in range(200):
            with tracer.span(f"work {number}", track=f"thread {number}"):
                pass

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        tracer.flush()
    for thread in threads:
        thread.join(60)
    tracer.close()
    events = events_of(tmp_path)
    tracks = {event["args"]["name"]: event["tid"] for event in named(events, "thread_name")}
    assert len(set(tracks.values())) == 4
    for number in range(4):
        spans = named(events, f"work {number}")
        assert len(spans) == 200
        assert {span["tid"] for span in spans} == {tracks[f"thread {number}"]}


def test_a_disabled_tracer_records_nothing(tmp_path: Path) -> None:
    with OFF.span("a", track="t"), OFF.overlapping("b", kind="k"):
        OFF.count("c", 1)
        OFF.wait("d", "e", 0)
    OFF.flush()
    assert OFF.num_buffered == 0
    assert OFF.now_us() == 0


def test_a_second_process_of_the_same_name_keeps_the_first_ones_file(tmp_path: Path) -> None:
    Tracer(tmp_path / "a.jsonl").close()
    Tracer(tmp_path / "a.jsonl").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"a.{os.getpid()}.jsonl", "a.jsonl"]
