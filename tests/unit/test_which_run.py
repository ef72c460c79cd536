"""RUN may be left out where it is clear which run is meant."""

import pytest

from asyncrl.cli import main as cli
from asyncrl.cli.commands.which_run import run_dir_of
from asyncrl.config.schema import ConfigError
from asyncrl.launch.rundir import LOCK_FILE, RunLock


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Return a function that makes the folder of a run under ./runs."""
    monkeypatch.chdir(tmp_path)

    def make_run(name):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / LOCK_FILE).write_text("1\n")
        return folder

    return make_run


def test_the_only_run_is_meant(make):
    folder = make("a/t0")
    assert run_dir_of(None) == folder
    with pytest.raises(ConfigError, match="RUN is missing, and none is running under"):
        run_dir_of(None, running=True)


def test_of_several_runs_the_only_running_one_is_meant(make):
    make("a/t0")
    second = make("a/t1")
    with pytest.raises(ConfigError, match=r"there are several under .*:\n  .*runs/a/t0  interrupted, step 0\n  .*t1"):
        run_dir_of(None)
    lock = RunLock(second)
    lock.acquire()
    try:
        assert run_dir_of(None) == second
        assert run_dir_of("", running=True) == second
    finally:
        lock.release()


def test_without_any_run_or_with_a_wrong_name_runs_are_listed(make):
    with pytest.raises(ConfigError, match="RUN is missing, and there is none under"):
        run_dir_of(None)
    make("a/t0")
    with pytest.raises(ConfigError, match=r"'runs/a/t' is neither .* nor a config; runs under .*:\n  .*runs/a/t0"):
        run_dir_of("runs/a/t")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["status"], 3, "runs/a/t0: no run is running here"),
        (["logs"], 1, "runs/a/t0: there are no logs here"),
        (["logs", "master"], 1, "runs/a/t0: there are no logs here"),
        (["inspect"], 1, "runs/a/t0"),
        (["plot"], 1, "runs/a/t0: nothing to draw"),
        (["audit"], 1, "runs/a/t0 has no journal"),
        (["stop"], 2, "RUN is missing, and none is running"),
        (["profile"], 2, "RUN is missing, and none is running"),
        (["scale", "generation=2"], 2, "RUN is missing, and none is running"),
        (["trace"], 1, "runs/a/t0: no timelines"),
        (["resume"], 2, "runs/a/t0 has no configs/attempt_N"),
        (["resume", "train.max_steps=9"], 2, "runs/a/t0 has no configs/attempt_N"),
    ],
)
def test_every_command_about_a_run_has_the_same_rule(make, capsys, words, code, told):
    make("a/t0")
    assert cli.main(words) == code
    assert told in capsys.readouterr().out.replace("\n", "")
