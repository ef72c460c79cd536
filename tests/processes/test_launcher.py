"""The launcher with real processes: it reports a run's first failure, and nothing of the run survives it."""

import fcntl
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys

import msgspec
import psutil
import pytest

from asyncrl.cli import main as cli
from asyncrl.config.schema import AUTO, NameResolveConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import load_process_config, plan, save_config
from asyncrl.launch.rundir import RunLock, RunRecord, read_record, write_record
from asyncrl.protocol.names import Names
from asyncrl.protocol.status import WorkerStatus
from asyncrl.runtime import unix_sockets
from asyncrl.runtime.clock import wait_until
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.process import tail_of
from asyncrl.testing.runs import assert_nothing_left, launch, make_tiny_run, processes_of, train_steps
from tests.support.etcd_server import EtcdServer

WORKERS = ["generation_server/0", "gserver_manager/0", "master/0", "model_worker/0", "rollout_worker/0"]
LIMIT_S = 100.0  # for one wait, on a busy machine
ENDLESS = "train.num_epochs=1000", "train.max_steps=0"

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return make_tiny_run(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(config, tmp_path):
    """Launch the tiny run in the test's own folder. Remaining processes are killed at the end of the test."""
    runs = []

    def start_run(*overrides, env=None):
        run = launch(config, f"fileroot={tmp_path}", *overrides, env=env)
        runs.append(run)
        return run

    yield start_run
    for run in runs:
        run.close()


@pytest.fixture
def etcd(tmp_path):
    with EtcdServer(tmp_path / "user_etcd", tmp_path / "user_etcd.log") as server:
        yield server


def all_started(run):
    """Wait until every process exists. Most are still importing then."""
    run.wait_until(lambda: len(workers_of(run.run_dir)) == len(WORKERS), "all workers were started", LIMIT_S)


def workers_of(run_dir):
    return [process for process in processes_of(run_dir) if "asyncrl.launch.worker_main" in cmdline(process)]


def cmdline(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def etcd_pid(run):
    def find():
        return [process.pid for process in processes_of(run.run_dir) if "--data-dir" in cmdline(process)]

    return run.wait_until(find, "etcd was there", LIMIT_S)[0]


def is_open(endpoint):
    """Whether the endpoint accepts connections. A private etcd's endpoint is a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(endpoint.removeprefix("unix:")) == 0


# ---------------------------------------------------------------------------------------------------------------- stopping


def test_a_run_is_seen_from_outside_and_stopped(start, config, tmp_path, capsys):
    run = start(*ENDLESS)
    run.wait_for_step(1, LIMIT_S)

    def status_that_shows_running_workers():  # the launcher publishes statuses once a second
        assert cli.main(["status", str(run.run_dir)]) == 0
        shown = capsys.readouterr().out
        return shown if "running" in shown else ""

    by_folder = run.wait_until(status_that_shows_running_workers, "the workers were shown as running", LIMIT_S)
    assert re.match(r"step \d+/\d+, \d+ %, \d+:.* left, reward \d\.\d{3}\n", by_folder)
    assert all(worker in by_folder for worker in WORKERS)
    assert cli.main(["status", str(config), f"fileroot={tmp_path}"]) == 0
    assert "master/0" in capsys.readouterr().out
    assert cli.main(["status", str(run.run_dir), "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen["record"]["pid"] == run.popen.pid
    progress = seen["progress"]
    assert 1 <= progress["step"] < progress["total_steps"]
    assert progress["left_s"] > 0
    assert progress["reward"] == train_steps(run.run_dir)[progress["step"] - 1]["reward/mean"]
    assert [worker["worker"] for worker in seen["workers"]] == WORKERS

    assert cli.main(["check", str(config), f"fileroot={tmp_path}", "--json"]) == 1
    machine = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["machine"]}
    assert f"in use by process {run.popen.pid}" in machine["run folder"]["value"]

    assert cli.main(["run", str(config), f"fileroot={tmp_path}"]) == 1
    assert f"is in use by process {run.popen.pid}" in capsys.readouterr().out.replace("\n", "")

    assert cli.main(["config", str(config), f"fileroot={tmp_path}", *ENDLESS, "--resolved"]) == 0
    assert capsys.readouterr().out == (run.run_dir / "config.yaml").read_text()

    for worker in WORKERS:
        resolved = load_process_config(run.run_dir / "configs" / "attempt_1" / f"{worker.replace('/', '_')}.yaml")
        assert resolved.worker.name == worker
        assert resolved.worker.name_resolve.endpoints == read_record(run.run_dir).endpoints

    command = [sys.executable, "-m", "asyncrl.cli.main", "logs", str(run.run_dir), "-f", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as following:
        try:
            assert json.loads(following.stdout.readline())["event"] == "log"
            assert cli.main(["stop", str(run.run_dir)]) == 0
            *lines, end = map(json.loads, following.stdout)
            assert following.wait(LIMIT_S) == 0
        finally:
            following.kill()
    assert {line["worker"] for line in lines if line["text"] == "done"} == set(WORKERS)
    for worker in WORKERS:
        times = [line["time"] for line in lines if line["worker"] == worker]
        assert times == sorted(times)
    assert end["event"] == "end"
    capsys.readouterr()
    assert (
        cli.main(["logs", str(run.run_dir), "--json"]) == 0
    )  # all processes have started: no late log file can break the order of time
    *whole, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["time"] for line in whole] == sorted(line["time"] for line in whole)
    assert len(whole) >= len(lines)
    assert run.wait(LIMIT_S) == 128 + signal.SIGTERM, run.output()
    assert_nothing_left(run.run_dir)
    assert not is_open(read_record(run.run_dir).endpoints[0])
    assert "of 5 processes run; starting: " in run.output()

    capsys.readouterr()
    assert cli.main(["status", str(run.run_dir)]) == 3
    assert "the last one was attempt 1" in capsys.readouterr().out.replace("\n", " ")
    assert cli.main(["stop", str(run.run_dir)]) == 0


@pytest.mark.real_start
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.release)])
def test_a_signal_while_workers_are_still_importing(start, number):
    run = start(*ENDLESS)
    all_started(run)
    run.signal(number)
    assert run.wait(LIMIT_S) == 128 + number, run.output()
    assert_nothing_left(run.run_dir)


@pytest.mark.real_start
@pytest.mark.release
def test_config_yaml_has_the_values_of_auto_and_a_resume_chooses_anew(start):
    run = start(*ENDLESS, env={"CUDA_VISIBLE_DEVICES": ""})
    all_started(run)
    run.signal(signal.SIGINT)
    run.wait(LIMIT_S)
    written = load_experiment(run.run_dir / "config.yaml")
    assert (written.train.dtype, written.train.tf32, written.rollout.new_tokens_per_chunk) == ("float32", False, 1024)
    asked = load_experiment(run.run_dir / "configs" / "attempt_1" / "experiment.yaml")
    assert (asked.train.dtype, asked.train.tf32, asked.rollout.new_tokens_per_chunk) == (AUTO, AUTO, AUTO)


@pytest.mark.real_start
@pytest.mark.release
def test_asked_twice_it_does_not_wait_for_a_worker_that_hangs(start):
    run = start(*ENDLESS, "runtime.stop_timeout_s=1000")
    all_started(run)
    run.worker("master/0").suspend()
    run.signal(signal.SIGINT)
    told = r"waiting up to 400 s for (\S+, )*master/0(, \S+)* to stop; a second Ctrl-C kills at once"  # others may be slow too
    run.wait_until(lambda: re.search(told, run.output()), "it was told who is waited for", LIMIT_S)
    run.signal(signal.SIGINT)
    assert run.wait(LIMIT_S) == 130, run.output()
    assert_nothing_left(run.run_dir)


@pytest.fixture
def with_grandchildren(tmp_path):
    """Override: a reward function that starts processes, one of them in its own session."""
    file = tmp_path / "starts_processes.py"
    file.write_text(
        "import subprocess\n"
        "subprocess.Popen(['sleep', '1001'])\n"
        "subprocess.Popen(['sleep', '1002'], start_new_session=True)\n"
        "def reward(prompt, completion, answer):\n"
        "    return 1.0\n"
    )
    return f"rollout.tasks.default.reward={file}:reward"


def reapers(run):
    return [process for process in processes_of(run.run_dir) if any("reaper.py" in part for part in cmdline(process))]


def grandchildren(run):
    sleeping = [process for process in processes_of(run.run_dir) if cmdline(process)[:1] == ["sleep"]]
    return sleeping if len(sleeping) == 2 else []


def test_ctrl_c_in_the_terminal_ends_grandchildren_too(start, with_grandchildren):
    run = start(*ENDLESS, with_grandchildren)
    run.wait_until(lambda: grandchildren(run), "the reward function had started its processes", LIMIT_S)
    run.signal(signal.SIGINT, group=True)
    assert run.wait(LIMIT_S) == 130, run.output()
    assert_nothing_left(run.run_dir)


def test_a_killed_launcher_leaves_nothing(start, with_grandchildren):
    """Nothing of the run remains after the launcher is killed, even if its reaper was killed first."""
    run = start(*ENDLESS, with_grandchildren)
    run.wait_until(lambda: grandchildren(run), "the reward function had started its processes", LIMIT_S)
    (reaper,) = reapers(run)
    reaper.kill()
    run.wait_until(lambda: reapers(run) and reaper not in reapers(run), "there was another reaper", LIMIT_S)
    endpoint, last = read_record(run.run_dir).endpoints[0], reapers(run)
    assert last, "the new reaper is not among the run's processes"
    assert is_open(endpoint)
    run.signal(signal.SIGKILL)
    assert run.wait(LIMIT_S) == -signal.SIGKILL
    assert_nothing_left(run.run_dir)
    assert not is_open(endpoint)
    assert not psutil.wait_procs(last, LIMIT_S)[1]
    assert not os.path.exists(os.readlink(run.run_dir / unix_sockets.LINK))


@pytest.fixture
def with_daemons(tmp_path):
    """Override: a reward function that leaves a process behind at each call, in its own session and with an empty environment."""
    file, pids = tmp_path / "leaves_daemons.py", tmp_path / "daemons"
    file.write_text(
        "import os\n"
        "def reward(prompt, completion, answer):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.setsid()\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        f"            with open({str(pids)!r}, 'a') as file:\n"
        "                file.write(f'{os.getpid()}\\n')\n"
        "            os.execve('/bin/sleep', ['sleep', '1003'], {})\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "    return 1.0\n"
    )
    return f"rollout.tasks.default.reward={file}:reward", pids


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_launcher_ends_daemons_of_rewards(start, with_daemons, number):
    """Processes that rewards leave behind end with the launcher, although they have their own sessions and empty environments."""
    override, pids = with_daemons
    run = start(*ENDLESS, override)
    run.wait_until(pids.exists, "the reward function had left a process", LIMIT_S)
    run.signal(number)
    assert run.wait(LIMIT_S) == (130 if number == signal.SIGINT else -number), run.output()
    assert_nothing_left(run.run_dir)
    daemons = [int(pid) for pid in pids.read_text().split()]
    assert not [pid for pid in daemons if psutil.pid_exists(pid) and "sleep" in cmdline(psutil.Process(pid))]


# ---------------------------------------------------------------------------------------------------------------- failures


def test_etcd_comes_back_and_a_killed_worker_is_the_first_cause(start):
    run = start(*ENDLESS, "runtime.max_restarts=0")
    step = run.wait_for_step(1, LIMIT_S)["step"]
    os.kill(etcd_pid(run), signal.SIGKILL)
    run.wait_for_output("etcd runs again", LIMIT_S)
    run.wait_for_step(step + 20, LIMIT_S)

    run.worker("model_worker/0").kill()
    assert run.wait(LIMIT_S) == 1
    assert "failed: model_worker/0 was killed by signal SIGKILL" in run.output()
    assert "logs/attempt_1/model_worker_0.log" in run.output()
    assert_nothing_left(run.run_dir)


@pytest.mark.parametrize("name", ["model_worker/0", "gserver_manager/0"])
def test_a_worker_that_is_killed_in_its_start_is_started_again(start, tmp_path, name):
    """The worker is killed as it reads its config, in its first incarnation only."""
    killed, log_name = tmp_path / "killed", name.replace("/", "_")
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def end(event, arguments):\n"
        f"    if event == 'open' and str(arguments[0]).endswith('{log_name}.yaml') and arguments[1] == 'r':\n"
        f"        if not os.path.exists({str(killed)!r}):\n"
        f"            os.close(os.open({str(killed)!r}, os.O_CREAT))\n"
        "            os.kill(os.getpid(), 9)\n"
        "sys.addaudithook(end)\n"
    )
    run = start("train.max_steps=2", env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert run.wait(2 * LIMIT_S) == 0
    assert killed.exists()
    assert f"{name} was killed by signal SIGKILL" in run.output()
    assert "started again at once (1 of 3)" in run.output()
    assert_nothing_left(run.run_dir)


@pytest.mark.release
def test_a_run_whose_folder_is_removed_ends_with_that_cause(start):
    run = start(*ENDLESS)
    run.wait_for_step(1, LIMIT_S)
    while run.run_dir.exists() and run.popen.poll() is None:  # processes may recreate folders meanwhile
        shutil.rmtree(run.run_dir, ignore_errors=True)
    assert run.wait(LIMIT_S) == 1
    assert f"failed: the run's folder {run.run_dir}, or launcher.lock in it, was removed or moved" in run.output()
    assert_nothing_left(run.run_dir)


def test_an_error_is_told_with_its_traceback(start, tmp_path, capsys):
    broken = tmp_path / "broken.py"
    broken.write_text("def reward(prompt, completion, answer): return 1.0\n1 / 0\n")
    run = start(*ENDLESS, f"rollout.tasks.default.reward={broken}:reward")
    assert run.wait(LIMIT_S) == 1
    output = run.output()
    assert "failed: rollout_worker/0 failed" in output
    assert f'File "{broken}", line 2' in output
    assert cli.main(["logs", str(run.run_dir), "--level", "ERROR"]) == 0
    shown = capsys.readouterr().out
    assert shown.index(" first error ") < shown.index(f'File "{broken}", line 2')
    assert output.index("ZeroDivisionError") < output.index("Its log: ")
    assert cli.main(["status", str(run.run_dir)]) == 3
    shown = capsys.readouterr().out
    assert "it failed: rollout_worker/0 failed" in shown
    assert shown.index(f'File "{broken}", line 2') < shown.index("ZeroDivisionError") < shown.index("Its log: ")
    assert_nothing_left(run.run_dir)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("os._exit(3)", "ended with exit code 3; its log ends with"),
        ("os.kill(os.getpid(), 11)", "was killed by signal SIGSEGV"),
    ],
)
def test_a_worker_that_dies_before_it_can_speak(start, tmp_path, ending, told):
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def end(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('gserver_manager_0.yaml') and arguments[1] == 'r':\n"
        "        print('last words', file=sys.stderr, flush=True)\n"
        f"        {ending}\n"
        "sys.addaudithook(end)\n"
    )
    run = start(*ENDLESS, env={"PYTHONPATH": str(tmp_path)})
    assert run.wait(LIMIT_S) == 1
    assert f"failed: gserver_manager/0 {told}" in run.output()
    assert "last words" in run.output()
    assert_nothing_left(run.run_dir)


def test_a_folder_that_cannot_be_written(config, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["run", str(config), f"fileroot={tmp_path / 'file'}"]) == 1
    output = capsys.readouterr().out.replace("\n", " ")
    assert f"the run's folder {tmp_path / 'file'}/tiny/t0 cannot be written" in output
    assert "set fileroot=" in output


@pytest.mark.release
def test_a_run_for_machines(config, tmp_path):
    """Every line of stdout is one JSON object, and these lines alone show the course of the run."""
    command = [sys.executable, "-m", "asyncrl.cli.main", "run", str(config), f"fileroot={tmp_path}", "--json"]
    command.append("train.max_steps=20")  # enough to show the state "running"; states are reported twice a second
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["event"] == "start"
    assert [process["name"] for process in events[0]["processes"]] != []
    states = [(event["name"], event["state"]) for event in events if event["event"] == "worker"]
    assert {name for name, state in states if state == "running"} == set(WORKERS)
    assert [event["step"] for event in events if event["event"] == "metrics"] == list(range(1, 21))
    assert events[-1]["event"] == "end"
    assert events[-1]["exit_code"] == 0
    assert events[-1]["summary"]["steps"] == 20


@pytest.mark.parametrize("as_json", [(), pytest.param(("--json",), marks=pytest.mark.release)])
def test_a_reader_that_stops_reading_delays_nothing(config, tmp_path, as_json):
    """As after Ctrl-S. A killed worker is replaced, Ctrl-C has its effect, and the launcher ends."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "asyncrl.cli.main", "run", str(config), f"fileroot={tmp_path}", *ENDLESS, *as_json]
    run_dir = tmp_path / "tiny" / "t0"

    def is_full(fd):
        return not select.select([], [fd], [], 0)[1]

    def rollout_workers():
        return {process for process in workers_of(run_dir) if "rollout_worker_0" in " ".join(cmdline(process))}

    with subprocess.Popen(command, stdout=writer, stderr=writer) as run:
        try:
            assert wait_until(lambda: is_full(writer) and bool(train_steps(run_dir)), limit_s=LIMIT_S, every_s=0.1)
            (first,) = rollout_workers()
            first.kill()
            assert wait_until(lambda: bool(rollout_workers() - {first}), limit_s=LIMIT_S, every_s=0.1)
            run.send_signal(signal.SIGINT)
            assert run.wait(LIMIT_S) == 130
        finally:
            run.kill()
            os.close(reader)
            os.close(writer)
    assert_nothing_left(run_dir)


# ------------------------------------------------------------------------------------------------------- the user's own etcd


@pytest.mark.release
def test_a_run_in_the_users_etcd_with_nobody_reading_its_output(config, tmp_path, etcd, capsys):
    """The run completes although the reader of its output is gone, and deletes its keys. Its name is reserved meanwhile."""
    endpoints = f"name_resolve.endpoints=[{etcd.endpoint}]"
    go_on, patient = tmp_path / "go_on", tmp_path / "patient.py"
    patient.write_text(  # so that the run does not end before the second launch is refused
        "import pathlib, time\n"
        "def reward(prompt, completion, answer):\n"
        f"    while not pathlib.Path({str(go_on)!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "    return float(len(set(completion)))\n"
    )
    command = [sys.executable, "-m", "asyncrl.cli.main", "run", str(config), f"fileroot={tmp_path}", endpoints]
    command += ["train.max_steps=5", f"rollout.tasks.default.reward={patient}:reward", "rollout.reward_timeout_s=1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        run_dir = tmp_path / "tiny" / "t0"
        try:
            assert "logs in" in run.stdout.readline()
            assert "processes run" in run.stdout.readline()
            run.stdout.close()

            with open_name_resolver(NameResolveConfig(endpoints=[etcd.endpoint])) as resolver:
                keys = {"owner": Names("tiny", "t0").owner(), "manager": Names("tiny", "t0").gserver_manager()}
                published = {name: resolver.wait(key, LIMIT_S) for name, key in keys.items()}
                assert cli.main(["run", str(config), f"fileroot={tmp_path / 'elsewhere'}", endpoints]) == 1
                output = capsys.readouterr().out.replace("\n", " ")
                assert f"a run of this name, in {socket.gethostname()}:{run_dir}" in output
                # A refused launch does not touch the other's keys.
                assert {name: resolver.get(key) for name, key in keys.items()} == published
            go_on.touch()
            assert run.wait(LIMIT_S) == 0
        finally:
            run.kill()
    assert [record["step"] for record in train_steps(run_dir)] == [1, 2, 3, 4, 5]
    assert_nothing_left(run_dir)
    with open_name_resolver(NameResolveConfig(endpoints=[etcd.endpoint])) as resolver:
        assert resolver.get_subtree("asyncrl") == {}


def test_endpoints_that_do_not_answer_are_named(config, tmp_path, capsys):
    unreachable = ["name_resolve.endpoints=[127.0.0.1:1]", "name_resolve.timeout_s=0.5"]
    assert cli.main(["run", str(config), f"fileroot={tmp_path}", *unreachable]) == 1
    output = capsys.readouterr().out
    assert "failed: name_resolve.endpoints=['127.0.0.1:1']: etcd did not answer" in output
    assert_nothing_left(tmp_path / "tiny" / "t0")


def test_status_when_etcd_is_down(tmp_path, capsys):
    lock = RunLock(tmp_path)
    lock.acquire()
    write_record(
        tmp_path,
        RunRecord(pid=os.getpid(), attempt=2, experiment="e", trial="t", endpoints=["127.0.0.1:1"], started=0.0),
    )
    assert cli.main(["status", str(tmp_path)]) == 1
    assert "its name resolve at 127.0.0.1:1 does not answer" in capsys.readouterr().out.replace("\n", " ")
    lock.release()


# -------------------------------------------------------------------------------------------------------- a process alone


def test_a_process_runs_alone_from_its_config(config, tmp_path, etcd):
    """A process without a launcher refreshes its own lease and publishes its own status. At its end it deletes its keys."""
    overrides = [f"fileroot={tmp_path}", f"name_resolve.endpoints=[{etcd.endpoint}]", "network.authenticate=off"]
    experiment = load_experiment(config, overrides)
    spec = next(spec for spec in plan(experiment, attempt=1, num_prompts=100) if spec.kind == "gserver_manager")
    file = tmp_path / "gserver_manager_0.yaml"
    save_config(spec.config, file)
    log = tmp_path / "alone.log"
    command = [sys.executable, "-m", "asyncrl.launch.worker_main", str(file)]
    names = Names(experiment.experiment, experiment.trial)
    with (
        open_name_resolver(NameResolveConfig(endpoints=[etcd.endpoint])) as resolver,
        log.open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as process,
    ):
        try:
            assert resolver.wait(names.gserver_manager(), LIMIT_S).startswith("http://127.0.0.1:")
            status = msgspec.json.decode(resolver.wait(names.status("gserver_manager/0"), LIMIT_S), type=WorkerStatus)
            assert status.pid == process.pid
            process.terminate()
            assert process.wait(LIMIT_S) == 0, tail_of(log)
        finally:
            process.kill()
        assert names.gserver_manager() not in resolver.get_subtree(names.root)
        assert resolver.get_subtree(names.statuses()) == {}


# ------------------------------------------------------------------------------------------------------------------- check


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("train.batch_size=5000", "has only 2000 prompts, so a batch could never fill"),
        ("prompts.max_prompt_length=1000000", "cannot hold one full sequence"),
        ("manager.heartbeat_s=10", "manager.lease_s=15.0: must be more than twice manager.heartbeat_s"),
        ("name_resolve.binary=/no/etcd", "not an executable file"),
        ("model_path=/nowhere", "there is no config.json"),
        ("rollout.tasks.default.reward=nowhere.py:reward", "there is no file"),
        ("prompts.path=/nowhere.jsonl", "prompts.path='/nowhere.jsonl'"),
    ],
)
def test_check_refuses_what_cannot_run(config, tmp_path, capsys, override, told):
    assert cli.main(["check", str(config), f"fileroot={tmp_path}", override]) == 2
    assert told in capsys.readouterr().out.replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_check_starts_nothing(config, tmp_path, capsys):
    assert cli.main(["check", str(config), f"fileroot={tmp_path}"]) == 0
    output = capsys.readouterr().out
    assert all(worker in output for worker in WORKERS)
    assert "ok: this config can run" in output
    assert list(tmp_path.iterdir()) == []
