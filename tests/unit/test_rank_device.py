"""The device of a process: the one that torch reports, patched where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncrl.config.schema import ConfigError
from asyncrl.model.compute import Compute
from asyncrl.model.process_group import choose_device
from asyncrl.model.shards import Holding
from asyncrl.model.tensor_exchange import transport_device
from asyncrl.runtime import rank_device as rank_device_module
from asyncrl.runtime.devices import cores_near
from asyncrl.runtime.rank_device import rank_device, why_unusable
from tests.support.services import make_services


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.device, str]]:
    """torch reports eight GPUs. Returns the devices that became current ones, with the thread of each."""
    current: list[tuple[torch.device, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.append((device, threading.current_thread().name))
    )
    return current


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CUDA build of torch without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_each_process_without_a_launcher_takes_another_gpu(eight_gpus: list[tuple[torch.device, str]]) -> None:
    assert [rank_device(index).index for index in (0, 3, 7, 8)] == [0, 3, 7, 0]
    assert [device.index for device, _ in eight_gpus] == [0, 3, 7, 0]


async def test_the_gpu_of_a_rank_is_the_current_one_of_its_compute_thread(
    eight_gpus: list[tuple[torch.device, str]],
) -> None:
    services = make_services()
    compute = Compute("model_worker/3", services.board, limit_s=60.0)
    try:
        device = await compute(lambda: choose_device(3), "the device")
        thread = await compute(lambda: threading.current_thread().name, "the thread")
    finally:
        compute.close()
    assert device == torch.device("cuda", 3)
    assert eight_gpus == [(device, thread)]


@pytest.mark.parametrize(
    ("cpulist", "cores"),
    [
        ("0-3,8-9\n", {0, 1, 2, 3, 8, 9}),
        ("5\n", {5}),
        ("\n", set()),
        ("all\n", set()),
        (None, set()),
    ],
)
def test_the_cores_near_a_gpu(tmp_path: Path, cpulist: str | None, cores: set[int]) -> None:
    (tmp_path / "0000:17:00.0").mkdir()
    if cpulist is not None:
        (tmp_path / "0000:17:00.0" / "local_cpulist").write_text(cpulist)
    assert cores_near("0000:17:00.0", tmp_path) == cores
    assert cores_near("0000:18:00.0", tmp_path) == set()


@pytest.mark.parametrize(
    ("near", "bound"),
    [({3, 4, 8, 9}, [{3}, {4}]), ({7}, [{2, 3}, {4, 5}]), (set(), [{2, 3}, {4, 5}]), ({2, 3, 9}, [{2, 3}, {4, 5}])],
    ids=["some", "none", "unknown", "all of one thread"],
)
def test_each_thread_keeps_those_of_its_cores_that_are_near(
    eight_gpus: object, monkeypatch: pytest.MonkeyPatch, near: set[int], bound: list[set[int]]
) -> None:
    """The cores of this test are no real ones. A third thread ends meanwhile."""
    threads: dict[int, set[int]] = {11: {2, 3}, 12: {4, 5}}
    asked: list[str] = []
    monkeypatch.setattr(os, "listdir", lambda folder: ["11", "12", "13"] if folder == "/proc/self/task" else [])

    def affinity(thread: int) -> set[int]:
        if thread not in threads:
            raise ProcessLookupError
        return threads[thread]

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    monkeypatch.setattr(os, "sched_setaffinity", threads.__setitem__)
    about = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)

    def cores_of(pci_id: str) -> set[int]:
        asked.append(pci_id)
        return near

    monkeypatch.setattr(rank_device_module, "cores_near", cores_of)
    rank_device(gpus=["0"])
    assert list(threads.values()) == bound
    assert asked == ["0000:9a:01.0"]


def test_the_threads_of_a_process_are_bound() -> None:
    """In a process of its own, because no thread of this one may be bound."""
    program = """
import os, threading
from asyncrl.runtime.devices import bind_threads
done, first = threading.Event(), min(os.sched_getaffinity(0))
thread = threading.Thread(target=done.wait)
thread.start()
bind_threads({first, 100_000})
print([os.sched_getaffinity(each) == {first} for each in (0, thread.native_id)])
done.set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["[True,", "True]"]


def test_transfers_use_the_gpu_of_the_rank_if_all_ranks_have_one() -> None:
    own = torch.device("cuda", 3)
    on, off = Holding(0, {}, on_gpu=True), Holding(0, {}, on_gpu=False)
    assert transport_device([on, on], own) == own
    assert transport_device([on, off], own) == torch.device("cpu")


@pytest.mark.parametrize(
    ("visible", "build", "error", "why"),
    [
        (None, None, None, "it is a build for CPUs; install a CUDA build of torch"),
        ("", "13.0", None, "CUDA_VISIBLE_DEVICES='' names no GPU"),
        ("-1", "13.0", None, "CUDA_VISIBLE_DEVICES='-1' names no GPU"),
        ("0", "13.0", RuntimeError("The NVIDIA driver is too old (found version 12020)."), "too old .* runs CUDA 13.0"),
        ("0", "13.0", None, "it finds none"),
    ],
)
def test_a_process_with_a_gpu_fails_with_the_reason_instead_of_computing_on_the_cpu(
    visible: str | None, build: str | None, error: Exception | None, why: str, cuda_build: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        if error is not None:
            raise error

    cuda_build.setattr(torch.version, "cuda", build)
    cuda_build.setattr(torch.version, "hip", None)
    cuda_build.setattr(torch.cuda, "init", init)
    if visible is not None:
        cuda_build.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ConfigError, match=rf"cannot use the GPUs 0.*{why}.*to run on the CPU"):
        rank_device(gpus=["0"])
    assert rank_device() == torch.device("cpu")
    cuda_build.setenv("ASYNCRL_SIMULATED_GPUS", "1")
    assert rank_device(gpus=["0"]) == torch.device("cpu")
    assert why_unusable(["0"]) == ("", "")
