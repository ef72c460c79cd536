"""Detects from the kernel's counters of OOM kills whether the kernel killed a process because memory ran out.

The counters are those of this process's control group and of the groups above it where they are readable (a container's limit),
otherwise those of the whole machine. The kernel log is not used, because users rarely have the right to read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from asyncrl.runtime.disk import size_text

_ROOT = Path("/")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_UNLIMITED_BYTES = 1 << 60
_LATELY_S = 10.0


class OomCounters:
    """The counters of OOM kills. Reads them at construction and at each call of `kills_lately`."""

    def __init__(self, root: Path = _ROOT) -> None:
        """root: the folder that contains proc and sys."""
        self._root = root
        self._files = list(_files(root))
        self._seen = self._read()
        self._told = ("", -math.inf)

    def kills_lately(self, now: float) -> str:
        """If a counter shows an OOM kill since the last call, return a text about this counter, else "". The same text is returned
        for 10 s more, because the caller may ask twice about one process."""
        before, self._seen = self._seen, self._read()
        for file, count in self._seen.items():
            if count > before.get(file, count):
                limit = f", the limit is {size}" if (size := _limit_of(file)) else ""
                self._told = (f"{file} counts {count - before[file]} more{limit}", now)
                break
        text, seen_at = self._told
        return text if now - seen_at < _LATELY_S else ""

    def _read(self) -> dict[Path, int]:
        counts = {}
        for file in self._files:
            try:
                match = _COUNT.search(file.read_text(encoding="utf-8"))
            except (OSError, UnicodeDecodeError):
                continue
            if match:
                counts[file] = int(match[1])
        return counts


def _files(root: Path) -> Iterator[Path]:
    """Yield the counters of this process's control group and of those above it, nearest first; if there are none, the machine's."""
    found = False
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        group = base / path.lstrip("/")
        while True:  # inside a container the path may be the host's; the container's own group is then at the root
            if (group / name).is_file():
                found = True
                yield group / name
            if group in (base, group.parent):
                break
            group = group.parent
    if not found:
        yield root / "proc/vmstat"


def _limit_of(file: Path) -> str:
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            limit = int((file.parent / name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # no limit: "max"
            continue
        return size_text(limit) if limit < _UNLIMITED_BYTES else ""
    return ""
