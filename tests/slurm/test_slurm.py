"""Runs as jobs of a real Slurm: templates, requeue, failing nodes, scancel, GPUs."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from slurm_cluster import GPU_NODES, SlurmCluster

from asyncrl.cli import main as cli
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import run_directory
from asyncrl.launch.slurm import job_state, read_job
from asyncrl.testing.runs import RunHandle, train_steps
from asyncrl.weights.checkpoints import list_checkpoints
from asyncrl.weights.lineage import audit
from tests import pages

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "launcher" / "slurm"
LIMIT_S = 300.0
QUICK = [
    "checkpoint.every_steps=2",
    "checkpoint.every_s=0",
    "network.host_lost_after_s=6",
    "runtime.start_timeout_s=200",
]

PAGE = pages.ROOT / "docs" / "slurm.md"

pytestmark = pytest.mark.timeout(900)


class Job:
    """A job and the folder of its run."""

    def __init__(self, cluster: SlurmCluster, job_id: str, run_dir: Path, output: Callable[[], str]) -> None:
        self.cluster, self.job_id, self.run_dir, self.output = cluster, job_id, run_dir, output

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for the condition. Fail at once if the job has ended."""

        def ended_or_true() -> bool:
            if condition():
                return True
            state = job_state(self.job_id)
            assert not state.ended, f"{state} before {what}\n{self.told()}"
            return False

        self.cluster.wait_until(ended_or_true, what, LIMIT_S, self.told)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: self.last_step() >= step, f"train step {step}")

    def last_step(self) -> int:
        return max((record["step"] for record in train_steps(self.run_dir)), default=0)

    def told(self) -> str:
        logs = "\n".join(
            f"-- {log.name}\n{log.read_text(errors='replace')[-1500:]}"
            for log in sorted((self.run_dir / "logs" / "latest").glob("*.log"))
        )
        return f"the job printed:\n{self.output()}\n{logs}"

    def devices(self) -> dict[str, tuple[str, str]]:
        """Node and CUDA_VISIBLE_DEVICES of each worker process. The run must not use a fork server: /proc does not show the
        environment that a forked worker sets."""
        found = {}
        for node in self.cluster.nodes:
            for pid in self.cluster.pids(node):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if worker := worker_of(pid):
                        found[worker] = (node, psutil.Process(pid).environ().get("CUDA_VISIBLE_DEVICES", "not set"))
        return found

    def workers_on(self) -> dict[str, str]:
        """Node of each worker process."""
        return {
            worker: node for node in self.cluster.nodes for pid in self.cluster.pids(node) if (worker := worker_of(pid))
        }


def worker_of(pid: int) -> str:
    """The worker's name, such as master/0, from its config file configs/attempt_1/master_0.yaml. "" for any other process."""
    try:
        words = map(Path, psutil.Process(pid).cmdline())
    except psutil.NoSuchProcess:
        return ""
    for word in words:
        kind, _, index = word.stem.rpartition("_")
        if word.suffix == ".yaml" and index.isdigit():
            return f"{kind}/{index}"
    return ""


def submit(cluster: SlurmCluster, config: Path, *overrides: str) -> Job:
    """Submit a job as a user does on the login node."""
    words = [str(config), "cluster=slurm", "slurm.time_s=1800", *QUICK, *overrides]
    assert cli.main(["run", *words, "--detach"]) == 0
    run_dir = run_directory(load_experiment(words[0], words[1:]))
    return job_of(cluster, run_dir)


def job_of(cluster: SlurmCluster, run_dir: Path) -> Job:
    record = read_job(run_dir)
    assert record is not None
    output = Path(record.output)
    return Job(cluster, record.job_id, run_dir, lambda: output.read_text() if output.exists() else "")


# --------------------------------------------------------------------------------------------------------------- templates


def test_the_template_runs_the_quickstart(cluster: SlurmCluster, tiny: Path, tmp_path: Path) -> None:
    """The page's command runs the unchanged template of launcher/slurm: two nodes with GPUs, a small model, a few steps."""
    (tmp_path / "launcher").symlink_to(ROOT / "launcher")
    (tmp_path / "configs").mkdir()
    pages.write_config(
        tmp_path / "configs" / "quickstart_cpu.yaml",
        ROOT / "configs" / "quickstart_cpu.yaml",
        f"model_path={tiny.parent}/model",
        f"prompts.path={tiny.parent}/prompts.jsonl",
        f"rollout.tasks.default.reward={ROOT}/examples/sloppy_sorter/reward.py:reward",
        *("eval.prompts=null", "train.max_steps=3", "train.batch_size=8", "runtime.fork_server=false", *QUICK),
    )
    said = cluster.run("env", "SBATCH_GRES=gpu:2", *pages.as_written(pages.line_of(PAGE, "sbatch"), tmp_path))
    job_id = said.removeprefix("Submitted batch job ").strip()
    run_dir, output = tmp_path / "runs" / "sloppy-sorter" / "b", tmp_path / f"slurm-{job_id}.out"
    job = Job(cluster, job_id, run_dir, lambda: output.read_text() if output.exists() else "")
    # two servers and two trainers: each has a GPU of its own and sees only that one
    computing = ("generation_server/0", "generation_server/1", "model_worker/0", "model_worker/1")
    devices: dict[str, tuple[str, str]] = {}

    def all_seen() -> bool:
        devices.update(job.devices())
        return {*computing, "master/0"} <= devices.keys()

    job.wait_until(all_seen, "all processes")
    assert {devices[name] for name in computing} == {(node, str(gpu)) for node in GPU_NODES for gpu in range(2)}
    assert devices["master/0"] == (GPU_NODES[0], "")

    cluster.wait_until(lambda: job_state(job.job_id).ended, "the job's end", LIMIT_S, job.told)
    assert job_state(job.job_id).state == "COMPLETED", job.told()
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 3
    assert audit(run_dir).complete
    cluster.wait_until(lambda: not cluster.programs(), "an empty cluster", 30)


@pytest.mark.release
def test_a_heterogeneous_job_has_rollout_workers_on_cpu_nodes_and_scancel_leaves_nothing(
    cluster: SlurmCluster, tiny: Path, tmp_path: Path
) -> None:
    job = submit(
        cluster,
        tiny,
        *(f"fileroot={tmp_path}", "train.max_steps=0", "rollout.num_workers=2"),
        *("slurm.partition=gpu", "slurm.gpus_per_node=2", "slurm.cpu_nodes=2", "slurm.cpu_partition=cpu"),
    )
    job.wait_for_step(1)
    where = job.workers_on()
    assert len(where) == 6, where
    assert {where["rollout_worker/0"], where["rollout_worker/1"]} == {"n2", "n3"}
    assert {where["generation_server/0"], where["model_worker/0"], where["master/0"]} <= set(GPU_NODES)
    cluster.run("scancel", job.job_id)
    cluster.wait_until(lambda: job_state(job.job_id).ended, "the job's end", 60, job.told)
    cluster.wait_until(lambda: not cluster.programs(), "an empty cluster", 30, lambda: str(cluster.programs()))
    assert job_state(job.job_id).state == "CANCELLED"


# -------------------------------------------------------------------------------------------------------- a job's whole life


def test_the_pages_commands_are_a_job_that_is_queued_again_loses_a_node_and_goes_on_in_another(
    cluster: SlurmCluster,
    tiny: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page's commands run unchanged. my_run.yaml is a small run."""
    small = ("train.max_steps=0", "train.num_epochs=10", "slurm.partition=all", *QUICK)
    pages.write_config(tmp_path / "my_run.yaml", tiny, "experiment=mine", *small, leave_out=("fileroot",))
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "mine" / "t0"
    with RunHandle(typed("asyncrl-launch run"), run_dir) as terminal:
        terminal.wait_until(lambda: read_job(run_dir), "the job", LIMIT_S)
        job = job_of(cluster, run_dir)
        victim = live_through_a_job(cluster, job, capsys)

        # runs on the login node
        answer("asyncrl-launch stop")
        assert job_state(job.job_id).ended
        assert terminal.wait(60) == 128 + signal.SIGTERM
        assert "the job is queued again" in terminal.output()
        assert "told to stop" in terminal.output()
    step = job.last_step()
    assert list_checkpoints(run_dir)[-1][1] == step
    cluster.wait_until(lambda: not cluster.programs(), "an empty cluster", 30, job.told)
    assert audit(run_dir).problems == []

    with RunHandle(typed("asyncrl-launch resume"), run_dir) as terminal:
        terminal.wait_until(lambda: job_of(cluster, run_dir).job_id != job.job_id, "another job", LIMIT_S)
        job = job_of(cluster, run_dir)
        job.wait_for_step(step + 1)
        terminal.wait_for_output(f"going on from step {step}", 30)
        cluster.run("scancel", job.job_id)
        cluster.wait_until(lambda: job_state(job.job_id).state == "CANCELLED", "the job's end", 60, job.told)
        cluster.wait_until(lambda: not cluster.programs(), "an empty cluster", 30, lambda: str(cluster.programs()))
    cluster.give_power(victim)


def typed(start: str) -> list[str]:
    """Return the command that runs the page's line that begins with `start` in the current folder."""
    return pages.as_written(pages.line_of(PAGE, start), Path.cwd())


def start_soon(cluster: SlurmCluster, job: Job) -> None:
    """Slurm would start a requeued job after two minutes. Shorten this to two seconds. An immediate start fails: nodes refuse a job
    in the second in which they ended it ("Job credential revoked")."""
    cluster.run("scontrol", "update", f"JobId={job.job_id}", "StartTime=now+2")


def answer(start: str) -> str:
    """Run the page's command that begins with `start`, assert that it succeeds, and return its output."""
    done = subprocess.run(typed(start), capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def live_through_a_job(cluster: SlurmCluster, job: Job, capsys: pytest.CaptureFixture[str]) -> str:
    """Inspect and scale the job, have Slurm requeue it, then let one of its nodes fail. Return that node."""
    run_dir = job.run_dir
    job.wait_for_step(2)

    # a second launch does not disturb the run; status, logs and scale work from the login node
    assert cli.main(["run", "my_run.yaml", "cluster=slurm"]) == 1
    assert f"job {job.job_id} is RUNNING and uses" in capsys.readouterr().out.replace("\n", "")
    table = answer("asyncrl-launch status")
    assert all(worker in table for worker in job.workers_on())
    assert cli.main(["status", str(run_dir), "--json"]) == 0
    seen = {worker["worker"]: worker["host"] for worker in json.loads(capsys.readouterr().out)["workers"]}
    assert seen == job.workers_on()
    assert len(set(seen.values())) > 1
    assert cli.main(["logs", str(run_dir), "--json"]) == 0
    assert {"master/0", "rollout_worker/0"} <= {
        entry.get("worker") for entry in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert cli.main(["scale", str(run_dir), "generation=2"]) == 0
    job.wait_until(lambda: "generation_server/1" in job.workers_on(), "another server")

    # the signal that Slurm sends to the batch script before the job's time limit
    cluster.run("scancel", "--batch", "--signal=USR1", job.job_id)
    job.wait_until(lambda: cluster.job(job.job_id)["Restarts"] == "1", "the job being queued again")
    cluster.wait_until(lambda: not cluster.programs(), "an empty cluster", 30, job.told)
    step = list_checkpoints(run_dir)[-1][1]
    assert step == job.last_step()
    assert f"checkpoint of step {step} is the newest" in job.output().replace("\n", "")
    start_soon(cluster, job)
    job.wait_for_step(step + 2)
    assert f"going on from step {step} of attempt 1" in job.output().replace("\n", "")

    # a node other than the launcher's fails
    where = job.workers_on()
    victim = next(node for name, node in sorted(where.items()) if node != where["master/0"] and "rollout" not in name)
    lost = {name for name, node in where.items() if node == victim}
    cluster.cut_power(victim)
    job.wait_until(lambda: f"host {victim} is lost" in job.output().replace("\n", ""), "the loss of a node")
    job.wait_until(lambda: lost <= job.workers_on().keys(), f"{lost} elsewhere")
    job.wait_for_step(job.last_step() + 3)
    assert victim not in job.workers_on().values()
    return victim


@pytest.mark.release
@pytest.mark.parametrize("whole", [True, False])
def test_the_launchers_own_node_is_given_up(cluster: SlurmCluster, tiny: Path, tmp_path: Path, whole: bool) -> None:
    """The job goes on with the remaining nodes. whole: the whole node fails, and host daemons requeue the job. Otherwise only
    Slurm's daemon is killed: the run's launcher goes on out of Slurm's sight, and gives way to a new launcher."""
    nodes = ["slurm.nodes=2", "slurm.partition=all"]
    job = submit(
        cluster,
        tiny,
        f"fileroot={tmp_path}",
        "train.max_steps=0",
        "train.num_epochs=10",
        "network.cut_off_limit_s=10",
        *nodes,
    )
    job.wait_for_step(4)
    victim = job.workers_on()["master/0"]
    if whole:
        cluster.cut_power(victim)
    else:
        cluster.kill_slurmd(victim)
        job.wait_until(lambda: "DOWN" in cluster.node_states()[victim], "Slurm's giving up the node")
        job.wait_for_step(job.last_step() + 2)  # losing slurmd does not disturb the run (--no-kill); a user requeues it
        cluster.run("scontrol", "requeue", job.job_id)
    job.wait_until(lambda: cluster.job(job.job_id)["Restarts"] == "1", "the job being queued again")
    job.wait_until(lambda: cluster.job_state(job.job_id) == "PENDING", "its old processes being gone, for Slurm")
    start_soon(cluster, job)
    job.wait_until(lambda: "going on from step" in job.output(), "the second launcher")
    step = job.last_step()
    job.wait_for_step(step + 4)
    where = job.workers_on()
    assert where["master/0"] != victim
    if not whole:
        assert "another launcher was started to replace this one" in job.output().replace("\n", " ")
        cluster.wait_until(lambda: victim not in job.workers_on().values(), "the old processes being gone", 30)
    assert cli.main(["stop", str(job.run_dir), "--now"]) == 0
    assert audit(job.run_dir).problems == []
    if whole:
        cluster.give_power(victim)
    else:
        cluster.start_node(victim)


# ---------------------------------------------------------------------------------------------------------- shared devices


@pytest.mark.release
def test_devices_are_shared_on_each_node(cluster: SlurmCluster, tiny: Path) -> None:
    job = submit(
        cluster,
        tiny,
        "trial=shared",
        "allocation=transformers.d2@0-1+d2@0-1",
        "slurm.nodes=2",
        "slurm.gpus_per_node=1",
        "runtime.fork_server=false",
        "manager.max_head_offpolicyness=2",
        "train.max_steps=4",
    )
    computing = ("generation_server/0", "generation_server/1", "model_worker/0", "model_worker/1")
    devices: dict[str, tuple[str, str]] = {}

    def all_seen() -> bool:
        devices.update(job.devices())
        return devices.keys() >= {*computing}

    job.wait_until(all_seen, "all processes")
    for index, node in enumerate(GPU_NODES):
        assert devices[f"generation_server/{index}"] == devices[f"model_worker/{index}"] == (node, "0")
    cluster.wait_until(lambda: job_state(job.job_id).ended, "the job's end", LIMIT_S, job.told)
    assert job_state(job.job_id).state == "COMPLETED", job.told()
    assert audit(job.run_dir).problems == []
    steps = train_steps(job.run_dir)
    assert len(steps) == 4
    assert max(step["offpolicy/head_max"] for step in steps) <= 2
    log = (job.run_dir / "logs" / "attempt_1" / "gserver_manager_0.log").read_text()
    assert all(f"generation_server/{index} sleeps" in log for index in (0, 1))
