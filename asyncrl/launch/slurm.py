"""Runs as Slurm jobs: the batch script, and the state of a job in Slurm.

    login node   asyncrl-launch run CONFIG cluster=slurm    writes <run>/slurm/job.sbatch, submits it, follows its output
    first node   the batch script: one srun task per node, each a host daemon; and the launcher, with hosts=[the job's nodes]

Before the time limit the script receives SIGUSR1 (--signal). With PreemptParameters=send_user_signal it also receives SIGUSR1
before a preemption. The script then tells the launcher to stop, the launcher writes a checkpoint, and the script requeues the job,
which resumes from that checkpoint. scancel, or a preemption without that parameter, leaves no time for a checkpoint, because Slurm
signals all processes at once. The launcher handles the loss of another node (--no-kill). If its own node fails, the remaining host
daemons requeue the job.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asyncrl.config.schema import ConfigError, ExperimentConfig, SlurmConfig
from asyncrl.launch.rundir import LaunchError, is_folder
from asyncrl.protocol.errors import DECODE_ERRORS
from asyncrl.runtime.disk import write_file

_COMMAND_LIMIT_S = 60.0  # a busy slurmctld may take that long
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "SPECIAL_EXIT", "TIMEOUT",
}  # fmt: skip
_NO_SUCH_JOB = "Invalid job id"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """<run>/slurm/job.json: the newest job of a run."""

    job_id: str
    script: str
    output: str


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a job, as Slurm reports it."""

    state: str  # Slurm's: PENDING, RUNNING, ...; or GONE: Slurm no longer knows the job
    reason: str = ""  # why it is pending, or how it ended
    exit_code: int | None = None  # None: it has not ended

    @property
    def ended(self) -> bool:
        return self.state in _ENDED or self.state == "GONE"


def own_start() -> str:
    """Return `job.restarts`: the job of this process, and how often Slurm has started the job again; "": no job. The number matters
    because a requeued job may run beside processes of its earlier start, on a node that Slurm has lost contact with."""
    job = os.environ.get("SLURM_HET_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    return f"{job}.{os.environ.get('SLURM_RESTART_COUNT') or 0}" if job else ""


def slurm_dir(run_dir: Path) -> Path:
    return run_dir / "slurm"


# ------------------------------------------------------------------------------------------------------------- the script


def render(
    config: ExperimentConfig,
    words: Sequence[str],
    *,
    folder: str,
    program: str,
    output: str = "",
    title: Sequence[str] = (),
) -> str:
    """Return the batch script of a run. Arguments that follow the script on the command line of sbatch are further overrides.

    words: the arguments of `asyncrl-launch run`: a config and overrides. folder: the job's working folder, quoted for the shell.
    program: the command of asyncrl-launch on the nodes. output: file for the job's output (%j: its number). title: comments at the
    top.
    """
    slurm = config.slurm
    name = f"{config.experiment}-{config.trial}"
    nodes, groups = '"$SLURM_JOB_NODELIST"', ""
    if slurm.cpu_nodes:
        nodes = '"$SLURM_JOB_NODELIST_HET_GROUP_0,$SLURM_JOB_NODELIST_HET_GROUP_1"'
        groups = "--het-group=0,1"
    srun = ["srun", groups, "--ntasks-per-node=1", "--kill-on-bad-exit=0", "--no-kill", *slurm.srun_options]
    values = {
        "HEADER": "\n".join(_header(slurm, name, output)),
        "TITLE": "\n".join(f"# {line}" for line in title),
        "FOLDER": folder,
        "PRELUDE": slurm.prelude.strip(),
        "WORDS": shlex.join(words),
        "NODES": nodes,
        "LAUNCH": f"{slurm.wrapper} {program}".strip(),
        "SRUN": " ".join(filter(None, srun)),
    }
    lines = []
    for line in _SCRIPT.splitlines():
        whole = line.strip("@")
        if whole in values and line == f"@{whole}@" and not values[whole]:
            continue
        for key, value in values.items():
            line = line.replace(f"@{key}@", value)
        lines.append(line)
    return "\n".join(lines) + "\n"


def _header(slurm: SlurmConfig, name: str, output: str) -> list[str]:
    """Return the #SBATCH lines; for a heterogeneous job, those of both parts."""
    lines = [
        f"--job-name={shlex.quote(name)}",
        f"--output={output}" if output else "",
        "--open-mode=append",
        f"--time={_clock(slurm.time_s)}" if slurm.time_s else "",
        f"--account={slurm.account}" if slurm.account else "",
        f"--qos={slurm.qos}" if slurm.qos else "",
        f"--signal=B:USR1@{slurm.signal_s:.0f}",
        "--requeue",
        *_part(slurm.nodes, slurm.partition, slurm.gpus_per_node, slurm.cpus_per_node, slurm.memory_per_node),
        *slurm.options,
    ]
    if slurm.cpu_nodes:
        cores, memory = slurm.cpu_cpus_per_node, slurm.cpu_memory_per_node
        lines += ["hetjob", *_part(slurm.cpu_nodes, slurm.cpu_partition, 0, cores, memory), *slurm.cpu_options]
    return [f"#SBATCH {line}" for line in lines if line]


def _clock(seconds: float) -> str:
    """Format a time for sbatch, rounded up to whole minutes, which are sbatch's unit."""
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours}:{minutes:02d}:00"


def _part(nodes: int, partition: str, gpus: int, cores: int, memory: str) -> list[str]:
    return [
        f"--partition={partition}" if partition else "",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cores}" if cores else "--exclusive",
        f"--mem={memory}" if memory else ("" if cores else "--mem=0"),
        f"--gres=gpu:{gpus}" if gpus else "",
        "--no-kill",
    ]


_SCRIPT = """\
#!/bin/bash
@TITLE@
@HEADER@

# srun runs a host daemon on each node, which starts the processes of that node. The launcher runs here, on the first node.
# On any machine with the run's folder: asyncrl-launch status|logs|scale|stop RUN
cd @FOLDER@ || exit 1
@PRELUDE@

run=(@WORDS@ "$@" cluster=slurm)
nodes=$(scontrol show hostnames @NODES@ | paste -sd,)
run+=("hosts=[$nodes]")
# If the job was requeued after a signal or a failed node, resume from the newest checkpoint, if there is one.
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || run+=(recover=auto)

unset CUDA_VISIBLE_DEVICES # this node's value; srun sets it on each node
# If this node fails, with the launcher and this script, a host daemon that finds no launcher (exit code 1) requeues the job
# after 30 s. If this script is alive, it ends the job before that.
export job=${SLURM_HET_JOB_ID:-$SLURM_JOB_ID}
@SRUN@ \\
    bash -c '"$@"; code=$?; [ $code != 1 ] || { sleep 30; scontrol requeue "$job"; }; exit $code' host-daemon \\
    @LAUNCH@ host "${run[@]}" &
@LAUNCH@ run "${run[@]}" &
launcher=$!

# USR1: the time limit is near (--signal). The launcher writes a checkpoint and ends; then this script requeues the job.
again=
trap 'again=yes; kill -TERM $launcher 2>/dev/null' USR1
trap 'kill -TERM $launcher 2>/dev/null' TERM
while kill -0 $launcher 2>/dev/null; do wait $launcher; done # signals interrupt the wait
wait $launcher
code=$?
if [ -n "$again" ] && [ $code -gt 128 ]; then
    echo "the job is queued again and resumes from its newest checkpoint"
    scontrol requeue "$job" && sleep 60 # until Slurm ends this job
fi
exit $code
"""


# -------------------------------------------------------------------------------------------------------------- with Slurm


def submit(script: Path) -> str:
    """Submit a script. Returns the job's number. Raises LaunchError with the error of sbatch."""
    said = _slurm("sbatch", "--parsable", str(script)).strip()
    return said.splitlines()[-1].partition(";")[0]


def write_job(run_dir: Path, record: JobRecord) -> None:
    write_file(slurm_dir(run_dir) / "job.json", msgspec.json.encode(record))


def read_job(run_dir: Path) -> JobRecord | None:
    """Return the newest job of a run. None if the run was never submitted; the copy of a run has no part in the job of the
    original. Raises LaunchError if the record is damaged."""
    path = slurm_dir(run_dir) / "job.json"
    try:
        record = msgspec.json.decode(path.read_bytes(), type=JobRecord)
        return record if not record.script or is_folder(str(Path(record.script).parent), path.parent) else None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (*DECODE_ERRORS, OSError) as error:
        raise LaunchError(f"{path} cannot be read: {error}; delete it if no job of the run is left") from error


def job_state(job_id: str) -> JobState:
    """Return the state of a job. Raises LaunchError if Slurm does not answer."""
    try:
        text = _slurm("scontrol", "show", "job", "--oneliner", job_id)
    except LaunchError as error:
        if _NO_SUCH_JOB in str(error):
            return JobState(state="GONE")
        raise
    fields = dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0]))  # for a heterogeneous job, those of its first part
    state = fields.get("JobState", "UNKNOWN")
    code, _, number = fields.get("ExitCode", "0:0").partition(":")
    ended = int(code) or (128 + int(number) if number.isdigit() and int(number) else 0)
    return JobState(state=state, reason=fields.get("Reason", ""), exit_code=ended if state in _ENDED else None)


def cancel(job_id: str) -> None:
    """End a job at once, whether it is running or pending."""
    _slurm("scancel", job_id)


def ask_to_stop(job_id: str) -> None:
    """Send SIGTERM to the batch script, which forwards it to the launcher. The launcher writes a checkpoint before it stops."""
    _slurm("scancel", "--batch", "--signal=TERM", job_id)


def _slurm(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise ConfigError(
            f"cluster='slurm': the command {command[0]} does not exist here; use a login node of the cluster, or cluster=hosts"
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise LaunchError(f"{shlex.join(command)}: Slurm did not answer within {_COMMAND_LIMIT_S:g} s") from error
    if done.returncode:
        raise LaunchError(f"{shlex.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
