"""The program between a rollout worker and an agent's program: it ends with the worker, and all descendants end with it."""

from __future__ import annotations

import signal
import subprocess
import sys

from asyncrl.rewards import judge_main


def main() -> None:
    """Run the command in sys.argv, in a session of its own. Ends like it, or at SIGTERM, after all descendants have been killed."""
    signal.signal(signal.SIGTERM, judge_main.end_all)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    judge_main.on_parents_death(signal.SIGTERM)
    judge_main.adopt_orphans()
    child = subprocess.Popen(sys.argv[1:], start_new_session=True)
    status = judge_main.wait_for(child.pid)
    judge_main.kill_children()
    judge_main.end_as(status)


if __name__ == "__main__":
    main()
