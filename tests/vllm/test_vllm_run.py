"""Whole runs with vLLM: agents, deltas written in full, a server that is killed, and a device shared with the trainer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from asyncrl.testing.runs import RunHandle, assert_nothing_left, launch, make_tiny_run, processes_of, train_steps
from asyncrl.weights.adapter import ADAPTER
from asyncrl.weights.lineage import audit
from asyncrl.weights.versions import list_versions, read_manifest, role_dir
from tests.support.in_update import die_in_update, has_struck, largest_logprob_error
from tests.support.real_servers import START_LIMIT_S
from tests.support.weight_store import WeightStore

pytestmark = [pytest.mark.timeout(900), pytest.mark.release]


@contextmanager
def running(
    store: WeightStore,
    python: str,
    folder: Path,
    allocation: str,
    *overrides: str,
    env: dict[str, str] | None = None,
) -> Iterator[RunHandle]:
    with launch(
        make_tiny_run(folder / "tiny", num_prompts=4000),
        f"allocation={allocation}",
        f"generation.python={python}",
        f"model_path={store.model_path}",
        f"generation.load_timeout_s={START_LIMIT_S}",
        f"runtime.start_timeout_s={START_LIMIT_S}",
        "record.trajectories=true",
        "weights.verify_logprobs=true",
        "weights.keep=1000",
        *overrides,
        env=env,
    ) as run:
        yield run


def test_every_trained_token_is_of_the_version_that_it_names(
    vllm_store: WeightStore, vllm_python: str, tmp_path: Path
) -> None:
    with running(vllm_store, vllm_python, tmp_path, "vllm.d1+d1", "train.max_steps=4") as run:
        assert run.wait(2 * START_LIMIT_S) == 0, run.output()
        assert len(train_steps(run.run_dir)) == 4
        assert largest_logprob_error(run.run_dir) < 1e-4
        assert audit(run.run_dir).problems == []
        assert_nothing_left(run.run_dir)


@pytest.mark.parametrize("mode", ["abort", "finish"])
def test_every_trained_token_is_of_the_adapter_that_it_names(
    vllm_store: WeightStore, vllm_python: str, tmp_path: Path, mode: str
) -> None:
    """peft computes the logprobs again, with each version's adapter on the base."""
    with running(
        vllm_store,
        vllm_python,
        tmp_path,
        "vllm.d1+d1",
        "train.lora.rank=4",
        "train.optimizer.lr=0.02",
        "manager.max_head_offpolicyness=2",
        f"generation.interrupt={mode}",
        "train.max_steps=8",
    ) as run:
        assert run.wait(2 * START_LIMIT_S) == 0, run.output()
        directory = role_dir(run.run_dir, "actor")
        assert {read_manifest(directory / str(version)).kind for version in list_versions(directory)} == {ADAPTER}
        assert max(step["offpolicy/head_max"] for step in train_steps(run.run_dir)) > 0
        assert largest_logprob_error(run.run_dir) < 1e-4
        assert audit(run.run_dir).problems == []
        assert_nothing_left(run.run_dir)


def test_deltas_are_written_in_full(vllm_store: WeightStore, vllm_python: str, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    with running(
        vllm_store,
        vllm_python,
        tmp_path,
        "vllm.d1+d1",
        "train.max_steps=4",
        "manager.max_head_offpolicyness=0",
        "train.dtype=bfloat16",
        "generation.dtype=bfloat16",
        "train.optimizer.lr=3e-6",
        "weights.full_every=3",
        f"weights.fetch_dir={memory}",
    ) as run:
        assert run.wait(2 * START_LIMIT_S) == 0, run.output()
        directory = role_dir(run.run_dir, "actor")
        kinds = [read_manifest(directory / str(version)).kind for version in list_versions(directory)]
        assert kinds == ["full", "delta", "delta", "full", "delta"]
        assert not list(memory.rglob("*.safetensors"))
        assert_nothing_left(run.run_dir)


def test_a_run_outlives_vllm_killed_and_its_server_killed_in_an_update(
    vllm_store: WeightStore, vllm_python: str, tmp_path: Path
) -> None:
    """vLLM starts again with the newest weights, and none outlives the server that owns it."""
    fault = tmp_path / "fault"
    with running(
        vllm_store,
        vllm_python,
        tmp_path,
        "vllm.d1+d1",
        "train.max_steps=14",
        env=die_in_update(fault, server=0, version=8),
    ) as run:

        def servers() -> list[psutil.Process]:
            return [one for one in processes_of(run.run_dir) if "vllm.entrypoints.cli.main" in one.cmdline()]

        run.wait_for_step(3, 2 * START_LIMIT_S)
        servers()[0].send_signal(signal.SIGKILL)
        run.wait_until(lambda: has_struck(fault), "an update to version 8 had begun", START_LIMIT_S)
        run.wait_for_step(12, 2 * START_LIMIT_S)
        assert len(servers()) == 1
        assert run.wait(START_LIMIT_S) == 0, run.output()
        assert len(train_steps(run.run_dir)) == 14
        assert largest_logprob_error(run.run_dir) < 1e-4
        assert audit(run.run_dir).problems == []
        assert_nothing_left(run.run_dir)


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_server_that_shares_a_device_is_stopped_for_each_turn(
    vllm_store: WeightStore, vllm_python: str, tmp_path: Path, mode: str
) -> None:
    with running(
        vllm_store,
        vllm_python,
        tmp_path,
        "vllm.d1@0+d1@0",
        "train.max_steps=2",
        "manager.max_head_offpolicyness=0",
        f"generation.interrupt={mode}",
    ) as run:
        assert run.wait(3 * START_LIMIT_S) == 0, run.output()
        told = (run.run_dir / "logs" / "attempt_1" / "generation_server_0.log").read_text()
        assert told.count("this vLLM server cannot release its memory: it is stopped") == 2
        assert [step["offpolicy/head_max"] for step in train_steps(run.run_dir)] == [0.0] * 2
        assert_nothing_left(run.run_dir)
