"""The page of `asyncrl-launch ui`: what it answers, to which clients, and at which cost."""

import asyncio
import fcntl
import json
import re
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import aiohttp
import pytest
from recordings import make_group, make_store, record_batches
from test_curves import evaluation, step, write_run

import asyncrl
from asyncrl.cli import curves, run_files
from asyncrl.cli import page as page_module
from asyncrl.cli.curves import picture
from asyncrl.cli.live_state import Seen, training_of
from asyncrl.cli.main import main
from asyncrl.cli.page import _FILES, OPEN_PATHS, Page
from asyncrl.cli.run_files import number
from asyncrl.data.trajectories import Entry, list_recording
from asyncrl.launch.rundir import LOCK_FILE, RunRecord, write_record
from asyncrl.protocol.status import Wait, WorkerStatus
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.http_server import listen_routes
from asyncrl.runtime.security import Secrets, Security
from tests.support.clock import ManualClock
from tests.support.endpoints import HTTP
from tests.support.process_wide import secured_by

FILES = Path(asyncrl.__file__).parent / "cli" / "page_files"
API = [route.partition(" ")[2] for route in HTTP["ui"] if "/api/" in route]
PLANTED = "<script>alert(1)</script><img src=x onerror=alert(1)>"


@asynccontextmanager
async def served(run_dirs, clock=SYSTEM_CLOCK):
    """Serve a page. Yields it, and a function that sends a request and returns status, headers and body. token: None: none."""
    secrets = Secrets.make()
    with secured_by(Security(secrets)):
        page = Page(run_dirs, clock)
        async with (
            listen_routes(*page.routes(), host="127.0.0.1", open_paths=OPEN_PATHS) as url,
            aiohttp.ClientSession() as session,
        ):

            async def send(path, query=None, token=secrets.token, method="GET", tag=None):
                headers = {} if token is None else {"Authorization": f"Bearer {token}"}
                headers |= {} if tag is None else {"If-None-Match": tag}
                async with session.request(method, url + path, params=query, headers=headers) as answer:
                    return answer.status, answer.headers, await answer.text()

            yield page, send


async def asked(send, path, **query):
    """The content of a JSON answer."""
    status, _, body = await send(path, query)
    assert status == 200, body
    return json.loads(body)


@pytest.fixture
def run_dir(tmp_path):
    records = [step(1), evaluation(0), step(2, **{"reward/mean": None}), step(3)]
    write_run(tmp_path / "t0", records, generating=[[101.0, 102.0], [101.5]])
    journal = [
        {"event": "begun", "attempt": 1, "from": None, "time": 100.0},
        {"event": "published", "attempt": 1, "version": 0, "time": 100.5},
        {"event": "rejected", "attempt": 1, "reason": PLANTED, "time": 101.0},
    ]
    (tmp_path / "t0" / "journal" / "master.jsonl").write_text("".join(json.dumps(event) + "\n" for event in journal))
    record_batches(tmp_path / "t0", batches=2, size=2, trained=True)
    return tmp_path / "t0"


async def test_the_views_of_a_run(run_dir):
    async with served({"t0": run_dir}) as (_, send):
        (entry,) = await asked(send, "/api/runs")
        assert (entry["name"], entry["step"], entry["reward"]) == ("t0", 3, pytest.approx(0.2))
        panels = {panel["name"]: panel for panel in (await asked(send, "/api/learning", runs='["t0"]'))["panels"]}
        assert panels["reward"]["series"][0]["y"] == [0.1, None, 0.3]
        assert panels["reward"]["points"] == [False, True, True]
        seen = await asked(send, "/api/time", run="t0")
        over_time = {panel["name"]: panel for panel in seen["panels"]}
        assert set(over_time) == {"generated", "rejected", "time_shares", "tokens", "versions"}
        assert [one["name"] for one in over_time["rejected"]["series"]] == [PLANTED, "attempts, restarts, faults"]
        assert over_time["tokens"]["series"][0]["x"] == [1.0, 2.0, 3.0]  # seconds since 100
        assert over_time["generated"]["series"][0] == {
            "run": "",
            "name": "generation_server/0",
            "x": [1.0, 2.0],
            "y": [5.0, 5.0],
        }
        assert seen["events"] == [[100.0, "attempt 1 begins anew"]]
        assert (await asked(send, "/api/processes", run="t0"))["workers"] == []
        assert await asked(send, "/api/advice", runs='["t0"]') == []


async def test_a_failed_run_shows_its_first_cause_without_secrets(tmp_path):
    failure = "cannot reach http://me:secret@host:2379"
    write_record(
        tmp_path, RunRecord(pid=1, attempt=1, experiment="e", trial="t", endpoints=[], started=1.0, failure=failure)
    )
    async with served({"r": tmp_path}) as (_, send):
        (note,) = (await asked(send, "/api/processes", run="r"))["notes"]
        assert note.startswith("it failed: cannot reach")
        assert "secret" not in note


async def test_the_processes_of_a_living_run_have_no_secrets(run_dir, monkeypatch):
    record = RunRecord(pid=1, attempt=2, experiment="e", trial="t", endpoints=[], started=1.0)
    write_record(run_dir, record)
    url = "http://me:secret@host:2379"
    status = WorkerStatus(
        worker="rollout_worker/0",
        pid=1,
        attempt=2,
        state="running",
        time=990.0,
        progress=1,
        waits=[Wait(what="an answer", on="model_worker/0", since_s=3.0, limit_s=60.0)],
        error=f"no answer from {url}",
        notes=[f"refused by {url}"],
    )
    monkeypatch.setattr(page_module, "goes_on", lambda *_: True)
    monkeypatch.setattr(page_module, "names_of", lambda _: nullcontext())
    monkeypatch.setattr(page_module, "read_seen", lambda *_: Seen(training_of(run_dir, record), [status], 3, 1000.0))
    async with served({"t0": run_dir}) as (_, send):
        seen = await asked(send, "/api/processes", run="t0")
    assert "attempt 2; 3 generation servers desired" in seen["title"]
    (worker,) = seen["workers"]
    assert (worker["age_s"], worker["waits"]) == (10.0, ["an answer from model_worker/0 (3 of 60 s)"])
    assert seen["notes"] == worker["notes"] == ["refused by http://me:***@host:2379"]
    assert "secret" not in json.dumps(seen)


async def test_trajectories_are_filtered_and_shown_token_by_token(run_dir):
    store = make_store(run_dir, trained=True)
    meta, sample = make_group(9, rewards=(5.0, 0.25), lengths=(4, 9))
    store.write(2, 1, [Entry(sample, meta, 0)])
    async with served({"t0": run_dir}) as (_, send):

        async def found(**query):
            listed = await asked(send, "/api/trajectories", run="t0", **query)
            assert (listed["total"], listed["searched"]) == (5, 5)
            return [(group["step"], group["rewards"]) for group in listed["found"]]

        assert await found() == [(3, [5.0, 0.25]), *[(step, [1.0, 0.0]) for step in (2, 2, 1, 1)]]
        assert await found(min_reward="2") == await found(min_tokens="9") == [(3, [5.0, 0.25])]
        assert await found(min_reward="2", min_tokens="9") == []  # no response has both
        assert len(await found(max_reward="0", task="0")) == 4
        assert await found(task="other") == []
        name = (await asked(send, "/api/trajectories", run="t0"))["found"][0]["file"]
        shown = await asked(send, "/api/trajectory", run="t0", file=name, sequence="1")
        assert [token["id"] for token in shown["tokens"]] == [1, 2, *range(5, 14)]
        assert [token["behaviour_logprob"] for token in shown["tokens"][:4]] == [None, None, -0.5, -1.5]
        assert "torch" not in sys.modules or "no advantages are recorded" in " ".join(shown["notes"])
        (run_dir / "trajectories" / "attempt_1" / Path(name).name).write_bytes(b"broken")
        assert len((await asked(send, "/api/trajectories", run="t0", task="0"))["found"]) == 5  # what was read before
        assert (await send("/api/trajectory", {"run": "t0", "file": name}))[0] == 404


@pytest.mark.parametrize("path", API)
async def test_strangers_get_the_same_files_for_every_run_and_nothing_else(run_dir, path):
    async with served({"t0": run_dir}) as (_, send):
        for token in (None, "", "wrong", "Bearer"):
            status, _, body = await send(path, {"run": "t0", "runs": '["t0"]'}, token=token)
            assert (status, "t0" in body) == (401, False)
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert (await send(path, token=None, method=method))[0] == 401
            assert (await send(path, method=method))[0] == 405
        assert {(await send(file, token=None))[0] for file in OPEN_PATHS} == {200}
        assert (await send("/", token=None, method="POST"))[0] == 401


async def test_every_answer_forbids_scripts_of_others_and_guessing_of_types(run_dir):
    async with served({"t0": run_dir}) as (_, send):
        kinds = {}
        for path, query in [
            *((file, None) for file in OPEN_PATHS),
            ("/api/time", {"run": "t0"}),
            ("/api/time", {"run": "x"}),
            ("/nothing", None),
        ]:
            status, headers, _ = await send(path, query)
            policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
            assert policy == {
                **dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'"),
                **dict.fromkeys(("script-src", "style-src", "connect-src"), "'self'"),
                "img-src": "'self' data:",
            }
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] == "no-store"
            assert headers["Referrer-Policy"] == "no-referrer"
            kinds[path, status] = headers["Content-Type"].partition(";")[0]
        assert kinds["/", 200] == "text/html"
        assert kinds["/page.js", 200] == "text/javascript"
        assert kinds["/api/time", 200] == kinds["/api/time", 404] == "application/json"


def test_the_page_never_makes_html_of_text():
    """uPlot sets the titles and legends of curves: it must set them as text, too."""
    script, html = (FILES / "page.js").read_text(), (FILES / "index.html").read_text()
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setAttribute\(.on|srcdoc|DOMParser"
    assert re.findall(forbidden, script) == []
    assert re.findall(r"<script(?! src=)|<style|\bon\w+=|style=|javascript:", html) == []
    assert "uPlot" in (FILES / "uPlot.LICENSE").read_text() or "Leon Sorokin" in (FILES / "uPlot.LICENSE").read_text()
    assert set(_FILES.values()) <= {path.name for path in FILES.iterdir()}


@pytest.mark.parametrize(
    "file",
    [
        "../secrets/token",
        "attempt_1/../../secrets/token",
        "attempt_1/../../../other/x.safetensors",
        "/etc/passwd",
        "attempt_1/link.safetensors",
        "attempt_9/inside.safetensors",
        "attempt_1/%2e%2e/x.safetensors",
        "attempt_1/\0.safetensors",
        "",
    ],
)
async def test_paths_stay_inside_the_folder_of_the_run(run_dir, file):
    outside = run_dir.parent / "outside"
    record_batches(outside, batches=1, size=1, trained=True)
    (theirs,) = (outside / "trajectories" / "attempt_1").iterdir()
    (run_dir / "trajectories" / "attempt_1" / "link.safetensors").symlink_to(theirs)
    (run_dir / "trajectories" / "attempt_9").symlink_to(outside / "trajectories" / "attempt_1")
    theirs.rename(theirs.with_name("inside.safetensors"))
    (run_dir / "trajectories" / "attempt_1" / "link.safetensors").unlink()
    (run_dir / "trajectories" / "attempt_1" / "link.safetensors").symlink_to(theirs.with_name("inside.safetensors"))
    async with served({"t0": run_dir}) as (_, send):
        status, _, body = await send("/api/trajectory", {"run": "t0", "file": file})
        assert status == 404, body
        assert "tokens" not in body


async def test_wrong_requests_are_refused_with_a_reason(run_dir):
    async with served({"t0": run_dir}) as (_, send):
        for path, query in [
            ("/api/time", {}),
            ("/api/time", {"run": "../t0"}),
            ("/api/learning", {"runs": "t0"}),
            ("/api/learning", {"runs": '["other"]'}),
            ("/api/trajectories", {"run": "t0", "min_reward": "much"}),
            ("/api/trajectory", {"run": "t0", "file": "attempt_1/x.safetensors", "sequence": "all"}),
        ]:
            status, _, body = await send(path, query)
            assert status == 404
            assert json.loads(body)["error"]
        assert (await send("/nothing"))[0] == 404


async def test_a_thousand_requests_read_the_run_once_a_second(run_dir, monkeypatch):
    clock, num_reads = ManualClock(), 0
    async with served({"t0": run_dir}, clock) as (page, send):
        read = page._files["t0"].read

        def counted():
            nonlocal num_reads
            num_reads += 1
            return read()

        monkeypatch.setattr(page._files["t0"], "read", counted)
        answers = await asyncio.gather(*(send("/api/time", {"run": "t0"}) for _ in range(1000)))
        assert len({body for _, _, body in answers}) == 1
        assert num_reads == 1
        clock.now += 1
        await send("/api/time", {"run": "t0"})
        assert num_reads == 2


async def test_a_new_record_is_on_the_screen_within_a_second(run_dir):
    """The page asks anew EVERY_MS after an answer. An answer that was kept is younger than that, and shows the record then."""
    every_s = int(re.search(r"EVERY_MS = (\d+)", (FILES / "page.js").read_text())[1]) / 1000
    clock = ManualClock()
    async with served({"t0": run_dir}, clock) as (_, send):
        one = {"run": "t0"}
        views = [("/api/learning", {"runs": '["t0"]'}), ("/api/time", one), ("/api/trajectories", one)]
        for index, (path, query) in enumerate(views):
            value = 0.8125 + index
            assert str(value) not in json.dumps(await asked(send, path, **query))
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(step(9, **{"reward/mean": value, "throughput/tokens_per_s": value})) + "\n")
            meta, sample = make_group(9, rewards=(value, 0.25), lengths=(4, 9))
            make_store(run_dir, trained=True).write(9 + index, 1, [Entry(sample, meta, 0)])
            since = 0.0
            while str(value) not in json.dumps(await asked(send, path, **query)):
                clock.now += every_s
                since += every_s
            assert (
                since + every_s < 0.9
            )  # the record may have come right after an answer; the rest is for making the view


async def test_views_of_records_are_made_anew_only_after_a_new_record(run_dir, monkeypatch):
    made = []
    monkeypatch.setattr(page_module, "picture", lambda runs: made.append(len(runs[0].steps)) or picture(runs))
    clock = ManualClock()
    async with served({"t0": run_dir}, clock) as (_, send):
        for written in (None, "journal/generation_server_0.jsonl", "metrics.jsonl", None):
            if written is not None:
                with (run_dir / written).open("a") as file:
                    file.write(json.dumps({**step(4), "tokens": 1, "version": "v"}) + "\n")
            await asked(send, "/api/learning", runs='["t0"]')
            clock.now += 1
    assert made == [3, 4]


async def test_a_run_whose_launcher_is_killed_is_interrupted(run_dir):
    """The kill changes no file."""
    clock, states = ManualClock(), []
    async with served({"t0": run_dir}, clock) as (_, send):
        with (run_dir / LOCK_FILE).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            states += [one["state"] for one in await asked(send, "/api/runs")]
        clock.now += 1
        states += [one["state"] for one in await asked(send, "/api/runs")]
    assert states == ["running", "interrupted"]


async def test_runs_that_look_alike_are_not_mixed(tmp_path):
    """They have equally many records, and the page keeps a view until there are more."""
    runs = {}
    for name, mean in (("a", 1.0), ("b", 2.0)):
        runs[name] = write_run(tmp_path / name, [step(1, **{"reward/mean": mean, "throughput/tokens_per_s": mean})])
        record_batches(runs[name], batches=1, size=1, trained=True)
    clock, seen = ManualClock(), []

    def first_of(view, panel):
        return next(one["series"][0]["y"] for one in view["panels"] if one["name"] == panel)

    async with served(runs, clock) as (_, send):
        for name in ("a", "b", "a"):
            learning, times = (
                await asked(send, "/api/learning", runs=f'["{name}"]'),
                await asked(send, "/api/time", run=name),
            )
            every = (await asked(send, "/api/trajectories", run=name))["found"]
            best = (await asked(send, "/api/trajectories", run=name, min_reward="9"))["found"]
            seen.append((first_of(learning, "reward"), first_of(times, "tokens"), len(every), len(best)))
            clock.now += 1
    assert seen == [([1.0], [1.0], 1, 0), ([2.0], [2.0], 1, 0), ([1.0], [1.0], 1, 0)]


async def test_trajectories_are_listed_anew_only_after_a_file_came_or_went(run_dir, monkeypatch):
    listed = []
    monkeypatch.setattr(run_files, "list_recording", lambda folder: listed.append(folder) or list_recording(folder))
    clock = ManualClock()
    async with served({"t0": run_dir}, clock) as (_, send):
        for change, total in ((None, 4), (None, 4), ("went", 3), ("came", 4), (None, 4)):
            if change == "went":
                list_recording(run_dir / "trajectories" / "attempt_1")[0].unlink()
            if change == "came":
                meta, sample = make_group(9)
                make_store(run_dir, trained=True).write(9, 1, [Entry(sample, meta, 0)])
            found = await asked(send, "/api/trajectories", run="t0")
            assert (found["total"], len(found["found"])) == (total, total)
            clock.now += 1
    assert len(listed) == 3


async def test_a_content_that_the_client_has_is_not_sent_again(run_dir):
    clock, tags = ManualClock(), []
    async with served({"t0": run_dir}, clock) as (_, send):
        for path, query in (("/api/runs", None), ("/api/learning", {"runs": '["t0"]'}), ("/api/time", {"run": "t0"})):
            status, headers, _ = await send(path, query)
            tags.append(headers["ETag"])
            for expected in (304, 200):
                clock.now += 1
                status, headers, body = await send(path, query, tag=tags[-1])
                assert (status, bool(body)) == (expected, expected == 200)
                with (run_dir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(step(9 + len(tags))) + "\n")
            tags.append(headers["ETag"])
    assert len(set(tags)) == len(tags)


async def test_the_processes_of_a_damaged_run_are_a_reason(run_dir):
    (run_dir / "run.json").write_text("{")
    async with served({"t0": run_dir}) as (_, send):
        seen = await asked(send, "/api/processes", run="t0")
    assert "run.json cannot be read" in seen["title"]
    assert seen["workers"] == []


async def test_a_tab_that_outlives_the_server_gets_what_is_new(run_dir):
    async with served({"t0": run_dir}) as (_, send):
        tag = (await send("/api/runs"))[1]["ETag"]
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(step(9)) + "\n")
    async with served({"t0": run_dir}) as (_, send):
        assert (await send("/api/runs", tag=tag))[0] == 200


async def test_a_new_record_costs_no_work_for_the_earlier_ones(tmp_path, monkeypatch):
    """What is asked of 600 steps, beside operations on whole columns, is about what is asked of 300."""
    asked_for = []
    for num_steps in (300, 600):
        run_dir = write_run(tmp_path / str(num_steps), [step(at) for at in range(1, num_steps + 1)])
        page = Page({"t0": run_dir}, ManualClock())
        learning = {"runs": '["t0"]'}
        page.views["learning"](learning)
        num_values = 0

        def counted(record, key, asks=number):
            nonlocal num_values
            num_values += 1
            return asks(record, key)

        monkeypatch.setattr(run_files, "number", counted)
        monkeypatch.setattr(curves, "number", counted, raising=False)
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(step(num_steps + 1)) + "\n")
        page.views["learning"](learning)
        monkeypatch.undo()
        asked_for.append(num_values)
    assert 0 < asked_for[0] == asked_for[1] < 100


def test_the_command_refuses_what_it_cannot_serve(run_dir, tmp_path, capsys):
    config = FILES.parents[2] / "configs" / "quickstart_cpu.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken, secured_by(None):
        port = str(taken.getsockname()[1])
        for arguments, code, reason in (
            (["ui", run_dir, "--port", port], 1, f"port {port} cannot be used"),
            (["ui", run_dir, "--port", "70000"], 2, "use 0 to 65535"),
            (["ui", tmp_path / "none"], 2, "neither the folder of a run nor a config"),
            (["run", config, "--ui", "--dry-run"], 2, "--ui shows a run of this machine"),
        ):
            assert main([*map(str, arguments)]) == code
            assert reason in "".join(capsys.readouterr()).replace("\n", " ")


LONG_RUN = """
import json, sys, time
from pathlib import Path
from asyncrl.cli.page import Page
from asyncrl.runtime.clock import SYSTEM_CLOCK

run_dir = Path(sys.argv[1])
page = Page({"t0": run_dir}, SYSTEM_CLOCK)
sizes = {}
for name, query in (
    ("learning", {"runs": '["t0"]'}),
    ("time", {"run": "t0"}),
    ("advice", {"runs": '["t0"]'}),
    ("trajectories", {"run": "t0"}),
):
    sizes[name] = len(json.dumps(page.views[name](query)))
    began = time.monotonic()
    page.views[name](query)
    print(name, sizes[name], round(time.monotonic() - began, 3), file=sys.stderr)
status = Path("/proc/self/status").read_text()  # ru_maxrss would count the peak of the process that started this one, too
peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
print(json.dumps({"peak_mb": peak_kb / 1000, "sizes": sizes}))
"""


def test_a_run_of_2000_steps_needs_little_memory(tmp_path):
    """2,000 steps of 64 groups of 8, over 20,000 s, with four servers."""
    num_steps, step_s, groups = 2000, 10, 64
    records = [step(number, time=1e9 + step_s * number) for number in range(1, num_steps + 1)]
    run_dir = write_run(tmp_path / "t0", records)
    journal = run_dir / "journal"
    journal.mkdir()
    stored = json.dumps({"event": "stored", "attempt": 1, "ticket": "t" * 50, "prompt": [0, 1], "time": 1e9}) + "\n"
    group = {"ticket": "t" * 50, "prompt": [0, 1], "head": 0, "versions": [[1, 2]] * 8}
    trained = json.dumps({"event": "trained", "attempt": 1, "step": 1, "groups": [group] * groups}) + "\n"
    with (journal / "master.jsonl").open("w") as file:
        file.write(json.dumps({"event": "begun", "attempt": 1, "from": None, "time": 1e9}) + "\n")
        for number in range(num_steps):
            published = {"event": "published", "attempt": 1, "version": number, "time": 1e9 + step_s * number}
            file.write(stored * groups + trained + json.dumps(published) + "\n")
    for server in range(4):
        with (journal / f"generation_server_{server}.jsonl").open("w") as file:
            for tenth in range(0, num_steps * step_s * 10, 2):
                version = f"a0001-v{tenth // (step_s * 10):08d}"
                file.write(f'{{"time":{1e9 + tenth / 10},"tokens":100,"version":"{version}"}}\n')
    done = subprocess.run([sys.executable, "-c", LONG_RUN, run_dir], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["peak_mb"] < 300, done.stderr
    assert max(found["sizes"].values()) < 2_000_000, done.stderr
