"""Parts of the vLLM engine that run without vLLM: command line, environment, config checks, pieces."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from asyncrl.cli import doctor
from asyncrl.cli.commands.logs import worker_of
from asyncrl.config.schema import (
    ConfigError,
    ExperimentConfig,
    GenerationConfig,
    LoraConfig,
    PromptSourceConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
    WeightsConfig,
)
from asyncrl.generation.server_client import ServerError
from asyncrl.generation.server_environment import ProgramEnvironment
from asyncrl.generation.vllm import AdapterClient, VLLMClient, _Choice, _piece, server_arguments, server_environment
from asyncrl.launch.experiment import validate
from asyncrl.protocol.generation import SamplingParams
from asyncrl.testing.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


def make_config(allocation: str = "vllm.d1+d1", **changes: Any) -> ExperimentConfig:
    rollout = RolloutConfig(tasks={"default": TaskConfig(reward="reward:reward")})
    config = ExperimentConfig(
        allocation=allocation, model_path="model", prompts=PromptSourceConfig(path="prompts.jsonl"), rollout=rollout
    )
    return replace(config, **changes)


def command(config: GenerationConfig, model_path: Path, *, on_gpu: bool) -> str:
    return " ".join(server_arguments(config, str(model_path), tensor=2, seed=7, on_gpu=on_gpu))


def test_the_command_listens_on_a_socket_and_samples_what_it_reports(model_path: Path) -> None:
    on_gpu = command(GenerationConfig(dtype="bfloat16"), model_path, on_gpu=True)
    assert on_gpu.startswith(f"serve {model_path} --uds http.sock --tensor-parallel-size 2 --dtype bfloat16 --seed 7")
    assert "--logprobs-mode processed_logprobs" in on_gpu
    assert "--max-model-len 513" in on_gpu
    for absent in ("--port", "--host", "--enforce-eager", "--no-enable-prefix-caching", "speculative"):
        assert absent not in on_gpu
    on_cpu = command(GenerationConfig(num_blocks=10, page_size=32, prefix_sharing=False), model_path, on_gpu=False)
    assert "--enforce-eager --num-gpu-blocks-override 4 --max-model-len 320 --no-enable-prefix-caching" in on_cpu
    given = command(GenerationConfig(server_args={"kv-cache-dtype": "fp8"}), model_path, on_gpu=True)
    assert given.endswith("--kv-cache-dtype fp8")


def test_adapters_have_room_and_their_endpoints(model_path: Path) -> None:
    def arguments(lora: LoraConfig | None) -> str:
        return " ".join(server_arguments(GenerationConfig(), str(model_path), tensor=1, seed=1, on_gpu=True, lora=lora))

    assert arguments(LoraConfig(rank=9)).endswith("--enable-lora --max-lora-rank 16 --max-loras 1")
    assert "lora" not in arguments(None)
    kept = server_arguments(
        GenerationConfig(max_running_requests=10),
        str(model_path),
        tensor=1,
        seed=1,
        on_gpu=True,
        lora=LoraConfig(rank=9),
        num_versions=4,
    )
    assert (kept[kept.index("--max-loras") + 1], kept[kept.index("--max-num-seqs") + 1]) == ("5", "16")
    for adapters in (False, True):
        environment = server_environment({}, python="/python", tmp="/t", on_gpu=True, adapters=adapters)
        assert ("VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environment) == adapters


def test_a_request_names_its_adapter_and_never_the_base() -> None:
    client = AdapterClient("unix:/s")
    assert client.wanted(SamplingParams(max_new_tokens=9), [0], "a0001-v00000003")["model"] == "a0001-v00000003"
    with pytest.raises(ServerError, match="no adapter is loaded"):
        client.wanted(SamplingParams(max_new_tokens=9), [0], "")


def test_the_environment_lets_no_request_carry_code() -> None:
    base = {"PYTHONPATH": "/trainer", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "PATH": "/bin"}
    environment = server_environment(base, python="/vllm/bin/python", tmp="/t", on_gpu=False)
    assert not {"PYTHONPATH", "VLLM_ALLOW_INSECURE_SERIALIZATION"} & environment.keys()
    assert (environment["TMPDIR"], environment["VLLM_RPC_BASE_PATH"], environment["CUDA_VISIBLE_DEVICES"]) == (
        "/t",
        "/t",
        "",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allocation": "vllm.d1p2m1+d1"}, "the engine vllm has no pipeline stages"),
        ({"weights": WeightsConfig(transport="broadcast")}, "vLLM's own transfer of weights needs GPUs.*set it to"),
        (
            {"generation": GenerationConfig(server_args={"uds": "/tmp/open"})},
            "generation.server_args.uds='/tmp/open': is set by asyncrl",
        ),
        (
            {"generation": GenerationConfig(server_args={"speculative-config": "{}"})},
            "reports wrong logprobs of sampled tokens that it has guessed",
        ),
        (
            {"generation": GenerationConfig(interrupt="in_place"), "weights": WeightsConfig(verify_logprobs=True)},
            "vLLM scores nothing while it is paused in place",
        ),
    ],
)
def test_settings_that_it_lacks_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(make_config(**changes))


@pytest.mark.parametrize("sampling", [SamplingConfig(top_p=0.9), SamplingConfig(top_k=5)])
def test_filters_are_refused_except_for_greedy_responses(sampling: SamplingConfig) -> None:
    config = make_config()
    with pytest.raises(ConfigError, match=r"rollout\.sampling=.*renormalised among the tokens that a filter keeps"):
        validate(replace(config, rollout=replace(config.rollout, sampling=sampling)))
    validate(replace(config, rollout=replace(config.rollout, sampling=replace(sampling, greedy=True))))
    validate(replace(make_config("sglang.d1+d1"), rollout=replace(config.rollout, sampling=sampling)))


def test_check_compares_its_version() -> None:
    assert doctor.judge_program("vllm", None).state == "fail"
    assert "launcher/setup_vllm.sh" in doctor.judge_program("vllm", None).remedy
    assert doctor.judge_program("vllm", ProgramEnvironment("2.13.0+cpu", version="0.32.0")).state == "ok"
    newer = doctor.judge_program("vllm", ProgramEnvironment("", version="0.33.0"))
    assert (newer.name, newer.state) == ("vLLM", "warn")
    assert worker_of("generation_server_0_vllm") == "generation_server/0/vllm"


def test_a_request_names_its_version_and_all_its_ends() -> None:
    wanted = VLLMClient("unix:/s").wanted(SamplingParams(max_new_tokens=9, temperature=0.5), [0, 7], "a0001-v00000003")
    assert wanted["cache_salt"] == "a0001-v00000003"
    assert wanted["sampling_params"]["stop_token_ids"] == [0, 7]
    assert wanted["sampling_params"]["ignore_eos"]


def test_pieces() -> None:
    def choice(**fields: Any) -> _Choice:
        return msgspec.convert(fields, _Choice)

    rows = {"content": [{"token_id": 5, "logprob": -1.0, "rank": 2, "top_logprobs": []}]}
    piece = _piece(choice(token_ids=[5], logprobs=rows, finish_reason="stop", stop_reason=5), 3)
    assert (piece.output_ids, piece.meta_info.completion_tokens) == ([5], 3)
    assert piece.meta_info.output_token_logprobs == [(-1.0, 5, None)]
    assert piece.meta_info.finish_reason is not None
    assert (piece.meta_info.finish_reason.type, piece.meta_info.finish_reason.matched) == ("stop", 5)
    assert _piece(choice(token_ids=[], finish_reason="abort"), 3).meta_info.finish_reason is not None
    with pytest.raises(ServerError, match="the finish reason 'error'"):
        _piece(choice(finish_reason="error"), 3)


async def test_a_client_follows_a_server_to_its_next_socket(tmp_path: Path) -> None:
    client = VLLMClient("")
    async with contextlib.AsyncExitStack() as stack:
        for version in ("first", "second"):

            async def answer(_: web.Request, version: str = version) -> web.Response:
                return web.json_response({"weight_version": version})

            app = web.Application()
            app.router.add_get("/weight_info", answer)
            runner = web.AppRunner(app)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.UnixSite(runner, str(tmp_path / version)).start()
        stack.push_async_callback(client.close)
        for version in ("first", "second"):
            await client.connect(f"unix:{tmp_path / version}")
            assert await client.served_version(limit_s=5.0) == version
