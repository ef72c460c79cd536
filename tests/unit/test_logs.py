"""Logs of many processes in one sequence: parsing of lines and entries, their order, and files that appear and grow."""

import itertools
import json
import os
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.cli.commands.logs import Entry, LogFile, LogFiles, select_workers, stream_logs, worker_of


def at(second, milli=0):
    return f"2025-03-01 12:{second // 60:02d}:{second % 60:02d}.{milli:03d}"


def line(second, worker="master/0", text="hello", level="INFO", milli=0):
    return f"{at(second, milli)} {level:7} {worker}: {text}\n".encode()


def parse(*pieces, name="master_0"):
    """Return the entries of a file that is read each time another piece has been appended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.log")
        log, entries = None, []
        for number, piece in enumerate(pieces, start=1):
            with path.open("ab") as file:
                file.write(piece)
            log = log or LogFile(path)
            entries += log.new_entries(ended=number == len(pieces))
        log.close()
        return entries


def texts(entries):
    return [entry.text for entry in entries]


# ------------------------------------------------------------------------------------------------------- lines and entries


def test_a_line_of_an_asyncrl_process():
    assert parse(line(7, milli=45, level="WARNING", text="a: b")) == [
        Entry(at(7, 45), "WARNING", "master/0", "a: b"),
    ]


def test_a_traceback_belongs_to_its_line():
    data = line(1, level="ERROR", text="failed") + b"Traceback (most recent call last):\n  File x\n\nValueError: no\n"
    first, second = parse(data + line(2))
    assert first.text == "failed\nTraceback (most recent call last):\n  File x\n\nValueError: no"
    assert first.is_error
    assert second.text == "hello"


def test_output_that_bypasses_the_logging_is_an_entry_of_its_own():
    data = line(1, text="running") + b"x.py:3: UserWarning: old\n  warn()\nTraceback (most recent call last):\nE\n"
    assert [(entry.time, entry.level, entry.text) for entry in parse(data)] == [
        (at(1), "INFO", "running"),
        (at(1), "WARNING", "x.py:3: UserWarning: old\n  warn()\nTraceback (most recent call last):\nE"),
    ]
    crash = parse(line(1, text="running") + b"Fatal Python error: Segmentation fault\n\nThread 1\n")
    assert crash[1].is_error
    assert crash[1].text == "Fatal Python error: Segmentation fault\n\nThread 1"


def test_lines_before_the_first_time_get_that_time(tmp_path):
    assert [(entry.time, entry.text) for entry in parse(b"import warning\n more\n" + line(5))] == [
        (at(5), "import warning\n more"),
        (at(5), "hello"),
    ]
    path = tmp_path / "master_0.log"
    path.write_bytes(b"last words\n")
    changed = time.mktime((2025, 3, 1, 12, 0, 7, 0, 0, -1))
    os.utime(path, (changed, changed))
    log = LogFile(path)
    assert list(log.new_entries(ended=True)) == [Entry(at(7), "", "master/0", "last words")]
    log.close()


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
        (entry,) = parse(text.encode(), name="etcd")
    finally:
        monkeypatch.undo()
        time.tzset()
    second, level, shown = expected
    assert (entry.time, entry.level, entry.text) == (f"2025-03-01 12:00:{second}", level, shown)


@pytest.mark.parametrize(
    "text", ['{"ts": 1', '{"ts":"x","level":1,"msg":"m"}', '{"ts":"","msg":2}', '["ts"]', '{"ts":' * 99]
)
def test_lines_that_only_resemble_those_of_etcd_are_plain_text(text):
    assert texts(parse(text.encode())) == [text]


def test_a_clock_that_goes_back_does_not_change_the_order_of_lines():
    assert [(entry.time, entry.text) for entry in parse(line(9, text="a") + line(3, text="b"))] == [
        (at(9), "a"),
        (at(9), "b"),
    ]


def test_invalid_utf8_and_terminal_escapes_are_made_visible():
    (entry,) = parse(line(1, text="x")[:-1] + b"\xff\xfe \x1b[31m\x07\x00\n")
    assert entry.text == "x�� ␛[31m\\x07\\x00"


def test_only_the_last_state_of_a_progress_bar_is_kept():
    (entry,) = parse(line(1) + b"  0%\r 50%\r100%\nnext\r\n")
    assert entry.text == "hello\n100%\nnext"


def test_lines_that_arrive_after_their_entry_was_read_are_entries_of_their_own():
    """Half a line is read only after the rest of it has arrived."""
    pieces = [line(1, level="ERROR", text="failed"), b"  File x\nVal", b"ueError: no\n" + line(2)]
    assert [(entry.time, entry.level, entry.text) for entry in parse(*pieces)] == [
        (at(1), "ERROR", "failed"),
        (at(1), "ERROR", "  File x"),
        (at(1), "ERROR", "ValueError: no"),
        (at(2), "INFO", "hello"),
    ]


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


@settings(max_examples=60)
@given(pieces, st.randoms(use_true_random=False))
def test_no_line_is_lost_wherever_the_bytes_are_cut(parts, random):
    data = b"".join(parts)
    cuts = sorted(random.randint(0, len(data)) for _ in range(random.randint(0, 8)))
    cut = parse(*(data[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(data)])))

    def lines_of(entries):
        return [text for entry in entries for text in entry.text.split("\n") if text.strip()]

    assert lines_of(cut) == lines_of(parse(data))
    assert [entry.time for entry in cut] == sorted(entry.time for entry in cut)


# ------------------------------------------------------------------------------------------------------------------- files


class Folder:
    """A folder of logs that changes in every pause of the reader. The stream ends after the last change."""

    def __init__(self, path, *changes):
        self.path = path
        self._changes = list(changes)

    def goes_on(self):
        return bool(self._changes)

    def pause(self):
        self._changes.pop(0)(self.path)

    def stream(self, wanted=lambda worker: True):
        files = LogFiles(self.path, wanted)
        entries = stream_logs(files, goes_on=self.goes_on, pause=self.pause)
        shown = [entry.text if entry else None for entry in entries]
        files.close()
        return shown


def append(name, data):
    def change(folder):
        with (folder / name).open("ab") as file:
            file.write(data)

    return change


def nothing(folder):
    pass


def test_a_folder_is_read_in_order_of_time(tmp_path):
    append("master_0.log", line(1, text="a") + line(3, text="c") + b"  cut sho")(tmp_path)
    append("etcd.log", line(2, text="b"))(tmp_path)
    append("model_worker_0.log", b"")(tmp_path)
    append("notes.txt", line(0, text="no log"))(tmp_path)
    assert Folder(tmp_path).stream() == ["a", "b", "c\n  cut sho"]
    assert Folder(tmp_path).stream(lambda worker: worker == "master/0") == ["a", "c\n  cut sho"]


def test_a_growing_folder_is_followed(tmp_path):
    append("a_0.log", line(1, text="old"))(tmp_path)
    folder = Folder(
        tmp_path,
        nothing,
        append("a_0.log", line(4, text="fo")[:-1]),
        append("a_0.log", b"ur\n"),
        append("b_0.log", line(5, text="a new file")),
        append("a_0.log", line(6, text="last")),
    )
    assert folder.stream() == ["old", None, "four", "a new file", "last"]


def test_new_entries_of_all_files_are_in_order_of_time(tmp_path):
    def two(folder):
        append("a_0.log", line(5, text="five") + line(7, text="seven"))(folder)
        append("b_0.log", line(4, text="four") + line(6, text="six"))(folder)

    assert Folder(tmp_path, nothing, two).stream() == [None, "four", "five", "six", "seven"]


def test_a_log_linked_by_the_next_attempt_is_read_once(tmp_path):
    first, second = tmp_path / "attempt_1", tmp_path / "attempt_2"
    for folder in (first, second):
        folder.mkdir()
    append("rollout_worker_0.log", line(1, text="old"))(first)
    (second / "rollout_worker_0.log").symlink_to("../attempt_1/rollout_worker_0.log")
    (second / "etcd.log").symlink_to("../attempt_1/etcd.log")  # the target does not exist
    files = LogFiles(first, lambda worker: True)
    assert texts(files.new_entries(ended=False)) == ["old"]
    files.folder = second
    append("rollout_worker_0.log", line(2, text="new"))(second)
    assert texts(files.new_entries(ended=True)) == ["new"]
    files.close()


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 500), max_size=12), max_size=4))
def test_merged_entries_are_in_order_of_time(seconds_of_files):
    """No entry is lost, and none is repeated."""
    expected = []
    with tempfile.TemporaryDirectory() as folder:
        for index, seconds in enumerate(seconds_of_files):
            for number, second in enumerate(sorted(seconds)):
                append(f"w_{index}.log", line(second, f"w/{index}", str(number)))(Path(folder))
                expected.append((at(second), f"w/{index}", str(number)))
        files = LogFiles(Path(folder), lambda worker: True)
        merged = [(entry.time, entry.worker, entry.text) for entry in stream_logs(files) if entry]
        files.close()
    assert merged == sorted(expected, key=lambda entry: (entry[0], entry[1], int(entry[2])))


def test_a_long_log_is_merged_in_order(tmp_path):
    """This holds even if the first block read from one file extends far beyond what has been read of the other."""
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
def test_file_names_are_mapped_to_workers(stem, worker):
    assert worker_of(stem) == worker


def test_workers_are_selected_by_kind_by_name_or_by_file_name():
    known = {"rollout_worker/0", "rollout_worker/1", "master/0", "etcd"}
    assert select_workers(["rollout_worker"], known) == {"rollout_worker/0", "rollout_worker/1"}
    assert select_workers(["rollout_worker/1", "etcd"], known) == {"rollout_worker/1", "etcd"}
    assert select_workers(["rollout_worker_1", "master"], known) == {"rollout_worker/1", "master/0"}
    with pytest.raises(ValueError, match="no log of 'rolout_worker': did you mean 'rollout_worker'"):
        select_workers(["rolout_worker"], known)
    with pytest.raises(ValueError, match="existing logs: etcd, master/0, rollout_worker/0, rollout_worker/1"):
        select_workers(["zzz"], known)


def test_entries_can_be_written_as_json():
    (entry,) = parse(line(1))
    assert json.loads(json.dumps(entry.__dict__))["worker"] == "master/0"
