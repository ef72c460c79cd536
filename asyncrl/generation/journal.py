"""The journal of generated tokens over time: evidence that generation continues while the trainer trains.

One JSON line per 100 ms bucket and weight version with sampled tokens, in `<run_dir>/journal/generation_server_<i>.jsonl`:
`{"time": start of the bucket in unix seconds, "tokens": number of tokens, "version": weight version}`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.metrics import JOURNAL_BUCKET_S, JsonLinesWriter

FLUSH_INTERVAL_S = 1.0
_BUCKETS_PER_S = round(1 / JOURNAL_BUCKET_S)


def journal_path(run_dir: str | Path, index: int) -> Path:
    return Path(run_dir) / "journal" / f"generation_server_{index}.jsonl"


class TokenJournal:
    """Counts tokens per bucket.

    The engine calls `add`, from any thread: the embedded engine after every forward pass, the SGLang engine for every piece of a
    response. The server calls `flush` about once a second.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = SYSTEM_CLOCK.time) -> None:
        self._writer = JsonLinesWriter(path)
        self._now = now
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, str], int] = {}  # (bucket number, version) -> tokens; a flush removes entries

    def add(self, tokens: int, version: str) -> None:
        if tokens == 0:
            return
        key = (int(self._now() * _BUCKETS_PER_S), version)
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + tokens

    def flush(self, *, everything: bool = False) -> None:
        """Write the completed buckets. everything: also the current one."""
        current = int(self._now() * _BUCKETS_PER_S)
        with self._lock:
            over = sorted(key for key in self._counts if everything or key[0] < current)
            lines = [(bucket, version, self._counts.pop((bucket, version))) for bucket, version in over]
        for bucket, version, tokens in lines:
            self._writer.write({"time": bucket / _BUCKETS_PER_S, "tokens": tokens, "version": version})

    def close(self) -> None:
        self.flush(everything=True)
        self._writer.close()
