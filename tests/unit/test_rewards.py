"""Reward functions: their import, calls, time limits and errors, and the judge processes that run them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncrl.config.import_object import import_object
from asyncrl.config.schema import RolloutConfig
from asyncrl.data.prompts import Prompt
from asyncrl.rewards.judges import CodeChangedError, Judges, RestartPace
from asyncrl.rewards.outcome import REWARD_LOST, RolloutRejected, RolloutReleased, objection_to
from asyncrl.rewards.reward import Completion, Reward
from asyncrl.rewards.score import answers_of
from tests.support.services import make_services

LIMIT_S = 60.0
MOST = 16  # maximal number of judges of a function
LOGGER = logging.getLogger("test_rewards")
PROMPT = Prompt(prompt_id="e0-p0", text="2+2=", input_ids=[1], answer="4", task="sum", row={"level": 3}, too_long=False)
RIGHT, WRONG, CUT = Completion("4", True), Completion("5", True), Completion("4", False)

SOURCE = """
import asyncio, concurrent.futures, threading
from helper_of_rewards import WORTH

threads = set()

def exact(prompt, completion, answer):
    threads.add(threading.current_thread().name)
    return WORTH * (completion == answer)

def asks(prompt, completion, answer, *, finished, task, row):
    return {"sum": 1.0}[task] * row["level"] * finished

def takes_all(prompt, completion, answer, **known):
    return float(sorted(known) == ["finished", "row", "task"])

async def later(prompt, completion, answer, finished):
    await asyncio.sleep(0)
    return 1.0 if finished else 0.0

class Judge:
    async def __call__(self, prompt, completion, answer):
        return 0.25

judge = Judge()
release = threading.Event()

def hangs(prompt, completion, answer):
    release.wait(20)
    return 0.0

async def hangs_async(prompt, completion, answer):
    await asyncio.sleep(20)

def raises(prompt, completion, answer):
    raise KeyError("no such thing")

def stops(prompt, completion, answer):
    return next(iter(()))

def times_out(prompt, completion, answer):
    raise TimeoutError("of a pool of its own")

def is_cancelled(prompt, completion, answer):
    raise concurrent.futures.CancelledError("by a pool of its own")

class Odd(BaseException):
    pass

def leaves(prompt, completion, answer):
    raise Odd("no exception")

class NoNumber:
    def __float__(self):
        raise LookupError("no number")
    def __repr__(self):
        raise LookupError("no name")

def unspeakable(prompt, completion, answer): return NoNumber()
def huge(prompt, completion, answer): return 1e300
def nan(prompt, completion, answer): return float("nan")
def none(prompt, completion, answer): return None
def text(prompt, completion, answer): return "1.0"
def yes(prompt, completion, answer): return True
number = 3

from asyncrl.rewards.score import Score

def scored(prompt, completion, answer): return Score(0.5, completion[:1] or None)
def sometimes_scored(prompt, completion, answer): return Score(1, "7") if completion else 0.0
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("helper_of_rewards", None)
    (tmp_path / "helper_of_rewards.py").write_text("WORTH = 2.0\n")
    file = tmp_path / "rewards_of_test.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def make_isolated(path: Path) -> Iterator[Callable[..., Reward]]:
    made: list[Reward] = []

    def make_one(isolation: str, name: str, timeout_s: float = LIMIT_S, **given: Any) -> Reward:
        spec = f"{path}:{name}"
        if isolation == "process":
            given.setdefault("judges", Judges(spec, memory_bytes=0, most=MOST, most_async=64, logger=LOGGER))
        made.append(Reward(spec, timeout_s=timeout_s, services=make_services(logger=LOGGER), **given))
        return made[-1]

    yield make_one
    for reward in made:
        reward.close()


@pytest.fixture(params=["thread", "process"])
def make(make_isolated: Callable[..., Reward], request: pytest.FixtureRequest) -> Callable[..., Reward]:
    """Return a function that makes rewards that run in a thread or in a judge process. Each test that uses this fixture runs
    once with each of the two."""
    return partial(make_isolated, request.param)


@pytest.fixture
def make_in_thread(make_isolated: Callable[..., Reward]) -> Callable[..., Reward]:
    return partial(make_isolated, "thread")


@pytest.fixture
def make_in_process(make_isolated: Callable[..., Reward]) -> Callable[..., Reward]:
    return partial(make_isolated, "process")


async def test_a_function_of_a_file_may_import_modules_beside_it(make: Callable[..., Reward]) -> None:
    assert await make("exact").score(PROMPT, [RIGHT, WRONG, RIGHT]) == [2.0, 0.0, 2.0]


async def test_optional_arguments_go_only_to_functions_that_take_them(make: Callable[..., Reward]) -> None:
    assert await make("asks").score(PROMPT, [RIGHT, CUT]) == [3.0, 0.0]
    assert await make("takes_all").score(PROMPT, [RIGHT]) == [1.0]


async def test_the_answers_of_scores_come_with_the_rewards(make: Callable[..., Reward]) -> None:
    empty = replace(RIGHT, text="")
    assert answers_of(await make("exact").score(PROMPT, [RIGHT])) == []
    scored = make("scored")
    for _ in range(2):  # the first call judges each response alone, the second all together
        found = await scored.score(PROMPT, [RIGHT, empty])
        assert (found, answers_of(found)) == ([0.5, 0.5], [RIGHT.text[:1], None])
    assert answers_of(await make("sometimes_scored").score(PROMPT, [empty, RIGHT])) == [None, "7"]


async def test_async_functions_and_callable_objects(make: Callable[..., Reward]) -> None:
    assert await make("later").score(PROMPT, [RIGHT, CUT]) == [1.0, 0.0]
    assert await make("judge").score(PROMPT, [RIGHT]) == [0.25]


async def test_a_fast_function_judges_a_group_in_one_thread_outside_the_event_loop(
    make_in_thread: Callable[..., Reward], path: Path
) -> None:
    reward = make_in_thread("exact", slow_call_s=LIMIT_S)  # so high that a busy machine has no effect
    await reward.score(PROMPT, [RIGHT])  # the first call measures that the function is fast
    threads: set[str] = import_object(f"{path}:threads", "threads")
    starts: list[threading.Thread] = []
    original = threading.Thread.start

    def counting(thread: threading.Thread) -> None:
        starts.append(thread)
        original(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", counting)
        await reward.score(PROMPT, [RIGHT] * 8)
    assert len(starts) == 1
    assert threading.main_thread().name not in threads


async def test_a_function_that_hangs_times_out_and_blocks_nothing(
    make_in_thread: Callable[..., Reward], path: Path
) -> None:
    reward = make_in_thread("hangs", timeout_s=0.05)
    try:
        for _ in range(2):
            with pytest.raises(RolloutRejected, match=r"took more than 0.05 s") as caught:
                await reward.score(PROMPT, [RIGHT, RIGHT])
            assert caught.value.reason == "reward_timeout"
    finally:
        import_object(f"{path}:release", "release").set()


async def test_an_async_function_that_hangs_times_out(make: Callable[..., Reward]) -> None:
    with pytest.raises(RolloutRejected) as caught:
        await make("hangs_async", timeout_s=0.05).score(PROMPT, [RIGHT])
    assert caught.value.reason == "reward_timeout"


@pytest.mark.parametrize("name", ["raises", "stops", "leaves", "times_out", "is_cancelled"])
async def test_an_error_rejects_the_rollout_and_only_the_first_is_logged(
    make: Callable[..., Reward], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    reward = make(name)
    for _ in range(3):
        with pytest.raises(RolloutRejected) as caught:
            await reward.score(PROMPT, [RIGHT, WRONG])
        assert caught.value.reason == "reward_error"
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert f"in {name}" in caplog.text  # the user's own line is in the traceback


@pytest.mark.parametrize("name", ["nan", "none", "text", "huge", "unspeakable"])
async def test_a_reward_that_is_not_a_finite_number_rejects_the_rollout(make: Callable[..., Reward], name: str) -> None:
    with pytest.raises(RolloutRejected) as caught:
        await make(name).score(PROMPT, [RIGHT])
    assert caught.value.reason == "reward_not_finite"


async def test_a_bool_is_accepted_as_a_number(make: Callable[..., Reward]) -> None:
    assert await make("yes").score(PROMPT, [RIGHT]) == [1.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nothing", "expected `package.module:name`"),
        ("no_such_package.rewards:exact", "there is no module 'no_such_package.rewards'"),
        ("json:no_such_name", "has no 'no_such_name'"),
        ("/no/such/file.py:exact", "there is no file /no/such/file.py"),
    ],
)
def test_the_error_for_a_wrong_path_names_the_mistake(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_object(spec, "reward")


def test_installed_modules_come_before_those_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "queue.py").write_text("score = 1\n")
    (tmp_path / "msgspec").mkdir()
    (tmp_path / "msgspec" / "mine.py").write_text("score = 2\n")
    (tmp_path / "only_here.py").write_text("import queue\nscore = queue.Queue\n")
    assert import_object("only_here:score", "reward").__module__ == "queue"
    assert import_object(f"{tmp_path}/queue.py:score", "reward") == 1
    for spec, file in (("queue:score", "queue.py"), ("msgspec.mine:score", "msgspec/mine.py")):
        with pytest.raises(ValueError, match=rf"which comes first; for your file write {file}:NAME"):
            import_object(spec, "reward")


def test_an_import_error_of_the_users_module_passes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_rewards.py").write_text("import a_module_that_is_not_there\n")
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        import_object("broken_rewards:exact", "reward")


def test_an_object_that_is_not_callable_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="is not callable"):
        make("number")


# ---------------------------------------------------------------------------------------------------------------- processes

DANGEROUS = """
import ctypes, os, pathlib, re, signal, subprocess, sys, time

if (fault := pathlib.Path(__file__).with_suffix(".fault")).exists():
    raise RuntimeError(fault.read_text())

def dangerous(prompt, completion, answer):
    if completion == "spin":  # one C call that never releases the GIL
        return float(bool(re.match(r"(a+)+$", "a" * 64 + "b")))
    if completion == "exit": os._exit(3)
    if completion == "sys.exit": sys.exit(4)
    if completion == "abort": os.abort()
    if completion == "real-time signal": os.kill(os.getpid(), 40)
    if completion == "segfault": ctypes.string_at(0)
    if completion == "allocate":
        hoard = []
        while True:
            hoard.append(bytearray(50_000_000))
    if completion == "fork":
        return float(os.fork() == 0)
    if completion == "daemon":
        return float(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid)
    if completion.startswith("parent "):
        os.kill(os.getppid(), getattr(signal, completion.split()[1]))
        time.sleep(600)
    if completion == "slow": time.sleep(1.0)
    if completion == "pid":
        return float(os.getpid())
    return 0.5
"""


@pytest.fixture
def dangerous(path: Path, make_in_process: Callable[..., Reward]) -> Callable[..., tuple[Reward, Judges]]:
    """Returns a function that makes the reward and its judges, with limits that are long enough for a busy machine."""

    def make_one(
        memory_bytes: int = 0, pace: RestartPace | None = None, source: str = DANGEROUS
    ) -> tuple[Reward, Judges]:
        path.write_text(source)
        judges = Judges(
            f"{path}:dangerous",
            memory_bytes=memory_bytes,
            most=MOST,
            most_async=MOST,
            logger=LOGGER,
            pace=pace,
            death_limit_s=LIMIT_S,
            end_limit_s=LIMIT_S,
        )
        return make_in_process("dangerous", judges=judges), judges

    return make_one


async def ask(reward: Reward, what: str) -> float:
    (value,) = await asyncio.wait_for(reward.score(PROMPT, [Completion(what, True)]), LIMIT_S)
    return value


@pytest.mark.parametrize(
    ("what", "reason", "detail"),
    [
        ("exit", "reward_died", "has ended its process: it ended with exit code 3"),
        ("abort", "reward_died", "has ended its process: it was killed by SIGABRT"),
        ("real-time signal", "reward_died", "has ended its process: it was killed by signal 40"),
        ("segfault", "reward_died", "has ended its process: it was killed by SIGSEGV"),
        ("sys.exit", "reward_error", "raised SystemExit(4)"),
        ("allocate", "reward_error", "raised MemoryError()"),
    ],
)
async def test_a_call_that_ends_its_process_ends_one_judge_which_is_replaced(
    dangerous: Callable[..., tuple[Reward, Judges]], what: str, reason: str, detail: str
) -> None:
    reward, _judges = dangerous(memory_bytes=400_000_000)
    judge = await ask(reward, "pid")
    for _ in range(2):  # each judge has answered a call before; only the call that ends it fails
        with pytest.raises(RolloutRejected) as caught:
            await ask(reward, what)
        assert caught.value.reason == reason
        assert caught.value.detail.endswith(detail)
        assert await ask(reward, "") == 0.5
    assert await ask(reward, "pid") != judge
    assert judge != os.getpid()


async def test_a_judge_that_never_releases_the_gil_is_killed_and_blocks_no_other_call(
    dangerous: Callable[..., tuple[Reward, Judges]], make_in_process: Callable[..., Reward]
) -> None:
    reward, judges = dangerous()
    spinning = asyncio.ensure_future(ask(reward, "spin"))
    for _ in range(20):
        assert await ask(reward, "") == 0.5
    assert not spinning.done()
    spinning.cancel()
    await asyncio.wait({spinning})

    judge = int(await ask(reward, "pid"))
    impatient = make_in_process("dangerous", 1.0, judges=judges)
    with pytest.raises(RolloutRejected) as caught:
        await ask(impatient, "spin")
    assert caught.value.reason == "reward_timeout"
    await wait_until_gone(judge)


async def test_a_fork_in_a_function_ends_when_it_returns_into_our_code(
    dangerous: Callable[..., tuple[Reward, Judges]],
) -> None:
    """Each call gets one answer, which comes from the judge and not from its fork."""
    reward, _judges = dangerous()
    assert [await ask(reward, what) for what in ("fork", "", "fork", "")] == [0.0, 0.5, 0.0, 0.5]


async def test_processes_that_a_judge_started_end_with_it(dangerous: Callable[..., tuple[Reward, Judges]]) -> None:
    reward, _judges = dangerous()
    daemon, judge = int(await ask(reward, "daemon")), int(await ask(reward, "pid"))
    assert psutil.pid_exists(daemon)
    with pytest.raises(RolloutRejected):
        await ask(reward, "exit")
    await wait_until_gone(daemon, judge)


ENDS_IN_A_GROUP = """
import os, socket, sys, time
from asyncrl.rewards import judge_main

def start_time(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return "it has ended"

told, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
judge_main.adopt_orphans()
told_by_judge, tell = os.pipe()
judge = os.fork()
if judge == 0:
    os.setsid()
    member = os.fork()
    if member == 0:
        os.closerange(0, 3)
        time.sleep(600)
    os.write(tell, b"%d" % member)
    os._exit(3)
member = int(os.read(told_by_judge, 100))
os.waitid(os.P_PID, judge, os.WEXITED | os.WNOWAIT)
began, kill = start_time(judge), os.killpg

def killpg(group, number):
    print("the group's number belongs to the judge:", group == judge and start_time(judge) == began)
    kill(group, number)

os.killpg = killpg
judges = {judge}
while start_time(member) != "it has ended":
    judge_main._reap(control, judges)
print(told.recv(1000).decode())
"""


def test_the_group_of_a_judge_is_killed_while_its_number_belongs_to_the_judge() -> None:
    """When a process is reaped, the system may give its number to another process, and a kill would end that one. The processes
    that are left in the group end in any case."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS_IN_A_GROUP], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    belongs, died = done.stdout.splitlines()
    assert belongs == "the group's number belongs to the judge: True"
    assert json.loads(died)["how"] == "it ended with exit code 3"


async def test_judges_and_the_processes_they_started_end_with_the_worker(
    dangerous: Callable[..., tuple[Reward, Judges]],
) -> None:
    reward, _judges = dangerous()
    daemon, judge = int(await ask(reward, "daemon")), int(await ask(reward, "pid"))
    spinning = asyncio.ensure_future(ask(reward, "spin"))
    await asyncio.sleep(0.2)
    reward.close()
    with pytest.raises(RolloutReleased) as caught:
        await spinning
    assert caught.value.reason == REWARD_LOST
    await wait_until_gone(daemon, judge)


def nursery_of(judges: Judges) -> psutil.Process:
    (nursery,) = psutil.Process(judges.warden).children()
    return nursery


async def test_a_nursery_that_is_killed_is_replaced(dangerous: Callable[..., tuple[Reward, Judges]]) -> None:
    reward, judges = dangerous()
    judge = int(await ask(reward, "pid"))
    nursery = nursery_of(judges)
    nursery.kill()
    await wait_until_gone(nursery.pid, judge)
    assert await ask(reward, "") == 0.5


async def test_calls_that_lose_their_nursery_share_one_restart_and_are_made_again(
    dangerous: Callable[..., tuple[Reward, Judges]],
) -> None:
    reward, judges = dangerous()
    calls = [asyncio.ensure_future(ask(reward, "slow")) for _ in range(2 * MOST)]
    await wait_until(lambda: len(judges.pids) == MOST)
    nursery_of(judges).kill()
    assert await asyncio.gather(*calls) == [0.5] * len(calls)
    assert judges.num_nurseries == 2


async def test_a_nursery_is_replaced_however_often_it_is_killed(
    dangerous: Callable[..., tuple[Reward, Judges]],
) -> None:
    reward, judges = dangerous(pace=RestartPace(first_s=0.01, longest_s=0.02))
    for _ in range(6):
        judge, nursery = int(await ask(reward, "pid")), nursery_of(judges)
        nursery.kill()
        await wait_until_gone(nursery.pid, judge)
    assert await ask(reward, "") == 0.5
    assert judges.num_nurseries == 7


def test_the_delay_grows_when_nurseries_die_in_quick_succession() -> None:
    pace = RestartPace(first_s=0.5, longest_s=4.0, calm_s=60.0)
    assert [pace.died(now) for now in (0.0, 1.0, 2.0, 4.0, 9.0, 14.0)] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0]
    assert pace.died(14.0 + 4.0 + 60.0) == 0.0


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
async def test_a_function_that_signals_its_parent_ends_its_own_judge_only(
    dangerous: Callable[..., tuple[Reward, Judges]], number: str
) -> None:
    reward, judges = dangerous()
    others = [asyncio.ensure_future(ask(reward, "slow")) for _ in range(4)]
    with pytest.raises(RolloutRejected) as caught:
        await ask(reward, f"parent {number}")
    assert caught.value.reason == "reward_died"
    assert caught.value.detail.endswith(f"it was killed by {number}")
    assert await asyncio.gather(*others) == [0.5] * 4
    assert judges.num_nurseries == 1


async def test_a_call_whose_judge_is_killed_from_outside_is_made_again(
    dangerous: Callable[..., tuple[Reward, Judges]],
) -> None:
    reward, judges = dangerous()
    call = asyncio.ensure_future(ask(reward, "slow"))
    await wait_until(lambda: judges.pids)
    (guard,) = (psutil.Process(pid) for pid in judges.pids)
    await wait_until(guard.children)
    guard.children()[0].kill()
    assert await call == 0.5


async def test_a_rollout_is_released_when_no_nursery_starts(
    dangerous: Callable[..., tuple[Reward, Judges]], path: Path
) -> None:
    reward, judges = dangerous(pace=RestartPace(first_s=0.01, longest_s=0.02))
    path.with_suffix(".fault").write_text("not now")
    nursery = nursery_of(judges)
    nursery.kill()
    await wait_until_gone(nursery.pid)
    with pytest.raises(RolloutReleased, match="not now") as caught:
        await ask(reward, "")
    assert caught.value.reason == REWARD_LOST
    path.with_suffix(".fault").unlink()
    assert await ask(reward, "") == 0.5


async def test_rollouts_are_rejected_when_no_nursery_starts_again_and_again(
    dangerous: Callable[..., tuple[Reward, Judges]], path: Path
) -> None:
    """The first call tries 3 times, and gives its ticket back. The second one ends the series of 5."""
    reward, judges = dangerous(pace=RestartPace(first_s=0.01, longest_s=0.02))
    path.with_suffix(".fault").write_text("never again")
    nursery = nursery_of(judges)
    nursery.kill()
    await wait_until_gone(nursery.pid)
    with pytest.raises(RolloutReleased):
        await ask(reward, "")
    with pytest.raises(RolloutRejected, match=r"any more: it did not start 5 times in a row: .*never again") as caught:
        await ask(reward, "")
    assert caught.value.reason == "reward_gone"
    path.with_suffix(".fault").unlink()
    assert await ask(reward, "") == 0.5


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("return 0.5", "return 0.7"))


def edit_beside(path: Path) -> None:
    (path.parent / "helper_of_rewards.py").write_text("WORTH = 3.0\n")


@pytest.mark.parametrize("change", [edit, edit_beside, Path.unlink])
async def test_another_nursery_never_runs_other_code(
    dangerous: Callable[..., tuple[Reward, Judges]], path: Path, change: Callable[[Path], None]
) -> None:
    """The judges of a worker would run old and new code in one batch. The worker ends instead."""
    source = f"from helper_of_rewards import WORTH\n{DANGEROUS}"
    reward, judges = dangerous(pace=RestartPace(first_s=0.01, longest_s=0.02), source=source)
    assert await ask(reward, "") == 0.5
    change(path)
    assert await ask(reward, "") == 0.5  # the judges that are there have the old code
    nursery = nursery_of(judges)
    with_old_code = [judge.pid for judge in psutil.Process(nursery.pid).children()]
    nursery.kill()
    await wait_until_gone(nursery.pid, *with_old_code)
    for _ in range(2):
        with pytest.raises(CodeChangedError, match=r"rewards_of_test\.py:dangerous has changed"):
            await ask(reward, "")


async def test_judges_of_an_async_function_run_concurrently(make_in_process: Callable[..., Reward]) -> None:
    reward = make_in_process("later")
    found = await asyncio.gather(*(reward.score(PROMPT, [RIGHT, CUT]) for _ in range(6)))
    assert found == [[1.0, 0.0]] * 6


async def test_arguments_that_cannot_be_pickled_reject_the_rollout(make_in_process: Callable[..., Reward]) -> None:
    strange = replace(PROMPT, answer=threading.Lock())
    with pytest.raises(RolloutRejected, match="cannot pickle") as caught:
        await make_in_process("exact").score(strange, [RIGHT])
    assert caught.value.reason == "reward_error"


async def wait_until(condition: Callable[[], Any]) -> None:
    for _ in range(int(LIMIT_S / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"the condition did not hold within {LIMIT_S:g} s")


async def wait_until_gone(*pids: int) -> None:
    await wait_until(lambda: not any(lives(pid) for pid in pids))


def lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        ([0, 0.5], ""),  # the bounds belong to the range
        ([1, 0.5], ""),
        ([0, 0.25], "too_hard"),
        ([1, 0.75], "too_easy"),
        ([0.5, 0.5], "equal_rewards"),
        ([1, 1], "too_easy"),
    ],
)
def test_groups_that_teach_nothing(rewards: list[float], told: str) -> None:
    rollout = RolloutConfig(success_rate_lb=0.25, success_rate_ub=0.75, reject_equal_rewards=True)
    assert objection_to(rewards, rollout) == told
    assert objection_to([0.5, 0.5], replace(rollout, reject_equal_rewards=False)) == ""
