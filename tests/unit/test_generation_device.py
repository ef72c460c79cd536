"""The device of a generation engine, with the GPUs that torch reports patched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.config.processes import GenerationServerConfig, WorkerInfo
from asyncrl.config.schema import ConfigError, GenerationConfig, NameResolveConfig, RuntimeConfig
from asyncrl.generation.engine import EngineArguments
from asyncrl.generation.engines import engines_of
from asyncrl.generation.sglang_process import own_server
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.runtime.clock import SYSTEM_CLOCK
from asyncrl.runtime.trace import OFF
from asyncrl.testing.tiny import make_tiny_model


def info(gpus: list[str]) -> WorkerInfo:
    names = NameResolveConfig(endpoints=["memory://"])
    return WorkerInfo("generation_server", 0, 1, "e", "t", 1, "", 1, names, RuntimeConfig(), gpus=gpus)


def test_generation_engines_with_a_gpu_do_not_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_model(tmp_path)
    path = str(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    server = GenerationServerConfig(info(["0"]), "transformers", path, path, GenerationConfig(), 0)
    with pytest.raises(ConfigError, match="cannot use the GPUs 0"):
        engines_of(server, OFF, SYSTEM_CLOCK)._make(EngineArguments(path, GenerationConfig()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for gpus, on_cpu in (([], True), (["0"], False)):
        sglang = own_server(GenerationConfig(), path, tensor=1, seed=1, log=tmp_path / "log", gpus=gpus)
        assert ("cpu" in sglang._arguments(1)) == on_cpu


def test_the_embedded_engines_device_has_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process can join an update group on a device without one: torch.cuda.set_device refuses it."""
    make_tiny_model(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    arguments = EngineArguments(str(tmp_path), GenerationConfig())
    assert TransformersEngine(arguments).weights_device == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="no index"):
        TransformersEngine(arguments, device="cuda")
