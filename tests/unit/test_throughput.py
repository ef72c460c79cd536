"""Model FLOPs, MFU and tokens per second of a train step."""

from __future__ import annotations

import pytest

from asyncrl.config.schema import PPOConfig, TrainConfig
from asyncrl.dataflow.graph import build_dataflow
from asyncrl.master.handles import Call
from asyncrl.master.report import throughput_metrics
from asyncrl.master.step_result import StepResult
from asyncrl.runtime.devices import peak_flops, peak_memory_bytes


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148),
        ("NVIDIA GB200", 2500),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("Tesla V100-SXM2-16GB", 0),
    ],
)
def test_peak_flops_by_the_name_of_the_gpu(name: str, teraflops: float) -> None:
    assert peak_flops(name) == teraflops * 1e12


def test_tokens_per_second_and_mfu_of_a_step() -> None:
    metrics = throughput_metrics(
        num_tokens=1000,
        num_generated=600,
        step_s=3.0,
        seconds={"actor_train": 2.0, "critic_train": 1.0},
        peak_s={"actor_train": 0.5},
        train_mfc="actor_train",
        training_devices=4,
        generation_devices=2,
    )
    assert metrics == {
        "mfu/actor_train": 0.25,
        "throughput/train_tokens_per_s": 500.0,
        "throughput/train_tokens_per_s_per_device": 125.0,
        "throughput/generated_tokens_per_s": 200.0,
        "throughput/generated_tokens_per_s_per_device": 100.0,
    }


def test_a_cpu_has_no_mfu_and_a_run_without_servers_no_generation() -> None:
    metrics = throughput_metrics(
        num_tokens=1000,
        num_generated=600,
        step_s=3.0,
        seconds={"actor_train": 2.0},
        peak_s={},
        train_mfc="actor_train",
        training_devices=1,
        generation_devices=0,
    )
    assert metrics == {"throughput/train_tokens_per_s": 500.0, "throughput/train_tokens_per_s_per_device": 500.0}


def test_the_flops_of_all_parts_of_a_batch_count() -> None:
    mfcs = build_dataflow(TrainConfig(ppo=PPOConfig(kl_coef=0.1))).mfcs

    def call(name: str, number: int, seconds: float, peak_s: float | None) -> Call:
        made = Call(mfcs[name], (), frozenset({f"group {number}"}), "step.py:1", number=number)
        made.seconds, made.peak_s = seconds, peak_s
        return made

    step = StepResult()
    step.count([call("actor_train", 1, 2.0, 0.5)])
    step.count([call("actor_train", 2, 1.0, 0.25), call("ref_inf", 3, 1.0, None)])
    assert step.peak_s == {"actor_train": 0.75}
    assert step.seconds == {"actor_train": 3.0, "ref_inf": 1.0}
    assert step.trained == {"group 1", "group 2"}


def test_a_process_without_a_gpu_reports_its_resident_memory() -> None:
    held = bytearray(b"x" * 64_000_000)
    assert peak_memory_bytes() > len(held)
