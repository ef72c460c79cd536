"""A real host daemon: an etcd, a process that it starts, outages, launchers that come and go."""

import os
import signal
import subprocess
import sys
import time

import msgspec
import psutil
import pytest

from asyncrl.config.schema import NameResolveConfig
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import config_text, plan, run_directory
from asyncrl.protocol.hosts import DesiredProcess, HostRecord, HostReport, LauncherRecord
from asyncrl.protocol.names import Names, incarnation
from asyncrl.runtime.names.etcd.resolver import open_name_resolver
from asyncrl.runtime.names.etcd.server import EtcdServer
from asyncrl.runtime.names.interface import NameEntryNotFound
from asyncrl.runtime.security import Secrets, write_secrets

pytestmark = pytest.mark.timeout(240)
HOST = "127.0.0.1"
NAME = "gserver_manager/0"
LIMIT_S = 60.0
CONFIG = """
experiment: hosts
fileroot: {folder}/runs
cluster: hosts
hosts: ["127.0.0.1"]
model_path: {folder}
prompts: {{path: {folder}/p.jsonl}}
rollout: {{tasks: {{default: {{reward: "r:r"}}}}}}
runtime: {{fork_server: false, stop_timeout_s: 3}}
name_resolve: {{endpoints: ["{endpoint}"]}}
"""


def wait_for(condition, what):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{LIMIT_S:g} s went by before {what}"
        time.sleep(0.05)
    return found


class Bench:
    """The test acts as the launcher."""

    def __init__(self, folder):
        self.etcd = EtcdServer(folder / "etcd", folder / "etcd.log", extra_args=["--unsafe-no-fsync"])
        self.etcd.start()
        self.file = folder / "c.yaml"
        self.file.write_text(CONFIG.format(folder=folder, endpoint=self.etcd.endpoint))
        self.config = load_experiment(self.file)
        write_secrets(run_directory(self.config), Secrets.make())
        self.names = Names("hosts", "t0")
        self.resolver = open_name_resolver(NameResolveConfig(endpoints=[self.etcd.endpoint]))
        self.log = (folder / "host_daemon.log").open("w+")
        self.incarnation = 0
        self.daemon = self.start_daemon()

    def start_daemon(self, *overrides, **env):
        command = [sys.executable, "-m", "asyncrl.cli.main", "host", str(self.file), *overrides]
        return subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True, env={**os.environ, **env}
        )

    def read(self, key, kind):
        try:
            return msgspec.json.decode(self.resolver.get(key), type=kind)
        except NameEntryNotFound:
            return None

    def record(self):
        return self.read(self.names.host_daemon(HOST), HostRecord)

    def lead(self, launcher, *, start="", ends=False):
        record = LauncherRecord(incarnation=launcher, host=HOST, run_dir="/r", attempt=1, start=start, ends=ends)
        self.resolver.add(self.names.launcher(), msgspec.json.encode(record).decode(), replace=True)

    def want(self, launcher, *, state="run", incarnation=None, host_daemon=None):
        if incarnation is None:
            incarnation = self.incarnation = self.incarnation + 1
        lease = self.resolver.grant_lease(30.0)
        spec = next(spec for spec in plan(self.config, attempt=1, num_prompts=100) if spec.name == NAME)
        desired = DesiredProcess(
            launcher=launcher,
            host_daemon=host_daemon or self.record().incarnation,
            attempt=1,
            name=NAME,
            incarnation=incarnation,
            state=state,
            config=config_text(spec.config),
            env=dict(spec.env),
            lease=lease.id,
            computes=False,
        )
        key = self.names.desired_process(HOST, NAME)
        self.resolver.add(key, msgspec.json.encode(desired).decode(), replace=True)

    def child(self):
        report = self.read(self.names.observed_on(HOST), HostReport)
        return (
            next((child for child in report.processes if child.incarnation == self.incarnation), None)
            if report
            else None
        )

    def running(self):
        """The process, once its start is complete."""

        def look():
            child = self.child()
            return child if child and child.status and child.status.state == "running" else None

        return psutil.Process(wait_for(look, "the process runs").pid)

    def ended(self):
        return wait_for(lambda: (c := self.child()) and c.returncode is not None and c, "its end is reported")

    def said(self):
        self.log.flush()
        with open(self.log.name) as file:
            return file.read()

    def close(self):
        self.daemon.kill()
        self.daemon.wait()
        self.resolver.close()
        self.etcd.stop()
        self.log.close()


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.close()


def gone(process):
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended in between
        return True


def test_a_host_daemon_brings_about_what_its_launcher_wants_and_ends_it_when_that_is_gone(bench):
    record = wait_for(bench.record, "the host daemon has registered")
    assert (record.address, record.pid) == ("127.0.0.1", bench.daemon.pid)
    assert record.cores >= 1
    assert record.memory_bytes > 10**8
    earlier, launcher = (incarnation("launcher", attempt=attempt, start=1) for attempt in (1, 2))
    bench.lead(launcher)

    bench.want(launcher)
    first = bench.running()
    first.kill()
    end = bench.ended()
    assert (end.returncode, end.how) == (
        -9,
        "was killed by signal SIGKILL (by a person or another process, or because memory ran out: see `dmesg`)",
    )
    assert "running" in end.tail  # the end of its log

    bench.want(launcher)  # the next incarnation
    second = bench.running()
    bench.want(earlier, incarnation=99)  # desired state from an old launcher changes nothing
    wait_for(lambda: gone(second), "what nobody wants any more has ended")
    bench.want(launcher)
    third = bench.running()

    bench.etcd.kill()  # loses all of its data
    time.sleep(3)
    assert third.is_running()
    bench.etcd.start()
    bench.lead(launcher)
    bench.want(launcher, incarnation=bench.incarnation, state="stop")
    assert bench.ended().returncode == 0

    bench.want(launcher)
    fourth = bench.running()
    bench.resolver.delete(bench.names.launcher())
    assert bench.daemon.wait(LIMIT_S) == 1
    assert gone(fourth)
    assert "the launcher is gone; ending its processes on this host (1)" in bench.said()
    assert bench.record() is None


def test_with_a_host_daemon_its_processes_die_and_the_next_daemon_starts_nothing_of_old(bench):
    before = wait_for(bench.record, "the host daemon has registered")
    launcher = incarnation("launcher")
    bench.lead(launcher)
    bench.want(launcher)
    process = bench.running()
    os.kill(bench.daemon.pid, signal.SIGKILL)
    bench.daemon.wait()
    wait_for(lambda: gone(process), "it died with its host daemon")

    bench.daemon = bench.start_daemon()
    wait_for(  # there is no record for a while if the lease of the killed host daemon expires first
        lambda: (record := bench.record()) and record.incarnation != before.incarnation, "the next host daemon has come"
    )
    time.sleep(2)
    assert not psutil.Process(bench.daemon.pid).children()
    wait_for(lambda: "a launcher has appeared" in bench.said().rpartition("joins")[2], "it knows the launcher")
    bench.lead(launcher, ends=True)
    assert bench.daemon.wait(LIMIT_S) == 0


def test_a_host_daemon_of_a_job_that_was_queued_again_does_not_end_with_the_launcher_of_the_start_before(bench):
    wait_for(bench.record, "the host daemon has registered")
    bench.daemon.terminate()  # the fixture's host daemon belongs to no Slurm job
    assert bench.daemon.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert bench.record() is None
    earlier, launcher = (incarnation("launcher", attempt=attempt, start=1) for attempt in (1, 2))
    bench.lead(earlier, start="7.0")

    bench.daemon = bench.start_daemon("cluster=slurm", SLURM_JOB_ID="7", SLURM_RESTART_COUNT="1")
    wait_for(lambda: "the launcher of job 7.0 is still running" in bench.said(), "it has met the one before")
    assert bench.record() is None
    bench.lead(earlier, start="7.0", ends=True)
    bench.lead(launcher, start="7.1")
    wait_for(lambda: "a launcher has appeared" in bench.said(), "it has met its own")
    bench.lead(launcher, start="7.1", ends=True)
    assert bench.daemon.wait(LIMIT_S) == 0
