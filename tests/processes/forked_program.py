"""A fork server. Its workers execute the single line of their config. test_fork_server.py uses it."""

import os
import sys
from pathlib import Path

from asyncrl.launch.supervisor import fork_server


def run(config: Path) -> int:
    exec(config.read_text(), {"config": config})
    return 0


if __name__ == "__main__":
    code = fork_server.main(sys.argv[1], int(sys.argv[2]), run)
    sys.stdout.flush()
    os._exit(code)
