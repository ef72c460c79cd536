"""SGLang dies in a whole run: no sample is lost, no token appears twice, and SGLang restarts with the newest weights.

There are two kinds of death. First SGLang itself is killed in mid-generation. Then the server that owns it is killed in the middle
of an update, and SGLang must not outlive it. Each trained token is checked against the weights that its label names.
"""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from asyncrl.config.schema import GenerationConfig
from asyncrl.generation.engine import EngineArguments
from asyncrl.generation.sglang import SGLangEngine
from asyncrl.generation.sglang_process import AttachedServer
from asyncrl.testing.runs import (
    RunHandle,
    assert_nothing_left,
    journal,
    launch,
    make_tiny_run,
    processes_of,
    train_steps,
)
from tests.support.in_update import die_in_update, has_struck, largest_logprob_error
from tests.support.live_runs import freeze_at_work, resume
from tests.support.real_servers import ServerInThread, fails_when_it_stands_still
from tests.support.weight_store import WeightStore

LIMIT_S = 240.0  # SGLang starts within 15 s on an idle machine
BATCH = 4

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def run(store: WeightStore, sglang_python: str, tmp_path: Path) -> Iterator[RunHandle]:
    config = make_tiny_run(tmp_path / "tiny", num_prompts=4000)
    with launch(
        config,
        "allocation=sglang.d1+d1",
        f"generation.python={sglang_python}",
        f"model_path={store.model_path}",
        "train.max_steps=0",
        f"train.batch_size={BATCH}",
        "rollout.group_size=4",
        "rollout.sampling.max_new_tokens=96",
        "generation.num_blocks=256",
        f"generation.load_timeout_s={LIMIT_S}",
        f"runtime.start_timeout_s={LIMIT_S}",
        "record.trajectories=true",
        "weights.verify_logprobs=true",
        "weights.keep=1000",
        env=die_in_update(tmp_path / "fault", server=0, version=8),
    ) as run:
        yield run


def sglang_servers(run: RunHandle) -> list[psutil.Process]:
    """Main processes of the run's SGLang servers, including orphans."""
    return [process for process in processes_of(run.run_dir) if "sglang.launch_server" in cmdline(process)]


def sglang_processes(run: RunHandle) -> list[psutil.Process]:
    (server,) = sglang_servers(run)
    return [server, *server.children(recursive=True)]


def sglang_with_its_owner(run: RunHandle) -> bool:
    """Whether some SGLang server is a child of the live generation server 0. An orphan has another parent."""
    owners = [
        process.pid
        for process in processes_of(run.run_dir)
        if any(Path(argument).name == "generation_server_0.yaml" for argument in cmdline(process))
    ]
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(server.ppid() in owners for server in sglang_servers(run))
    return False


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended in the meantime
        return []


def test_a_run_outlives_sglang_killed_in_mid_generation_and_its_server_killed_in_an_update(
    run: RunHandle, tmp_path: Path
) -> None:
    run.wait_for_step(2, LIMIT_S)
    frozen, _ = freeze_at_work(run, lambda: sglang_processes(run))
    frozen[0].kill()
    resume(frozen)
    told = run.wait_for_output("it is started again at once (1 of 3)", LIMIT_S)
    assert "generation_server/0 failed: " in told
    run.wait_until(lambda: has_struck(tmp_path / "fault"), "an update to version 8 had begun", LIMIT_S)
    run.wait_for_output("generation_server/0 was killed by signal SIGKILL", LIMIT_S)
    # The delay before its restart depends on whether it had lived for a minute.
    again = r"generation_server/0 .*; it is started again (at once|in 1 s) \(2 of 3\)"
    run.wait_until(lambda: re.search(again, run.output()), "its second restart was told", LIMIT_S)
    run.wait_for_step(10, LIMIT_S)  # the samples of step 10 may be from before the fault
    run.wait_until(lambda: sglang_with_its_owner(run), "SGLang was started again", LIMIT_S)
    assert len(sglang_servers(run)) == 1  # no SGLang server has outlived its owner
    run.signal(signal.SIGINT)
    assert run.wait(LIMIT_S) == 130, run.output()
    assert_nothing_left(run.run_dir)

    events = [event for event in journal(run.run_dir) if event["event"] == "trained"]
    assert len(events) == len(train_steps(run.run_dir)) >= 10
    prompts = [tuple(group["prompt"]) for event in events for group in event["groups"]]
    assert len(prompts) == len(set(prompts)) == BATCH * len(events)
    again = [group["ticket"] for event in events for group in event["groups"] if "-i1-" not in group["ticket"]]
    assert not again  # no prompt was handed out twice: its responses went on from their prefixes
    assert largest_logprob_error(run.run_dir) < 1e-4
    logs = run.run_dir / "logs" / "attempt_1"
    verified = re.findall(r"weights (\S+) verified", (logs / "generation_server_0.log").read_text())
    served = re.findall(r"generation_server/0 serves (\S+) \(", (logs / "gserver_manager_0.log").read_text())
    assert set(served) <= set(verified)
    assert len(served) >= 4  # versions trained while no server ran are skipped


async def test_sglang_that_stands_still_is_given_up_and_who_waits_is_told(
    store: WeightStore,
    sglang_config: GenerationConfig,
    session_servers: Callable[[], ServerInThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine fails if SGLang stands still. In a run the generation server then fails, and the launcher restarts it."""
    server = session_servers().process
    engine = SGLangEngine(EngineArguments(str(store.model_path), sglang_config), AttachedServer(server.url))
    await fails_when_it_stands_still(engine, server, store, monkeypatch)
