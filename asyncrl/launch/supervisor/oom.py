"""Whether a process that was killed was killed by the kernel for want of memory: by the counters that the kernel keeps of that.

Those of our own control group and the ones above it where they can be read (a container's limit), else the whole machine's. No
log of the kernel is read, which takes rights that a user rarely has.
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
    """consumes: the counters, when it is made and at each look."""

    def __init__(self, root: Path = _ROOT) -> None:
        """root: of /proc and /sys."""
        self._root = root
        self._files = list(_files(root))
        self._seen = self._read()
        self._told = ("", -math.inf)

    def kills_lately(self, now: float) -> str:
        """What says that the kernel has killed for want of memory since the last look, or some seconds before it: who asks for one
        process may ask twice. "": nothing says so."""
        before, self._seen = self._seen, self._read()
        for file, count in self._seen.items():
            if count > before.get(file, count):
                limit = f", the limit is {size}" if (size := _limit_of(file)) else ""
                self._told = (f"{file} counts {count - before[file]} more{limit}", now)
                break
        text, told = self._told
        return text if now - told < _LATELY_S else ""

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
    """The counters of our control group and those above it, the nearest first; the machine's where there are none."""
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
        while True:  # inside a container the path may be the host's: then the root is its own
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
        except (OSError, ValueError):  # there is none: "max"
            continue
        return size_text(limit) if limit < _UNLIMITED_BYTES else ""
    return ""
