"""Environment variables that break a run are named before anything starts, with value and remedy."""

import pytest

from asyncrl.config.schema import ConfigError
from asyncrl.launch.checks.environment import judge_environment
from asyncrl.launch.experiment import load_experiment
from asyncrl.runtime.interfaces import (
    GLOO,
    NCCL,
    derived_interfaces,
    interface_of,
    interfaces_here,
    wrong_interface,
)

HERE = ["lo", "eth0", "eth1", "docker0"]


@pytest.fixture
def judge(tmp_path):
    def found(allocation, *, on_gpu=False, overrides=(), **variables):
        file = tmp_path / "run.yaml"
        file.write_text("model_path: m\nprompts: {path: p.jsonl}\nrollout: {tasks: {default: {reward: r.py:r}}}\n")
        config = load_experiment(file, [f"allocation={allocation}", *overrides])
        return list(judge_environment(config, variables, HERE, on_gpu=on_gpu))

    return found


@pytest.mark.parametrize(
    ("variable", "value", "missing"),
    [
        (GLOO, "", None),
        (GLOO, "x", None),  # torch ignores a value of one character
        (GLOO, "eth0", None),
        (GLOO, "eth0,lo", None),
        (GLOO, "ib0", "'ib0'"),
        (GLOO, "eth0,ib0,ib1", "'ib0', 'ib1'"),
        (GLOO, "eth", "'eth'"),
        (GLOO, "=eth0", "'=eth0'"),
        (GLOO, "eth0, lo", "' lo'"),
        (NCCL, "eth", None),
        (NCCL, "=eth0", None),
        (NCCL, "=eth", "'=eth'"),
        (NCCL, "ib,eth1", None),
        (NCCL, "ib0:2,eth0:1", None),
        (NCCL, "^docker,lo", None),
        (NCCL, "^=eth0", None),
        (NCCL, "^lo,eth,docker", "'^lo,eth,docker'"),
        (NCCL, "ib0", "'ib0'"),
    ],
)
def test_a_variable_that_names_no_interface_of_this_machine(variable, value, missing):
    told = wrong_interface(variable, {variable: value}, HERE)
    if missing is None:
        assert told == ""
    else:
        assert told == (
            f"{variable}={value}: this machine has no interface {missing} with an IP address; it has lo, eth0, eth1, docker0. "
            f"Set {variable} to one of them, or unset it"
        )


def test_the_interfaces_of_this_machine():
    assert "lo" in interfaces_here()
    assert interface_of("127.0.0.1") == "lo"


def test_gloo_and_nccl_use_the_interface_of_the_hosts_address():
    local = "127.0.0.1"
    assert derived_interfaces(local, {}, on_gpu=False) == {GLOO: "lo"}
    assert derived_interfaces(local, {}, on_gpu=True) == {GLOO: "lo", NCCL: "=lo"}
    assert derived_interfaces(local, {GLOO: "eth0", NCCL: "ib"}, on_gpu=True) == {}  # the user's
    assert derived_interfaces("192.0.2.1", {}, on_gpu=True) == {}  # no interface has it
    for variable, value in derived_interfaces(local, {}, on_gpu=True).items():
        assert wrong_interface(variable, {variable: value}, interfaces_here()) == ""
    assert interface_of("203.0.113.77") == ""


def test_a_run_is_refused_only_if_it_uses_the_interface(judge):
    (found,) = judge("transformers.d1+d2", GLOO_SOCKET_IFNAME="ib0")
    assert isinstance(found, ConfigError)
    assert str(found).startswith("GLOO_SOCKET_IFNAME=ib0: this machine has no interface 'ib0'")
    (found,) = judge("sglang.d1+d1", GLOO_SOCKET_IFNAME="ib0")  # SGLang forms a group even for itself
    assert isinstance(found, ConfigError)
    (found,) = judge("transformers.d1+d1", GLOO_SOCKET_IFNAME="ib0")
    assert (found.state, found.value.endswith("; this config does not use it")) == ("warn", True)
    (found,) = judge("transformers.d1+d2", NCCL_SOCKET_IFNAME="ib0")
    assert found.state == "warn"
    (found,) = judge("transformers.d1+d2", NCCL_SOCKET_IFNAME="ib0", on_gpu=True)
    assert isinstance(found, ConfigError)
    (found,) = judge("transformers.d1+d2", TP_SOCKET_IFNAME="ib0", on_gpu=True)
    assert found.state == "warn"
    assert judge("transformers.d1+d2", GLOO_SOCKET_IFNAME="eth0", NCCL_SOCKET_IFNAME="^lo", on_gpu=True) == []


def test_the_interfaces_of_other_machines_are_not_judged_here(judge):
    """The machine that submits a job lacks the network of its nodes. Each worker looks for itself."""
    slurm = ["cluster=slurm", "slurm.time_s=60"]
    (found,) = judge("transformers.d1+d2", overrides=slurm, GLOO_SOCKET_IFNAME="ib0")
    assert (found.state, found.value.endswith("the processes on this machine cannot use it")) == ("warn", True)


def test_values_that_torch_and_transformers_refuse_are_named(judge):
    for name, value in (("PYTHONOPTIMIZE", "2"), ("TORCH_DISTRIBUTED_DEBUG", "verbose")):
        (found,) = judge("transformers.d1+d1", **{name: value})
        assert isinstance(found, ConfigError)
        assert str(found).startswith(f"{name}={value}: ")
    assert judge("transformers.d1+d1", PYTHONOPTIMIZE="1", TORCH_DISTRIBUTED_DEBUG="detail") == []


def test_what_a_run_does_not_read_is_not_judged(judge):
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    assert judge("transformers.d1+d2", **torchrun, OMP_NUM_THREADS="0", http_proxy="http://10.0.0.1:1") == []
