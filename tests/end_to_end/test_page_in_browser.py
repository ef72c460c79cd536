"""The page of `asyncrl-launch ui` in Chromium: planted HTML stays text, keys, narrow windows, both colour schemes; and a run whose
page is frozen and killed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from msgspec.structs import asdict

from asyncrl.cli.page import saved_page
from asyncrl.data.trajectories import Entry, TrajectoryStore, recording_dir
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.trajectory import Episode, Response, build_sample, complete_sample, summary_of
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.process import python_module
from asyncrl.testing.runs import RunHandle, make_tiny_run, train_steps
from asyncrl.testing.tiny import make_char_tokenizer
from tests.support.browser import PROGRAM, Browser, open_browser

pytestmark = pytest.mark.release

PLANTED = "<script>planted=1</script><img src=x onerror=planted=1>"
UNTOUCHED = (
    "typeof planted === 'undefined' && !document.querySelector('img, iframe, object, [onerror]') "
    "&& document.scripts.length === 2"
)
START_S = 120.0


def test_chromium_is_installed() -> None:
    assert PROGRAM, "no chromium on the PATH: apt-get install chromium"


@contextmanager
def page_of(*run_dirs: Path) -> Iterator[str]:
    """Start the command. Yields the page's URL."""
    command = python_module("asyncrl.cli.main", "ui", *map(str, run_dirs), "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as page:
        assert page.stdout is not None
        try:
            yield json.loads(page.stdout.readline())["url"]
        finally:
            page.send_signal(signal.SIGINT)
            assert page.wait(30) == 130


def lines(path: Path, *records: dict[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def planted_run(run_dir: Path) -> Path:
    """A run with HTML in the names of a metric, a reason, a fault and a ticket, and in the tokens of a session of two turns."""
    steps = [
        {
            "step": number,
            "attempt": 1,
            "time": 1e9 + number,
            "reward/mean": 0.1,
            "time/step_s": 1.0,
            "time/train_s": 1.0,
        }
        | {f"count/{PLANTED}": 2.0, f"reward/{PLANTED}": 0.5}
        for number in range(1, 30)
    ]
    lines(run_dir / "metrics.jsonl", *steps)
    begun = {"event": "begun", "attempt": 1, "from": None, "time": 1e9}
    lines(run_dir / "journal" / "master.jsonl", begun, {"event": "rejected", "reason": PLANTED, "time": 1e9 + 2})
    lines(run_dir / "journal" / "faults.jsonl", {"event": "kill", "name": PLANTED, "time": 1e9 + 3})
    tokenizer = make_char_tokenizer(run_dir / "model", "".join(map(chr, range(32, 127))))
    (run_dir / "config.yaml").write_text(f"tokenizer_path: {run_dir / 'model'}\n")
    prompt, answer = tokenizer.encode("say it: "), tokenizer.encode(PLANTED)
    episode, packed = Episode(prompt), WeightVersion(1, 0).pack()
    for observation in ([], tokenizer.encode(" and again: ")):
        episode.add_observation(observation)
        context = list(episode.input_ids)
        episode.add_response(Response(context, answer, [-0.5] * len(answer), [(packed, len(answer))], True))
    episode.reward = 1.0
    ticket = f"a1-{PLANTED}-p0"
    sample = complete_sample(build_sample(ticket, [episode]), ticket_id=ticket, task_id=0, birth_time=1e9)
    meta = TrajectoryMeta(
        ticket_id=ticket,
        locator=Locator(0, 0),
        attempt=1,
        head=0,
        keys=list(sample.keys),
        birth_time=1e9,
        **asdict(summary_of(sample)),
    )
    folder = recording_dir(run_dir, 1)
    store = TrajectoryStore(folder, "model_worker/0", trained=True, max_bytes=10**9, prune=False)
    store.write(0, 1, [Entry(sample, meta, 0)])
    return run_dir


async def fits(browser: Browser) -> bool:
    """Whether the page is no wider than its window."""
    return bool(await browser.evaluate("document.documentElement.scrollWidth <= innerWidth"))


async def walk(browser: Browser) -> None:
    """Every view by its key, at both widths: it has content, and is no wider than its window."""
    for width in (1280, 400):
        await browser.resize(width, 900)
        for number, view in enumerate(("learning", "time", "processes", "trajectories", "advice"), 1):
            await browser.press(str(number))
            await browser.wait_for("document.querySelector('main').innerText.length > 10")
            assert await browser.evaluate("document.querySelector('[aria-selected=true]').textContent") == view
            assert await fits(browser), (width, view)


def broken_run(run_dir: Path) -> Path:
    """Files that were cut, or that are something else."""
    (run_dir / "journal").mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5, "time": 1000}\nbroken\n{"step": 2, "rew')
    (run_dir / "journal" / "master.jsonl").write_bytes(b"\x00\xff not JSON\n")
    for name in ("run.json", "summary.json", "config.yaml"):
        (run_dir / name).write_text("{")
    return run_dir


def long_run(run_dir: Path) -> Path:
    steps = [
        {"step": number, "attempt": 1, "time": 1e9 + 10 * number, "reward/mean": number / 2000, "time/step_s": 10.0}
        for number in range(1, 2001)
    ]
    lines(run_dir / "metrics.jsonl", *steps)
    lines(run_dir / "journal" / "master.jsonl", {"event": "begun", "attempt": 1, "from": None, "time": 1e9})
    return run_dir


@pytest.mark.parametrize("make", [planted_run, broken_run, long_run])
async def test_every_view_of_a_finished_a_broken_and_a_long_run(make: Callable[[Path], Path], tmp_path: Path) -> None:
    with page_of(make(tmp_path / "runs" / "t0")) as url:
        async with open_browser(url, tmp_path / "profile") as browser:
            await browser.wait_for("document.querySelectorAll('.uplot').length > 0")
            await walk(browser)
            assert not [message for message in browser.messages if "exceptionThrown" in message]


async def test_one_file_shows_its_views_without_a_server(tmp_path: Path) -> None:
    run_dir, file = planted_run(tmp_path / "runs" / "t0"), tmp_path / "page.html"
    file.write_text(saved_page({"t0": run_dir}, SYSTEM_CLOCK), encoding="utf-8")
    async with open_browser(file.as_uri(), tmp_path / "profile") as browser:
        for key, ready in (
            ("1", "document.querySelectorAll('.uplot').length > 2"),
            ("2", "document.querySelector('#events')"),
        ):
            await browser.press(key)
            await browser.wait_for(ready)
            assert PLANTED in await browser.evaluate("document.body.innerText")
            assert await browser.evaluate("typeof planted === 'undefined'")
        assert browser.messages == []


async def test_planted_html_stays_text_in_every_view(tmp_path: Path) -> None:
    runs = [planted_run(tmp_path / "runs" / name) for name in ("<b>one<img src=x onerror=planted=1>", "two")]
    with page_of(*runs) as url:
        async with open_browser(url, tmp_path / "profile") as browser:
            await browser.wait_for("document.querySelectorAll('.uplot').length > 2")
            assert await browser.evaluate("!location.href.includes('#') && sessionStorage.token.length > 20")
            shown = await browser.evaluate("document.body.innerText")
            assert PLANTED in shown
            background = []
            for width in (1280, 400):
                for dark in (False, True):
                    await browser.resize(width, 900, dark=dark)
                    background.append(await browser.evaluate("getComputedStyle(document.body).backgroundColor"))
                    for key, ready in (
                        ("1", "document.querySelectorAll('.uplot').length > 2"),
                        ("2", f"document.querySelector('#events')?.innerText.includes({json.dumps(PLANTED)})"),
                        ("3", "document.querySelector('#processes')"),
                        ("4", "document.querySelector('#list button')"),
                        ("5", "document.querySelector('main').innerText.length > 10"),
                    ):
                        await browser.press(key)
                        await browser.wait_for(ready)
                        assert await browser.evaluate(UNTOUCHED), key
                        assert await fits(browser), (width, key)
            assert background[0] == background[2] != background[1] == background[3]
            await browser.press("4")
            await browser.wait_for("document.querySelector('#list button')")
            await browser.evaluate("document.querySelector('#list button').click()")
            await browser.wait_for(
                "document.querySelectorAll('details').length === 4"
            )  # prompt, model, environment, model
            assert PLANTED in await browser.evaluate("document.querySelectorAll('details')[3].innerText")
            await browser.evaluate("document.querySelector('[aria-label=tokens]').focus()")
            for _ in range(9):
                await browser.press("ArrowRight")
            about = await browser.evaluate("document.querySelector('#about').textContent")
            assert about.startswith('"<"')
            assert "behaviour_logprob -0.5" in about
            for colour in ("logprob", "ratio", "advantage", "mask", "version"):
                await browser.evaluate(
                    f"(() => {{ const one = document.querySelector('[aria-label=\"colour by\"]'); one.value = '{colour}'; "
                    "one.onchange(); })()"
                )
            assert await browser.evaluate("document.querySelector('span.here').style.backgroundColor !== ''")
            assert await browser.evaluate(UNTOUCHED)
            assert browser.messages == []  # no error of a script, and none of the policy


async def test_a_page_that_is_frozen_and_killed_changes_nothing_for_its_run(tmp_path: Path) -> None:
    config, changes = make_tiny_run(tmp_path), ["train.max_steps=0"]
    command = python_module("asyncrl.cli.main", "run", str(config), *changes, "--ui")
    with RunHandle(command, run_directory(load_experiment(config, changes))) as run:
        run.wait_for_step(1, START_S)
        page = next(one for one in psutil.Process(run.popen.pid).children() if "ui" in one.cmdline())
        url = run.wait_for_output("the page: ", START_S).partition("the page: ")[2].split()[0]
        async with open_browser(url.strip(), tmp_path / "profile") as browser:
            await browser.wait_for("document.querySelector('[role=tab]')")
            await browser.press("3")
            await browser.wait_for("document.querySelectorAll('#processes tr').length > 5")
            assert "master/0" in await browser.evaluate("document.querySelector('#processes').innerText")
            await walk(browser)
        page.send_signal(signal.SIGSTOP)
        step = train_steps(run.run_dir)[-1]["step"]
        run.wait_for_step(step + 5, START_S)
        page.kill()
        run.wait_for_step(step + 10, START_S)
        run.signal(signal.SIGINT)
        assert run.wait(START_S) == 130
