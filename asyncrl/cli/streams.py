"""Standard streams of the commands that are closed, full or of a narrow encoding: a command works without its output."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from asyncrl.protocol.errors import NO_SPACE


class _LossyFile(io.FileIO):
    """A file that drops what its disk has no room for. A reader that has ended still raises BrokenPipeError."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return len(data)


def use_any_streams() -> None:
    """Replace stdout and stderr of this process. Closed ones (`>&-`) become /dev/null, so that no file that is opened later gets
    their descriptor. Text to a full disk is dropped. A character that the encoding lacks is written as its escape."""
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
        raw = _LossyFile(fd if before is not None else os.open(os.devnull, os.O_WRONLY), "w", closefd=False)
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding,
            errors="backslashreplace",
            line_buffering=name == "stderr" or raw.isatty(),
        )
        setattr(sys, name, wrapped)
