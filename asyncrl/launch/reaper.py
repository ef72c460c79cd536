"""Kills process groups when its standard input ends: the last line of defence against orphans.

The launcher holds the other end of the pipe and writes `add N` for a process group it starts, `gone N` for one that ended.
However the launcher dies, the pipe ends, and whatever is left of those groups (grandchildren too, such as what a reward
function started) is killed. This runs in a session of its own, so that a Ctrl-C does not reach it.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        verb, group = line.split()
        (groups.add if verb == "add" else groups.discard)(int(group))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
