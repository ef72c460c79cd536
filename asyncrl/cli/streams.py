"""Standard streams of the commands that are closed, full, without a reader or of a narrow encoding: a command works without its
output.

Output that cannot be written is dropped, and the command goes on to its end: its exit code tells its result. Only a command whose
whole work is output without an end (`logs`, `status --watch`) ends with its reader.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any


class LossyFile(io.FileIO):
    """A file that drops what cannot be written."""

    ends_with_reader = False  # raise BrokenPipeError where the reader has ended

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if self.ends_with_reader and isinstance(error, BrokenPipeError):
                self.ends_with_reader = False  # once: the interpreter writes what is left when it ends
                raise
            return len(data)


def use_any_streams() -> list[LossyFile]:
    """Replace stdout and stderr of this process; return their files. Closed ones (`>&-`) become /dev/null, so that no file that is
    opened later gets their descriptor. A character that the encoding lacks is written as its escape."""
    files = []
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
    for name, fd in (("stdout", 1), ("stderr", 2)):
        before = getattr(sys, name)
        encoding = before.encoding if before is not None else "utf-8"
        raw = LossyFile(fd if before is not None else os.open(os.devnull, os.O_WRONLY), "w", closefd=False)
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding,
            errors="backslashreplace",
            line_buffering=name == "stderr" or raw.isatty(),
        )
        setattr(sys, name, wrapped)
        files.append(raw)
    return files
