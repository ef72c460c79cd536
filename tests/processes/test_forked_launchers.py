"""Launchers of test runs that the session's fork server forks have the environment that the test gives them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.forked_launchers import ForkedLaunchers

LIMIT_S = 60.0


@pytest.mark.timeout(120)
def test_the_first_run_of_a_session_keeps_its_own_variables(tmp_path: Path) -> None:
    launchers = ForkedLaunchers()
    command = [sys.executable, "-P", "-m", "asyncrl.cli.main", "--help"]
    try:
        with (tmp_path / "output").open("wb") as output:
            started = launchers.start(command, stdout=output, cwd=None, env={**os.environ, "OF_THIS_RUN": "set"})
        assert started.wait(LIMIT_S) == 0
        assert isinstance(started, subprocess.Popen), "a launcher that is forked has no variables of its own"
    finally:
        launchers.close()
