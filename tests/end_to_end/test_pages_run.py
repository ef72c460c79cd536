"""The commands of the pages, run as a user types them.

docs/running.md is one session: a run is started, watched, scaled and stopped. Only overrides that shorten a run are added.
tests/hosts and tests/slurm run the commands of docs/hosts.md and docs/slurm.md. tests/unit/test_pages.py parses the others.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.testing.runs import RunHandle, assert_nothing_left, journal, train_steps
from tests import pages

PROGRAM = Path(sys.executable).parent / "asyncrl-launch"
RUNS = Path("runs", "sloppy-sorter")
SMALL = (
    "train.batch_size=8",
    "train.ppo.minibatches=1",
    "rollout.group_size=4",
    "eval.prompts=null",
    "weights.fsync=false",
)

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def place(sorter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's configs and the sloppy sorter, whose warm start has run."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "configs").symlink_to(pages.ROOT / "configs")
    example = folder / "examples" / "sloppy_sorter"
    shutil.copytree(pages.ROOT / "examples" / "sloppy_sorter", example, ignore=shutil.ignore_patterns("model", "data"))
    for made in ("model", "data"):
        (example / made).symlink_to(sorter / made)
    return folder


def words(line: str, *overrides: str) -> list[str]:
    """The command of a page's line."""
    program, *arguments = shlex.split(line, comments=True)
    assert program == "asyncrl-launch"
    return [str(PROGRAM), *arguments, *overrides]


def done(place: Path, line: str, *overrides: str) -> str:
    """Run a line of a page and return its output (stdout, then stderr). Asserts that the exit code is 0."""
    found = subprocess.run(words(line, *overrides), cwd=place, capture_output=True, text=True, timeout=900, check=False)
    assert found.returncode == 0, f"{line}\n{found.stdout}{found.stderr}"
    return found.stdout + found.stderr


def begun(place: Path, line: str, *overrides: str, trial: str = "b") -> RunHandle:
    """Start a line of a page: a command that goes on while others run. At its end the processes of the trial are killed."""
    return RunHandle(words(line, *overrides), place / RUNS / trial, cwd=place)


@pytest.mark.release
def test_the_session_of_running_and_watching(place: Path) -> None:
    """Every line of docs/running.md, in its order. A short run `t0` comes first: the page plots it beside `b`."""
    page = Path(pages.ROOT, "docs", "running.md")
    lines = iter(pages.commands(page))
    assert next(lines).startswith(". .venv/bin/activate")
    done(place, next(lines))
    assert (place / "my_task" / "config.yaml").is_file()
    done(place, next(lines))
    done(place, next(lines))
    done(place, next(lines), f"fileroot={place / 'dry'}")
    assert list(place.glob("dry/sloppy-sorter/t0/dry_run/*"))
    assert "share_prefix: " in done(place, next(lines))
    done(place, "asyncrl-launch run configs/quickstart_cpu.yaml", *SMALL, "train.max_steps=2")
    shown = ("record.trajectories=true", "trace=true", "train.max_steps=0", "train.num_epochs=1000")
    with begun(place, next(lines), *SMALL, *shown) as run:
        run.wait_for_step(2, 120)
        table = done(place, next(lines))
        assert "t0" in table
        assert "running" in table
        with begun(place, next(lines)) as watch, begun(place, next(lines)) as follow:
            watch.wait_for_output("generation_server/1", 30)
            done(place, next(lines))
            assert (place / RUNS / "plot.png").is_file()
            done(place, next(lines))
            assert (place / "t0.html").is_file()
            with begun(place, next(lines), trial="none") as shown_page:
                shown_page.wait_for_output("the page: ", 60)
                shown_page.signal(signal.SIGINT)
                assert shown_page.wait(30) == 130
            assert "reward" in done(place, next(lines))
            for _ in ("trace", "profile", "scale"):
                done(place, next(lines))
            run.wait_until(lambda: journal(run.run_dir, "generation_server_2"), "the third server sampled tokens", 60)
            done(place, next(lines))
            assert run.wait(60) == 143, run.output()  # `stop` sends SIGTERM
            assert watch.wait(30) == 0, watch.output()
            assert follow.wait(30) == 0, follow.output()
            assert "generation_server/2" in watch.output()
    done(place, next(lines), *SMALL, "train.max_steps=0", "train.num_epochs=1000")
    done(place, f"asyncrl-launch stop {RUNS}/c --now")
    assert "complete" in done(place, next(lines))
    assert list(lines) == []
    for trial in ("b", "c"):
        assert_nothing_left(place / RUNS / trial)


@pytest.mark.release
def test_the_tutorial(tmp_path: Path) -> None:
    """Every command of docs/tutorial.md, in its order, with its reward. Only the first run is shortened."""
    page = Path(pages.ROOT, "docs", "tutorial.md")
    (reward,) = pages.blocks(page, "python")
    lines = [line for block in pages.blocks(page, "bash") for line in block.splitlines()]
    folder = tmp_path
    for line in lines:
        if line == "cd my_task":
            folder = tmp_path / "my_task"
            (folder / "partial.py").write_text(reward, encoding="utf-8")
        elif line == "asyncrl-launch check config.yaml":
            found = subprocess.run(words(line), cwd=folder, capture_output=True, text=True, timeout=300, check=False)
            assert found.returncode == 2
            assert "there is no prompt file data/train.jsonl; make it with `python make.py --out .`" in found.stdout
        else:
            is_first_run = line.startswith("asyncrl-launch run config.yaml record")
            done(folder, line, *(["train.max_steps=12"] if is_first_run else []))
    steps = train_steps(folder / "runs" / "my_task" / "partial")
    assert [step["step"] for step in steps] == list(range(1, 31))
    assert steps[-1]["reward/mean"] > 0.85


@pytest.mark.parametrize("number", [0, 1], ids=["actor_critic", "sync"])
def test_a_layout_of_the_page_trains(place: Path, number: int) -> None:
    page = Path(pages.ROOT, "docs", "layouts.md")
    # tests/end_to_end/test_seed_configs.py runs the configs of the other lines
    line, *_ = pages.blocks(page, "bash")[number].splitlines()
    done(place, line, *SMALL, "train.max_steps=2", f"trial=layout{number}")
    assert [len(train_steps(run)) for run in place.glob(f"runs/*/layout{number}")] == [2]
