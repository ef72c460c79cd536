"""Logs of many processes as one stream: lines and entries from any pieces of bytes, the order, files that come and go."""

import itertools
import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.launch.logs import (
    MAX_ENTRY_LINES,
    MAX_LINE_BYTES,
    Entry,
    EntryParser,
    LineSplitter,
    LogFiles,
    LogMerger,
    select_workers,
    stream_logs,
    worker_of,
)

BEGAN = "2025-01-01 00:00:00.000"


def at(second, milli=0):
    return f"2025-03-01 12:{second // 60:02d}:{second % 60:02d}.{milli:03d}"


def line(second, worker="master/0", text="hello", level="INFO", milli=0):
    return f"{at(second, milli)} {level:7} {worker}: {text}\n".encode()


def parse(data, worker="master/0"):
    parser = EntryParser(worker, BEGAN)
    return [*parser.feed(data), *parser.end()]


def texts(entries):
    return [entry.text for entry in entries]


# ------------------------------------------------------------------------------------------------------- lines and entries


def test_a_line_of_ours():
    assert parse(line(7, milli=45, level="WARNING", text="a: b")) == [
        Entry(at(7, 45), "WARNING", "master/0", "a: b"),
    ]


def test_a_traceback_belongs_to_its_line():
    data = line(1, level="ERROR", text="failed") + b"Traceback (most recent call last):\n  File x\n\nValueError: no\n"
    first, second = parse(data + line(2))
    assert first.text == "failed\nTraceback (most recent call last):\n  File x\n\nValueError: no"
    assert first.is_error
    assert second.text == "hello"


def test_what_is_printed_past_the_logging_stands_for_itself():
    data = line(1, text="running") + b"x.py:3: UserWarning: old\n  warn()\nTraceback (most recent call last):\nE\n"
    assert [(entry.time, entry.level, entry.text) for entry in parse(data)] == [
        (at(1), "INFO", "running"),
        (at(1), "WARNING", "x.py:3: UserWarning: old\n  warn()\nTraceback (most recent call last):\nE"),
    ]
    crash = parse(line(1, text="running") + b"Fatal Python error: Segmentation fault\n\nThread 1\n")
    assert crash[1].is_error
    assert crash[1].text == "Fatal Python error: Segmentation fault\n\nThread 1"


def test_what_stands_before_the_first_time_gets_that_time():
    assert [(entry.time, entry.text) for entry in parse(b"import warning\n more\n" + line(5))] == [
        (at(5), "import warning\n more"),
        (at(5), "hello"),
    ]
    assert parse(b"last words\n") == [Entry(BEGAN, "", "master/0", "last words")]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"level":"warn","ts":"2025-03-01T12:00:01.234Z","caller":"x.go:1","msg":"slow","took":"1s"}',
            ("01.234", "WARNING", "slow  took=1s"),
        ),
        ('{"level":"fatal","ts":"2025-03-01T14:00:02.000+0200","msg":"no"}', ("02.000", "ERROR", "no")),
        ("2025-03-01 12:00:03.123456 W | etcdmain: old", ("03.123", "WARNING", "etcdmain: old")),
        ("WARNING: 2025/03/01 12:00:04 [core] grpc: x", ("04.000", "WARNING", "[core] grpc: x")),
        ("2025-03-01 12:00:05,678 - Batching - ERROR - y", ("05.678", "ERROR", "Batching - ERROR - y")),
    ],
)
def test_lines_of_etcd_and_of_libraries(text, expected, monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        (entry,) = parse(text.encode(), "etcd")
    finally:
        monkeypatch.undo()
        time.tzset()
    second, level, shown = expected
    assert (entry.time, entry.level, entry.text) == (f"2025-03-01 12:00:{second}", level, shown)


@pytest.mark.parametrize(
    "text", ['{"ts": 1', '{"ts":"x","level":1,"msg":"m"}', '{"ts":"","msg":2}', '["ts"]', '{"ts":' * 99]
)
def test_what_only_looks_like_etcd(text):
    assert texts(parse(text.encode())) == [text]


def test_a_clock_that_goes_back_does_not_change_the_order():
    assert [(entry.time, entry.text) for entry in parse(line(9, text="a") + line(3, text="b"))] == [
        (at(9), "a"),
        (at(9), "b"),
    ]


def test_bytes_that_are_no_text_and_escapes_that_a_terminal_would_obey():
    (entry,) = parse(line(1, text="x")[:-1] + b"\xff\xfe \x1b[31m\x07\x00\n")
    assert entry.text == "x�� ␛[31m\\x07\\x00"


def test_a_progress_bar_is_what_is_left_of_it():
    splitter = LineSplitter()
    assert splitter.feed(b"  0%\r 50%\r100%\nnext\r\n") == ["100%", "next"]


def test_a_huge_line_is_cut_and_says_so():
    splitter = LineSplitter()
    assert splitter.feed(b"a" * MAX_LINE_BYTES) == []
    assert splitter.feed(b"b" * 10_000_000) == []
    (text,) = splitter.feed(b"c\nd")
    assert text == "a" * MAX_LINE_BYTES + " ... (10000001 bytes more)"
    assert splitter.end() == ["d"]
    assert splitter.end() == []


def test_an_entry_without_end_goes_on_as_another():
    entries = parse(line(1) + b"more\n" * (2 * MAX_ENTRY_LINES))
    assert [entry.continued for entry in entries] == [False, True, True]
    assert "\n".join(texts(entries)).count("more") == 2 * MAX_ENTRY_LINES


pieces = st.lists(
    st.one_of(
        st.binary(max_size=30),
        st.sampled_from(
            [b"\n", b"\r", b"Traceback (most recent call last):\n", b'{"level":"warn","ts":"x"', "é".encode()]
        ),
        st.builds(line, st.integers(0, 999)),
    ),
    max_size=30,
)


@given(pieces, st.randoms(use_true_random=False))
def test_where_the_bytes_are_cut_makes_no_difference(parts, random):
    data = b"".join(parts)
    cuts = sorted(random.randint(0, len(data)) for _ in range(random.randint(0, 8)))
    parser = EntryParser("w", BEGAN)
    entries = [
        entry for begin, end in itertools.pairwise([0, *cuts, len(data)]) for entry in parser.feed(data[begin:end])
    ]
    assert [*entries, *parser.end()] == parse(data, "w")


# ----------------------------------------------------------------------------------------------------------------- merging


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 500), max_size=12), max_size=4), st.randoms(use_true_random=False))
def test_the_order_is_that_of_time_however_the_files_are_read(files, random):
    """Of files that are there: exact, and the same for any sizes of reads; nothing lost, nothing twice."""
    data = {
        f"w{index}": b"".join(
            line(second, f"w/{index}", f"{index}.{number}") for number, second in enumerate(sorted(seconds))
        )
        for index, seconds in enumerate(files)
    }
    expected = sorted(
        (at(second), f"w{index}", number)
        for index, seconds in enumerate(files)
        for number, second in enumerate(sorted(seconds))
    )
    merger = LogMerger()
    for name in data:
        merger.open(name, name, BEGAN)
    merged = []
    while data:
        name = merger.behind(data)
        size = random.randint(1, 200)
        merger.feed(name, data[name][:size], 0.0)
        data[name] = data[name][size:]
        if not data[name]:
            del data[name]
            merger.end(name, 0.0)
        merged += merger.ready()
    merged += merger.ready()
    assert [(entry.time, entry.worker, int(entry.text.partition(".")[2])) for entry in merged] == expected


def make_growing(*names, **options):
    merger = LogMerger(**options)
    for name in names:
        merger.open(name, name, BEGAN)
    return merger


def test_a_growing_file_is_waited_for_only_so_long():
    merger = make_growing("a", "b", hold_s=0.5)
    merger.feed("a", line(2, text="second"), 10.0)
    assert list(merger.ready(10.4)) == []
    merger.feed("b", line(1, text="first"), 10.4)
    assert list(merger.ready(10.45)) == []
    assert texts(merger.ready(10.95)) == ["first", "second"]
    merger.feed("a", line(3, text="alone"), 11.0)
    assert list(merger.ready(11.4)) == []
    assert texts(merger.ready(11.5)) == ["alone"]


def test_what_all_have_passed_waits_for_nothing():
    merger = make_growing("a", "b", hold_s=1000.0)
    merger.feed("a", line(1, text="first") + line(5), 0.0)
    assert list(merger.ready(0.0)) == []
    merger.feed("b", line(6), 0.0)
    assert texts(merger.ready(0.0)) == ["first"]


def test_a_line_is_shown_though_none_follows_it_and_what_comes_later_goes_on():
    merger = make_growing("a", hold_s=0.5)
    merger.feed("a", line(1, level="ERROR", text="failed") + b"Traceback (most recent call last):\n", 0.0)
    assert list(merger.ready(0.4)) == []
    assert texts(merger.ready(0.5)) == ["failed\nTraceback (most recent call last):"]
    merger.feed("a", b"  File x\nVal", 1.0)
    (more,) = merger.ready(1.5)
    assert (more.text, more.level, more.continued) == ("  File x", "ERROR", True)
    merger.end("a", 2.0)
    assert texts(merger.ready(2.0)) == ["Val"]


def test_what_is_held_is_bounded():
    merger = make_growing("silent", "a", hold_s=1000.0, max_held=10)
    merger.feed("a", b"".join(line(second, text=str(second)) for second in range(30)), 0.0)
    assert texts(merger.ready(0.0)) == [str(second) for second in range(19)]  # the newest of the 30 is still open


# ------------------------------------------------------------------------------------------------------------------- files


class Folder:
    """A folder of logs that changes at every pause of the reader; ends after the last change."""

    def __init__(self, path, *changes):
        self.path = path
        self._changes = list(changes)
        self._now = 0.0

    def goes_on(self):
        return bool(self._changes)

    def pause(self):
        self._now += 1.0
        self._changes.pop(0)(self.path)

    def stream(self, wanted=lambda worker: True):
        files = LogFiles(self.path, wanted)
        entries = stream_logs(files, LogMerger(), goes_on=self.goes_on, clock=lambda: self._now, pause=self.pause)
        return [entry.text if entry else None for entry in entries]


def append(name, data):
    def change(folder):
        with (folder / name).open("ab") as file:
            file.write(data)

    return change


def nothing(folder):
    pass


def test_a_folder_that_is_read_once(tmp_path):
    append("master_0.log", line(1, text="a") + line(3, text="c") + b"  cut sho")(tmp_path)
    append("etcd.log", line(2, text="b"))(tmp_path)
    append("model_worker_0.log", b"")(tmp_path)
    append("notes.txt", line(0, text="no log"))(tmp_path)
    assert Folder(tmp_path).stream() == ["a", "b", "c\n  cut sho"]
    assert Folder(tmp_path).stream(lambda worker: worker == "master/0") == ["a", "c\n  cut sho"]


def test_a_folder_that_grows(tmp_path):
    append("a_0.log", line(1, text="old"))(tmp_path)
    folder = Folder(
        tmp_path,
        nothing,
        append("a_0.log", line(4, text="fo")[:-1]),
        append("a_0.log", b"ur\n"),
        append("b_0.log", line(5, text="a new file")),
        append("a_0.log", line(6, text="last")),
    )
    assert folder.stream() == [None, "old", "four", "a new file", "last"]


def test_files_that_are_cut_replaced_or_deleted(tmp_path):
    file = tmp_path / "a_0.log"
    file.write_bytes(line(1, text="one"))

    def rotate(folder):
        append("a_0.log", line(2, text="unread when it was rotated"))(folder)
        file.rename(folder / "a_0.log.1")
        file.write_bytes(line(3, text="in the new file"))

    folder = Folder(
        tmp_path,
        nothing,
        rotate,
        lambda folder: os.truncate(file, 0),
        append("a_0.log", line(4, text="after the cut")),
        lambda folder: file.unlink(),
        append("b_0.log", line(5, text="others go on")),
    )
    assert folder.stream() == [
        None,
        "one",
        "unread when it was rotated",
        "in the new file",
        "after the cut",
        "others go on",
    ]


def test_a_long_log_is_read_in_order_before_what_follows(tmp_path):
    """Also where one file's first piece reaches far beyond what was read of the other."""
    append("busy_0.log", b"".join(line(second % 3000, text=f"{second} {'x' * 200}") for second in range(3000)))(
        tmp_path
    )
    append("quiet_0.log", line(0, text="0 q") + line(2999, text="2999 q"))(tmp_path)
    shown = [text for text in Folder(tmp_path, nothing).stream() if text is not None]
    assert len(shown) == 3002
    assert [int(text.split()[0]) for text in shown] == sorted(int(text.split()[0]) for text in shown)


# ------------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("stem", "worker"), [("rollout_worker_12", "rollout_worker/12"), ("etcd", "etcd"), ("x_y", "x_y"), ("_1", "/1")]
)
def test_file_names_are_workers(stem, worker):
    assert worker_of(stem) == worker


def test_workers_are_asked_for_in_three_ways():
    known = {"rollout_worker/0", "rollout_worker/1", "master/0", "etcd"}
    assert select_workers(["rollout_worker"], known) == {"rollout_worker/0", "rollout_worker/1"}
    assert select_workers(["rollout_worker/1", "etcd"], known) == {"rollout_worker/1", "etcd"}
    assert select_workers(["rollout_worker_1", "master"], known) == {"rollout_worker/1", "master/0"}
    with pytest.raises(ValueError, match="no log of 'rolout_worker': did you mean rollout_worker"):
        select_workers(["rolout_worker"], known)
    with pytest.raises(ValueError, match="there are etcd, master/0, rollout_worker/0, rollout_worker/1"):
        select_workers(["zzz"], known)


def test_entries_are_json():
    (entry,) = parse(line(1))
    assert json.loads(json.dumps(entry.__dict__))["worker"] == "master/0"
