"""A Slurm cluster on this machine: a real munged, a slurmctld, and a slurmd for each node.

Each node is a network namespace with an address and a host name of its own, so that processes on different nodes communicate over
a network only. The nodes share the file system, as in most clusters. n0 and n1 have two GPUs each (fakes: device files that no
process opens); n2 and n3 have none. The partitions are gpu, cpu and all. Needs root.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
NODES = ("n0", "n1", "n2", "n3")
GPU_NODES = NODES[:2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "ip", "nsenter", "unshare", "setpriv")
CORES, MEMORY_MB = 8, 6000  # as each node reports them
_START_LIMIT_S = 120.0
_COMMAND_LIMIT_S = 60.0
_POLL_S = 0.1

_CONF = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={munge}/socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=3
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
MailProg=/bin/true
GresTypes=gpu
SlurmdParameters=config_overrides
{nodes}
PartitionName=gpu Nodes=n[0-1] Default=YES MaxTime=60 State=UP
PartitionName=cpu Nodes=n[2-3] MaxTime=60 State=UP
PartitionName=all Nodes=n[0-3] MaxTime=60 State=UP
"""


class SlurmCluster:
    """Started and stopped as a context manager. `run` runs a command as on the login node."""

    nodes = NODES

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        number = os.getpid()
        self._tag = f"{number % 100_000}"
        self._net = f"10.{64 + number % 64}.{number // 64 % 256}"
        self._bridge = f"sl{self._tag}"
        # Jobs have the environment of sbatch. The GPUs of the nodes are files
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "ASYNCRL_SIMULATED_GPUS": "1"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    # ------------------------------------------------------------------------------------------------------------- life

    def __enter__(self) -> SlurmCluster:
        try:
            self._write_files()
            self._make_network()
            self._start_munge()
            self._start("slurmctld", ["slurmctld", "-D", "-c", "-f", str(self.folder / "slurm.conf")])
            for node in NODES:
                self.start_node(node)
            self.wait_until(
                lambda: self.node_states() == dict.fromkeys(NODES, "IDLE"), "four idle nodes", _START_LIMIT_S
            )
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _write_files(self) -> None:
        for name in ("state", "munge", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        nodes = []
        for index, node in enumerate(NODES):
            gres = "Gres=gpu:2 " if node in GPU_NODES else ""
            nodes.append(
                f"NodeName={node} NodeAddr={self.address(node)} CPUs={CORES} RealMemory={MEMORY_MB} {gres}State=UNKNOWN"
            )
            if gres:
                for gpu in range(2):  # no driver serves these device files: opening one fails
                    os.mknod(self.folder / f"{node}-gpu{gpu}", 0o666 | 0o020000, os.makedev(240, 100 + 2 * index + gpu))
        conf = _CONF.format(
            host=socket.gethostname(),
            address=f"{self._net}.254",
            port=_free_port(),
            folder=self.folder,
            munge=self.folder / "munge",
            nodes="\n".join(nodes),
        )
        (self.folder / "slurm.conf").write_text(conf)
        gres_lines = [f"NodeName={node} Name=gpu File={self.folder}/{node}-gpu[0-1]" for node in GPU_NODES]
        (self.folder / "gres.conf").write_text("\n".join(gres_lines) + "\n")

    def _make_network(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self._net}.254/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        lines = ["127.0.0.1 localhost", *(f"{self.address(node)} {node}" for node in NODES)]
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        for node in NODES:
            space, outside, inside = self._space(node), f"o{self._tag}{node}", f"i{self._tag}{node}"
            _ip("netns", "add", space)
            _ip("link", "add", outside, "type", "veth", "peer", "name", inside)
            _ip("link", "set", inside, "netns", space, "name", "eth0")
            _ip("link", "set", outside, "master", self._bridge, "up")
            _ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        (folder / "key").write_bytes(os.urandom(128))
        for parent in [folder, *folder.parents]:  # munged requires that all users may enter the folder
            if parent.stat().st_mode & 0o011 != 0o011 and str(parent).startswith(("/tmp", str(self.folder))):
                parent.chmod(parent.stat().st_mode | 0o011)
        for path in (folder, folder / "key"):
            shutil.chown(path, "munge", "munge")
        (folder / "key").chmod(0o400)
        files = [f"--{name}={folder}/{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        as_munge = ["setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups"]
        self._start("munged", [*as_munge, "munged", "--foreground", "--force", f"--key-file={folder}/key", *files])
        self.wait_until((folder / "socket").exists, "munged's socket", _START_LIMIT_S)

    def start_node(self, node: str) -> None:
        """Start a node, or restart one."""
        there = ["nsenter", f"--net=/run/netns/{self._space(node)}", "unshare", "--uts", "--mount"]
        inside = f"hostname {node} && mount --bind {self.folder}/hosts /etc/hosts"
        self._start(node, [*there, "sh", "-c", f"{inside} && exec slurmd -D -N {node} -f {self.folder}/slurm.conf"])

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._daemons[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.env,
                start_new_session=True,
            )

    def _close(self) -> None:
        for node in NODES:
            self._kill_all_of(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        for node in NODES:
            subprocess.run(["ip", "netns", "del", self._space(node)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)

    # ------------------------------------------------------------------------------------------------------------- nodes

    def address(self, node: str) -> str:
        return f"{self._net}.{NODES.index(node) + 1}"

    def _space(self, node: str) -> str:
        return f"sl{self._tag}{node}"

    def pids(self, node: str) -> list[int]:
        """Pids of the processes on a node, without Slurm's own."""
        found = subprocess.run(["ip", "netns", "pids", self._space(node)], capture_output=True, text=True, check=False)
        return [pid for pid in map(int, found.stdout.split()) if not _program(pid).startswith("slurm")]

    def programs(self) -> list[str]:
        """Command lines of all processes on the nodes besides Slurm's, each preceded by its node."""
        return [f"{node}: {_command_line(pid)}" for node in NODES for pid in self.pids(node)]

    def cut_power(self, node: str) -> None:
        """Kill all processes on a node at once. Nothing answers at its address afterwards."""
        _ip("-n", self._space(node), "link", "set", "eth0", "down")  # first, so that no process can send a last message
        self._kill_all_of(node)
        daemon = self._daemons.pop(node)
        daemon.wait()

    def kill_slurmd(self, node: str) -> None:
        """Kill slurmd on the node: Slurm loses contact with the node, and the processes that it has started there live on."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()

    def give_power(self, node: str) -> None:
        _ip("-n", self._space(node), "link", "set", "eth0", "up")
        self.start_node(node)
        self.wait_until(lambda: self.node_states()[node] == "IDLE", f"{node} is back", _START_LIMIT_S)

    def _kill_all_of(self, node: str) -> None:
        for _ in range(20):
            found = subprocess.run(
                ["ip", "netns", "pids", self._space(node)], capture_output=True, text=True, check=False
            )
            if not found.stdout.split():
                return
            for pid in found.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(_POLL_S)

    # ------------------------------------------------------------------------------------------------------------- commands

    def run(self, *command: str, limit_s: float = _COMMAND_LIMIT_S) -> str:
        """Return the command's output. If it fails, raise an AssertionError with all of its output."""
        options = {"env": self.env, "cwd": ROOT, "capture_output": True, "text": True, "timeout": limit_s}
        done = subprocess.run(command, check=False, **options)
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def node_states(self) -> dict[str, str]:
        done = subprocess.run(
            ["sinfo", "-h", "-N", "-p", "all", "-o", "%N %T"], env=self.env, capture_output=True, text=True, check=False
        )
        return {node: state.upper() for node, state in (line.split() for line in done.stdout.splitlines())}

    def job(self, job_id: str) -> dict[str, str]:
        """Fields of `scontrol show job`. For a heterogeneous job, the fields of its first part."""
        text = self.run("scontrol", "show", "job", job_id)
        return dict(re.findall(r"(\w+)=(\S*)", text.split("\n\n")[0]))

    def job_state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def end_all_jobs(self) -> None:
        """Cancel all jobs between tests. Asserts that they end."""
        subprocess.run(
            ["scancel", "--user=root"], env=self.env, check=False, capture_output=True, timeout=_COMMAND_LIMIT_S
        )
        subprocess.run(
            ["scancel", "--signal=KILL", "--full", "--user=root"],
            env=self.env,
            check=False,
            capture_output=True,
            timeout=60,
        )
        self.wait_until(lambda: not self.run("squeue", "-h"), "all jobs were gone", _START_LIMIT_S)
        self.wait_until(lambda: not self.programs(), "nothing ran on the nodes", _START_LIMIT_S)

    def wait_until(self, condition: Callable[[], T], what: str, limit_s: float, told: Callable[[], str] = str) -> T:
        """Return the first true value of `condition`. told: adds to the error message after a timeout."""
        deadline = time.monotonic() + limit_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                log = self.folder / "slurmctld.log"
                end = log.read_text(errors="replace")[-3000:] if log.exists() else ""
                raise AssertionError(f"{limit_s:g} s went by before {what}\n{told()}\nslurmctld.log:\n{end}")
            time.sleep(_POLL_S)
        return value


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


def _free_port() -> int:
    """A free port below the range of outgoing connections. slurmctld binds every address; the machine may have its own Slurm."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError("no port is free for slurmctld")


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "slurm"  # the process has ended
