"""Forked workers behave like separate interpreters, and a fork server leaves nothing behind."""

import json
import os
import select
import signal
import time
from pathlib import Path

import psutil
import pytest

from asyncrl.launch.supervisor.fork_server import (
    PRELOADS,
    Forked,
    ForkServer,
    ForkServerEnded,
    adopt_orphans,
    is_supported,
)
from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, processes_of, train_steps

LIMIT_S = 100.0  # for one wait, on a busy machine

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(not is_supported(), reason="this system has no subreapers: workers are separate interpreters"),
]


class Workers:
    """A fork server. Each worker runs a line of Python and writes its findings into a file."""

    def __init__(self, folder: Path, kind: str, origin: ForkServer | None = None) -> None:
        self.folder = folder
        env = {"PYTHONPATH": str(Path(__file__).parent), "OF_THE_SERVER": "kept"}
        self.server = ForkServer.start(
            kind, folder / "server.log", env, folder / "longest.yaml", "forked_program", origin
        )
        self.num_asked = 0

    def ask(self, line: str, **env: str | None) -> Path:
        self.num_asked += 1
        config = self.folder / f"{self.num_asked}.yaml"
        config.write_text(line)
        reader, writer = os.pipe()
        with config.with_suffix(".log").open("ab") as log:
            self.server.ask(config, env, log=log.fileno(), status=writer)
        os.close(reader)
        os.close(writer)
        return config

    def fork(self, line: str, **env: str | None) -> Forked:
        config = self.ask(line, **env)
        return self.wait_for([config])[config]

    def wait_for(self, configs: list[Path]) -> dict[Path, Forked]:
        found: dict[Path, Forked] = {}
        deadline = time.monotonic() + LIMIT_S
        while set(found) != set(configs):
            assert select.select([self.server], [], [], deadline - time.monotonic())[0], self.log()
            found |= {config: Forked(pid) for config, pid in self.server.forked().items()}
        return found

    def find_out(self, expression: str, **env: str | None) -> object:
        """The value of an expression in a new worker."""
        line = f"import json, os, sys; config.with_suffix('.json').write_text(json.dumps({expression}))"
        worker = self.fork(line, **env)
        assert worker.wait() == 0, self.log()
        return json.loads((self.folder / f"{self.num_asked}.json").read_text())

    def log(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*.log"))


@pytest.fixture(scope="module")
def subreaper():
    adopt_orphans(True)
    yield
    adopt_orphans(False)


@pytest.fixture(scope="module")
def workers(subreaper, tmp_path_factory):
    found = Workers(tmp_path_factory.mktemp("workers"), "light")
    yield found
    assert found.server.close() == {}


# ----------------------------------------------------------------------------------------------------------- like a new interpreter


def test_how_a_worker_ends_is_known_exactly(workers):
    assert workers.fork("pass").wait() == 0
    assert workers.fork("raise SystemExit(7)").wait() == 7
    assert workers.fork("1 / 0").wait() == 1
    assert "ZeroDivisionError" in (workers.folder / f"{workers.num_asked}.log").read_text()
    assert workers.fork("import os; os.kill(os.getpid(), 11)").wait() == -signal.SIGSEGV


def test_a_child_of_the_launcher_in_a_session_of_its_own(workers):
    worker = workers.fork("import time; time.sleep(1000)")
    process = psutil.Process(worker.pid)
    assert process.ppid() == os.getpid()
    assert os.getsid(worker.pid) == os.getpgid(worker.pid) == worker.pid
    shown = [argument for argument in process.cmdline() if argument]
    assert shown[1:] == ["-P", "-m", "asyncrl.launch.worker_main", str(workers.folder / f"{workers.num_asked}.yaml")]
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.wait() == -signal.SIGKILL

    death_signal = (
        "(lambda number: (__import__('ctypes').CDLL(None).prctl(2, __import__('ctypes').byref(number)), number.value))"
    )
    assert workers.find_out(f"{death_signal}(__import__('ctypes').c_int())") == [0, signal.SIGKILL]
    assert workers.find_out("os.readlink('/proc/self/fd/0')") == os.devnull


def test_each_has_its_own_environment_and_log(workers, monkeypatch):
    expression = "[os.environ.get(name) for name in ('CUDA_VISIBLE_DEVICES', 'OF_THE_SERVER', 'OPENBLAS_NUM_THREADS')]"
    assert workers.find_out(expression, CUDA_VISIBLE_DEVICES="0") == [
        "0",
        "kept",
        os.environ.get("OPENBLAS_NUM_THREADS"),
    ]
    assert workers.find_out(expression, CUDA_VISIBLE_DEVICES="1", OF_THE_SERVER=None)[:2] == ["1", None]

    configs = [
        workers.ask(f"import os; print('this is {name}', flush=True); os.system('echo child of {name}')")
        for name in "AB"
    ]
    for worker in workers.wait_for(configs).values():
        assert worker.wait() == 0
    logs = [config.with_suffix(".log").read_text() for config in configs]
    assert logs == ["this is A\nchild of A\n", "this is B\nchild of B\n"]


def test_they_draw_different_random_numbers(workers):
    expression = "[__import__('random').random(), __import__('numpy').random.random()]"
    first, second = workers.find_out(expression), workers.find_out(expression)
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("kind", list(PRELOADS))
def test_what_must_not_be_there_before_a_fork(workers, tmp_path, kind):
    """Before it forks, the server has one thread, no gRPC, no socket context and no CUDA, and has imported the workers' modules.
    Then the test closes the server. As in a run, the light one has its own interpreter and forks the computing one."""
    workers = Workers(tmp_path, kind, workers.server if kind == "computing" else None)
    found = workers.find_out(
        "{'threads': int(open('/proc/self/stat').read().rpartition(')')[2].split()[17]),"
        " 'grpc': 'grpc' in sys.modules,"
        " 'context': __import__('zmq').Context._instance is not None,"
        " 'cuda': any('nvidia' in os.path.realpath(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')),"
        " 'torch': 'torch' in sys.modules,"
        " 'collects': __import__('gc').isenabled()}"
    )
    torch = kind == "computing"
    assert found == {"threads": 1, "grpc": False, "context": False, "cuda": False, "torch": torch, "collects": True}
    assert workers.log().split() == [], "it said something, such as a warning about threads"

    config = workers.ask("import time; time.sleep(1000)")
    assert select.select([workers.server], [], [], LIMIT_S)[0]
    ((forked, pid),) = workers.server.close().items()  # close returns workers with unread answers
    assert forked == config
    os.kill(pid, signal.SIGKILL)
    assert Forked(pid).wait() == -signal.SIGKILL


# ------------------------------------------------------------------------------------------------------------------ its own end


def test_one_that_another_fork_server_forks(workers, tmp_path):
    """It is a child of the launcher, has its own environment, log and command line, and ends by itself."""
    server = ForkServer.start("computing", tmp_path / "server.log", {}, tmp_path / "x.yaml", origin=workers.server)
    assert server.pid is None
    assert select.select([server], [], [], LIMIT_S)[0]
    assert server.forked() == {}
    process = psutil.Process(server.pid)
    assert process.ppid() == os.getpid()
    assert process.cmdline()[1:5] == ["-P", "-m", "asyncrl.launch.supervisor.fork_server", "computing"]
    process.kill()
    assert select.select([server], [], [], LIMIT_S)[0]
    with pytest.raises(ForkServerEnded) as caught:
        server.forked()
    assert caught.value.code == -signal.SIGKILL
    assert server.close() == {}
    assert workers.fork("pass").wait() == 0  # the other one works


def test_one_whose_origin_has_ended_before_the_fork(subreaper, tmp_path):
    origin = Workers(tmp_path, "light").server
    server = ForkServer.start("computing", tmp_path / "second.log", {}, tmp_path / "x.yaml", origin=origin)
    os.kill(origin.pid, signal.SIGKILL)
    assert select.select([server], [], [], LIMIT_S)[0]
    with pytest.raises(ForkServerEnded) as caught:
        server.forked()
    assert caught.value.code == -signal.SIGKILL
    assert origin.close() == server.close() == {}


def test_one_that_cannot_import_says_so(tmp_path):
    server = ForkServer.start("no such kind", tmp_path / "server.log", {}, tmp_path / "x.yaml")
    assert select.select([server], [], [], LIMIT_S)[0]
    with pytest.raises(ForkServerEnded) as caught:
        server.forked()
    assert caught.value.code == 1
    assert "KeyError: 'no such kind'" in (tmp_path / "server.log").read_text()
    with pytest.raises(ForkServerEnded), open(os.devnull) as null:
        server.ask(tmp_path / "x.yaml", {}, log=null.fileno(), status=null.fileno())
    assert server.close() == {}


# ------------------------------------------------------------------------------------------------------------------- in a run


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


ENDLESS = "train.max_steps=0", "train.num_epochs=1000"


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended in the meantime
        return []


def fork_servers(run, *kinds):
    return [
        process
        for process in processes_of(run.run_dir)
        if (shown := cmdline(process)) and "asyncrl.launch.supervisor.fork_server" in shown and {*kinds} <= {*shown}
    ]


@pytest.mark.real_start
def test_a_killed_fork_server_is_the_first_cause(config, tmp_path):
    with launch(config, f"fileroot={tmp_path}") as run:
        (server,) = run.wait_until(lambda: fork_servers(run, "computing"), "there was a fork server", LIMIT_S)
        server.kill()
        assert run.wait(LIMIT_S) == 1
        assert "failed: the fork server of the computing processes was killed by signal SIGKILL" in run.output()
        assert "fork_server_computing.log" in run.output()
        assert "runtime.fork_server=false" in run.output()
        assert_nothing_left(run.run_dir)


@pytest.mark.real_start
@pytest.mark.release
def test_they_live_as_long_as_the_run_and_are_not_needed(config, tmp_path):
    """Fork servers use no CPU time while idle. Without them, a restarted worker is an interpreter of its own."""
    with launch(config, f"fileroot={tmp_path}", *ENDLESS) as run:
        run.wait_for_step(1, LIMIT_S)
        servers = fork_servers(run)
        assert len(servers) == len(PRELOADS)
        used_s = [sum(server.cpu_times()[:2]) for server in servers]
        run.wait_for_step(10, LIMIT_S)
        assert [sum(server.cpu_times()[:2]) for server in servers] == pytest.approx(used_s, abs=0.1)
        for server in servers:
            server.kill()
        run.wait_for_output("the fork server of the light processes has ended; from now on", LIMIT_S)
        run.worker("rollout_worker/0").kill()
        run.wait_for_output("rollout_worker/0 was killed by signal SIGKILL", LIMIT_S)
        step = train_steps(run.run_dir)[-1]["step"]
        run.wait_for_step(step + 10, LIMIT_S)
        run.signal(signal.SIGINT)
        assert run.wait(LIMIT_S) == 130
        assert_nothing_left(run.run_dir)


@pytest.mark.real_start
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_nothing_is_left_when_the_launcher_ends_while_they_import(config, tmp_path, number, code):
    with launch(config, f"fileroot={tmp_path}", *ENDLESS) as run:
        run.wait_until(lambda: len(fork_servers(run)) == len(PRELOADS), "there were fork servers", LIMIT_S)
        run.signal(number)
        assert run.wait(LIMIT_S) == code, run.output()
        assert_nothing_left(run.run_dir)


@pytest.mark.release
def test_a_run_without(config, tmp_path):
    with launch(config, f"fileroot={tmp_path}", "runtime.fork_server=false") as run:
        assert run.wait(LIMIT_S) == 0, run.output()
        assert [record["step"] for record in train_steps(run.run_dir)] == [1, 2]
        assert not list((run.run_dir / "logs" / "latest").glob("fork_server*"))
        assert_nothing_left(run.run_dir)
