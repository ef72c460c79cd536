"""Journals written in the background: a record of a process's actions for `asyncrl-launch audit` and later analysis.

Adding a record never waits for a disk. While a disk is full or slow, records stay in memory up to a bound. Above it the
worker fails with a StorageError, because a journal with missing records would prove nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.protocol.errors import DECODE_ERRORS, ErrorClass, classify
from asyncrl.runtime.disk import StorageError
from asyncrl.runtime.metrics import JsonLinesWriter

MAX_UNWRITTEN = 100_000  # records of a few hundred bytes each
_LONGEST_LINE = 65_536

logger = logging.getLogger(__name__)


class BackgroundJournal:
    """Appends one JSON object per line to `<run_dir>/journal/<name>.jsonl`.

    consumes: `add`.  produces: lines, as soon as the disk accepts them; records that accumulate meanwhile are written
    together.
    waits for: the disk, on a thread.  unblocked by: space on it.  Backpressure: none; the worker fails above
    MAX_UNWRITTEN.
    """

    def __init__(
        self, path: Path, *, max_unwritten: int = MAX_UNWRITTEN, most_at_once: int = 1000, retry_s: float = 1.0
    ) -> None:
        """most_at_once: records per write. retry_s: delay before retrying a disk that refused a write, and between two
        checks of one that does not respond.
        """
        self._path = path
        self._writer = JsonLinesWriter(path)
        self.last = _last_record(path)  # last record of the previous process with this journal; None: there is none
        self._max_unwritten, self._most_at_once, self._retry_s = max_unwritten, most_at_once, retry_s
        self._unwritten: list[bytes] = []
        self._news = asyncio.Event()
        self._lock = threading.Lock()  # `close` may write while the thread of `run` still does

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten)

    def add(self, record: Mapping[str, object]) -> None:
        """Queue a record. Never blocks."""
        self._unwritten.append(msgspec.json.encode(record) + b"\n")
        self._news.set()

    async def run(self) -> None:
        """Write forever. Raises StorageError if the disk refuses for a permanent reason, or if too many records accumulate because
        it is full, hangs or is too slow."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unwritten:
                try:
                    await self._write_soon()
                except StorageError as error:
                    if classify(error) is ErrorClass.PERMANENT or len(self._unwritten) > self._max_unwritten:
                        raise
                    logger.warning("%s; keeping the records in memory", error)
                    await asyncio.sleep(self._retry_s)

    async def _write_soon(self) -> None:
        writing = asyncio.get_running_loop().run_in_executor(None, self._write_some)
        writing.add_done_callback(lambda done: done.exception())  # asyncio reports a failure that is never retrieved
        while not writing.done():
            await asyncio.wait({writing}, timeout=self._retry_s)
            if not writing.done() and len(self._unwritten) > self._max_unwritten:
                raise StorageError(
                    f"{self._path} could not be written: the disk does not respond, and {len(self._unwritten)} records wait"
                )
        writing.result()
        if len(self._unwritten) > self._max_unwritten:
            raise StorageError(
                f"{self._path} could not be written: the disk is too slow, and {len(self._unwritten)} records wait"
            )

    def close(self) -> None:
        """Write the remaining records, if the disk accepts them. Blocks on the disk: call it on a thread."""
        try:
            while self._unwritten:
                self._write_some()
        except StorageError as error:
            logger.warning("lost %d journal records: %s", len(self._unwritten), error)
        self._writer.close()

    def _write_some(self) -> None:
        """Runs on a thread. Records leave the memory only after they have been written completely."""
        with self._lock:
            batch = self._unwritten[: self._most_at_once]
            self._writer.write_lines(batch)
            del self._unwritten[: len(batch)]


def _last_record(path: Path) -> dict[str, object] | None:
    """Return the last record of a journal; None if there is none. Lines that are not JSON objects are skipped."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(*DECODE_ERRORS):
            return msgspec.json.decode(line, type=dict[str, object])
    return None
