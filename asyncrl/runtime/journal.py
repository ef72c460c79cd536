"""Journals that are written beside the work: what a process did, for `asyncrl-launch audit` and whoever looks later.

Whoever has something to write down never waits for a disk. One that is full, or slow, costs memory up to a bound; past it the
worker ends with a StorageError that says so: a journal with a hole would prove nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from asyncrl.protocol.messages import DECODE_ERRORS
from asyncrl.runtime.disk import StorageError
from asyncrl.runtime.metrics import JsonLinesWriter

MAX_UNWRITTEN = 100_000  # records; of a few hundred bytes each
_LONGEST_LINE = 65_536

logger = logging.getLogger(__name__)


class BackgroundJournal:
    """One JSON object a line, appended to `<run_dir>/journal/<name>.jsonl`.

    consumes: `add`.  produces: lines, as soon as the disk takes them; what gathers meanwhile goes together.
    waits for: the disk, on a thread.  unblocked by: room on it. Backpressure: none, but the end of the worker past MAX_UNWRITTEN.
    """

    def __init__(
        self, path: Path, *, max_unwritten: int = MAX_UNWRITTEN, most_at_once: int = 1000, retry_s: float = 1.0
    ) -> None:
        """most_at_once: records of one write. retry_s: before a disk that has refused is tried again, and between two looks at one
        that does not answer."""
        self._path = path
        self._writer = JsonLinesWriter(path)
        self.last = _last_record(path)  # of whoever wrote before
        self._max_unwritten, self._most_at_once, self._retry_s = max_unwritten, most_at_once, retry_s
        self._unwritten: list[bytes] = []
        self._news = asyncio.Event()
        self._lock = threading.Lock()  # at the end two threads may write

    @property
    def num_unwritten(self) -> int:
        return len(self._unwritten)

    def add(self, record: Mapping[str, object]) -> None:
        """Never waits."""
        self._unwritten.append(msgspec.json.encode(record) + b"\n")
        self._news.set()

    async def run(self) -> None:
        """Write, for ever. Raises StorageError where a disk that refuses, or hangs, has let too much gather."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self._unwritten:
                try:
                    await self._write_soon()
                except StorageError as error:
                    if len(self._unwritten) > self._max_unwritten:
                        raise
                    logger.warning("%s; what is to be written is kept in memory", error)
                    await asyncio.sleep(self._retry_s)

    async def _write_soon(self) -> None:
        writing = asyncio.get_running_loop().run_in_executor(None, self._write_some)
        while not writing.done():
            await asyncio.wait({writing}, timeout=self._retry_s)
            if not writing.done() and len(self._unwritten) > self._max_unwritten:
                raise StorageError(
                    f"{self._path} could not be written: the disk does not answer, and {len(self._unwritten)} records wait"
                )
        writing.result()
        if len(self._unwritten) > self._max_unwritten:
            raise StorageError(
                f"{self._path} could not be written: the disk is slower than the work, and {len(self._unwritten)} records wait"
            )

    def close(self) -> None:
        """Write what is left, if the disk takes it. Waits for the disk: call it on a thread."""
        try:
            while self._unwritten:
                self._write_some()
        except StorageError as error:
            logger.warning("%d records of a journal are lost: %s", len(self._unwritten), error)
        self._writer.close()

    def _write_some(self) -> None:
        """On a thread. A record leaves the memory when it is on disk whole."""
        with self._lock:
            batch = self._unwritten[: self._most_at_once]
            self._writer.write_lines(batch)
            del self._unwritten[: len(batch)]


def _last_record(path: Path) -> dict[str, object] | None:
    """The last record of a journal; None where there is none. Lines that hold no JSON object are passed over."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_LINE))
        lines = file.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(*DECODE_ERRORS):
            return msgspec.json.decode(line, type=dict[str, object])
    return None
