"""Journals are written in the background: they stay complete despite disk faults, and the work does not wait for the disk."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.runtime.disk import StorageError
from asyncrl.runtime.journal import BackgroundJournal
from asyncrl.runtime.metrics import JsonLinesReader, JsonLinesWriter, read_json_lines


def numbers(path: Path) -> list[object]:
    return [record["n"] for record in read_json_lines(path)]


async def until_written(journal: BackgroundJournal) -> None:
    for _ in range(12_000):
        if not journal.num_unwritten:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{journal.num_unwritten} records are not written")


async def test_records_are_written_in_the_background_in_order(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "x.jsonl"
    journal = BackgroundJournal(path)
    assert journal.last is None
    writing = asyncio.create_task(journal.run())
    for n in range(2500):
        journal.add({"n": n})
    await until_written(journal)
    assert numbers(path) == list(range(2500))
    writing.cancel()
    journal.add({"n": 2500})
    journal.close()  # close writes the remaining records
    again = BackgroundJournal(path)
    assert again.last == {"n": 2500}
    again.close()


# ------------------------------------------------------------------------------------------------- files after a crash

TORN_ENDS = [b'{"n": 3', b"\0" * 70_000, b'{"n": 3\0\0\0', b"\xff\xfe\x00"]


@pytest.mark.parametrize("end", TORN_ENDS)
@pytest.mark.parametrize("whole", [b"", b'{"n": 1}\n{"n": 2}\n'])
def test_a_torn_end_is_cut_off_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bytes, end: bytes
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(whole + end)
    before = numbers(path)
    journal = BackgroundJournal(path)
    assert journal.last == ({"n": before[-1]} if before else None)
    journal.add({"n": 4})
    journal.close()
    assert path.read_bytes() == whole + b'{"n":4}\n'
    assert [record.message for record in caplog.records] == [
        f"{path} ends with {len(end)} bytes that are not a complete line; truncating them"
    ]


@pytest.mark.parametrize("line", [b"{broken", b"\0\0\0\0", b"[1]", b"", b"\xff"])
def test_a_torn_line_in_the_middle_is_reported_or_skipped(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n":1}\n' + line + b'\n{"n":3}\n')
    with pytest.raises(ValueError, match=rf"{path}:2: not a JSON object: .*; delete the line"):
        read_json_lines(path)
    told: list[str] = []
    assert read_json_lines(path, told.append) == [{"n": 1}, {"n": 3}]
    (text,) = told
    assert text.startswith(f"{path}:2: not a JSON object: ")
    assert text.endswith("; the line is skipped")


@pytest.mark.parametrize("end", [b"", b'{"n":10'])
@pytest.mark.parametrize("wide", [1, 100_000])
def test_the_newest_lines_are_read_without_the_others(tmp_path: Path, wide: int, end: bytes) -> None:
    """Lines that are shorter and longer than the blocks in which their beginning is searched."""
    path = tmp_path / "x.jsonl"
    lines = [json.dumps({"n": n, "fill": "x" * wide}).encode() + b"\n" for n in range(9)]
    path.write_bytes(b"".join(lines) + end)
    for newest_bytes in (0, 1, len(end) + 1, len(end) + len(lines[8]), len(end) + len(lines[8]) + 1, 10**9):
        told: list[str] = []
        reader = JsonLinesReader(path, broken=told.append, newest_bytes=newest_bytes)
        first = sum(sum(map(len, lines[: n + 1])) <= path.stat().st_size - newest_bytes for n in range(9))
        with path.open("rb") as file, path.open("ab") as longer:
            assert [record["n"] for record in reader.new_records()] == list(range(first, 9))
            longer.write(b"\n" if end else b"{\n")
            longer.flush()
            assert (list(reader.new_records()), len(told)) == ([], 1)
            assert told[0].startswith(f"{path}:10: not a JSON object: ")
            longer.truncate(len(file.read()) - (1 if end else 2))
    assert list(JsonLinesReader(tmp_path / "none", newest_bytes=5).new_records()) == []


def test_the_last_record_is_found_before_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n":1}\n\0\0\0\n')
    journal = BackgroundJournal(path)
    assert journal.last == {"n": 1}
    journal.close()


class FullDisk:
    """Makes each write fail, or block."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = True
        self.number = errno.ENOSPC
        self.asked = threading.Event()  # set: a write has begun
        self.hangs = threading.Event()  # cleared: writes block
        self.hangs.set()
        whole = JsonLinesWriter.write_lines

        def write_lines(writer: JsonLinesWriter, lines: Sequence[bytes]) -> None:
            self.asked.set()
            assert self.hangs.wait(60.0)
            if self.full:
                raise StorageError(os.strerror(self.number), self.number)
            whole(writer, lines)

        monkeypatch.setattr(JsonLinesWriter, "write_lines", write_lines)


async def test_writes_are_retried_on_a_full_disk_while_the_work_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    path = tmp_path / "x.jsonl"
    journal = BackgroundJournal(path, retry_s=0.01)
    writing = asyncio.create_task(journal.run())
    for n in range(3):
        journal.add({"n": n})
        await asyncio.sleep(0.02)
    assert journal.num_unwritten == 3
    disk.full = False
    await until_written(journal)
    assert numbers(path) == [0, 1, 2]
    writing.cancel()
    journal.close()


async def test_a_disk_that_becomes_read_only_ends_the_work_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    disk.number = errno.EROFS
    journal = BackgroundJournal(tmp_path / "x.jsonl", retry_s=0.01)
    journal.add({"n": 0})
    with pytest.raises(StorageError) as caught:
        await asyncio.wait_for(journal.run(), 10.0)
    assert caught.value.errno == errno.EROFS
    journal.close()


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_disk_that_stays_full_or_hangs_ends_the_work_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    disk = FullDisk(monkeypatch)
    if hangs:
        disk.hangs.clear()
    retry_s = 0.01 if hangs else 60.0  # long: a slow thread must not look like a disk that hangs
    journal = BackgroundJournal(tmp_path / "x.jsonl", max_unwritten=10, retry_s=retry_s)
    writing = asyncio.create_task(journal.run())
    for n in range(11):
        journal.add({"n": n})
    with pytest.raises(StorageError, match="does not respond" if hangs else "No space left"):
        await asyncio.wait_for(writing, 60.0)
    disk.hangs.set()
    journal.close()


async def test_a_write_that_fails_after_its_journal_has_ended_is_not_reported_by_asyncio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    disk.hangs.clear()
    journal = BackgroundJournal(tmp_path / "x.jsonl")
    writing = asyncio.create_task(journal.run())
    journal.add({"n": 0})
    assert await asyncio.to_thread(disk.asked.wait, 60.0)
    writing.cancel()
    await asyncio.wait({writing})
    disk.hangs.set()
    await asyncio.get_running_loop().shutdown_default_executor()  # the write has failed now
    gc.collect()
    journal.close()
    assert "never retrieved" not in caplog.text


async def test_a_disk_that_is_too_slow_ends_the_work_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The disk is slower than the work, but it responds
    journal = BackgroundJournal(tmp_path / "x.jsonl", max_unwritten=20, most_at_once=5, retry_s=60.0)
    write = JsonLinesWriter.write_lines

    def write_few(writer: JsonLinesWriter, lines: Sequence[bytes]) -> None:
        write(writer, lines)
        for n in range(10):  # the work adds records meanwhile
            journal.add({"n": n})

    with monkeypatch.context() as patch:
        patch.setattr(JsonLinesWriter, "write_lines", write_few)
        journal.add({"n": 0})
        with pytest.raises(StorageError, match=r"the disk is too slow, and 2[1-9] records wait"):
            await asyncio.wait_for(journal.run(), 60.0)
    journal.close()


@pytest.mark.parametrize("torn", [b"", b'{"n": 2', b"x" * 200_000])
@pytest.mark.parametrize("long", [1, 70_000, 131_072])
def test_a_torn_line_of_any_length_is_cut_off_after_a_line_of_any_length(
    tmp_path: Path, torn: bytes, long: int
) -> None:
    path = tmp_path / "x.jsonl"
    whole = b'{"n":0}\n{"n":1,"text":"' + b"y" * long + b'"}\n'
    path.write_bytes(whole + torn)
    with JsonLinesWriter(path) as writer:
        assert path.read_bytes() == whole
        writer.write({"n": 2})
    assert numbers(path) == [0, 1, 2]


def test_a_file_of_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"x" * 200_000)
    JsonLinesWriter(path).close()
    assert path.read_bytes() == b""


def test_lines_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "x.jsonl")
    writer.write({"n": 0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))  # room for one of the two lines and half of the other
    try:
        with pytest.raises(StorageError, match="File too large"):
            writer.write_lines([b'{"n":1}\n', b'{"n":2}\n'])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert numbers(tmp_path / "x.jsonl") == [0]
    writer.write_lines([b'{"n":1}\n', b'{"n":2}\n'])
    assert numbers(tmp_path / "x.jsonl") == [0, 1, 2]
    writer.close()
