"""A fork server for test_fork_server.py. The config file of each worker is a line of Python, which the worker executes."""

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
