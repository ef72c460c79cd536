"""Parts of the SGLang engine that run without SGLang: command line, environment, devices, config checks, pieces, logs."""

import importlib.metadata
import math
import os
import time
from dataclasses import replace

import pytest

from asyncrl.cli.commands.logs import LogFile, select_workers, worker_of
from asyncrl.config.engines import SGLANG_PROGRAM
from asyncrl.config.schema import ConfigError, ExperimentConfig, GenerationConfig, TaskConfig, WeightsConfig
from asyncrl.config.schema import PromptSourceConfig as Prompts
from asyncrl.config.schema import RolloutConfig as Rollout
from asyncrl.data.model_limits import ModelLimits
from asyncrl.generation.checks import ModelTensors
from asyncrl.generation.engine import EngineRequest, WeightsRefused
from asyncrl.generation.server_client import Finish, Piece, PieceMeta, ServerError
from asyncrl.generation.server_engine import GrowingResponse
from asyncrl.generation.server_environment import TorchVersions, find_program, own_torch
from asyncrl.generation.server_process import ServerProcess, longest_steps
from asyncrl.generation.sglang_http import sglang_params
from asyncrl.generation.sglang_process import (
    SGLANG,
    cores_of_ranks,
    server_arguments,
    server_environment,
)
from asyncrl.launch.checks import checklist
from asyncrl.launch.checks import preflight as preflight_module
from asyncrl.launch.experiment import validate
from asyncrl.launch.program import plan
from asyncrl.protocol.generation import FinishReason, SamplingParams, VersionSpan
from asyncrl.protocol.versions import WeightVersion
from asyncrl.runtime.process import tail_of
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import publish_folder
from tests.support.preflight import preflight

V0, V1, V2 = (WeightVersion(1, v) for v in range(3))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path)
    return path


def make_config(allocation, **generation):
    return ExperimentConfig(
        allocation=allocation,
        model_path="model",
        prompts=Prompts(path="prompts.jsonl"),
        rollout=Rollout(tasks={"default": TaskConfig(reward="reward:reward")}),
        generation=GenerationConfig(**generation),
    )


# ------------------------------------------------------------------------------------------------- command and environment


def arguments(config, **changes):
    given = {"port": 4000, "tensor": 1, "seed": 7, "max_length": 512, "on_gpu": True} | changes
    return server_arguments(config, "/model", **given)


def test_the_command_of_a_server_on_gpus():
    command = " ".join(arguments(GenerationConfig(dtype="bfloat16"), tensor=2))
    assert (
        "--model-path /model --load-format dummy --host 127.0.0.1 --port 4000 --tp-size 2 --dtype bfloat16" in command
    )
    assert "--context-length 520" in command
    assert "--skip-tokenizer-init --skip-server-warmup --incremental-streaming-output" in command
    graphs = " ".join(arguments(GenerationConfig(max_running_requests=512)))
    assert "--max-running-requests 512" in graphs
    assert "--cuda-graph-max-bs-decode 512" in graphs
    for absent in ("--device", "--disable-overlap-schedule", "--disable-radix-cache", "--max-total-tokens"):
        assert absent not in command


def test_the_command_of_a_server_on_cpu_cores():
    command = " ".join(arguments(GenerationConfig(num_blocks=10, page_size=32), on_gpu=False))
    assert "--device cpu --attention-backend torch_native --max-total-tokens 320" in command
    assert "--sleep-on-idle" in command
    assert "--cuda-graph" not in command


def test_the_users_arguments_take_precedence():
    given = {"mem-fraction-static": "0.8", "enable-metrics": "", "skip-server-warmup": "false", "dtype": "half"}
    command = arguments(GenerationConfig(server_args=given | {"kv-cache-dtype": "fp8_e4m3"}))
    assert command[command.index("--kv-cache-dtype") + 1] == "fp8_e4m3"
    assert command[command.index("--mem-fraction-static") + 1] == "0.8"
    assert command[command.index("--dtype") + 1] == "half"
    assert "--enable-metrics" in command
    assert "--skip-server-warmup" not in command


def test_the_server_inherits_nothing_of_the_trainers_interpreter():
    base = {"PYTHONPATH": "/trainer", "PYTHONHOME": "/x", "VIRTUAL_ENV": "/trainer", "PATH": "/bin", "HOME": "/me"}
    environment = server_environment(base, python="/sglang/bin/python", tmp="/t", tensor=1, on_gpu=True)
    assert not {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} & environment.keys()
    assert (environment["PATH"], environment["HOME"], environment["TMPDIR"]) == ("/sglang/bin:/bin", "/me", "/t")
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert environment["NO_PROXY"] == "127.0.0.1,localhost"
    of_torchrun = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "no_proxy": "example.com"}
    environment = server_environment(of_torchrun, python="/p", tmp="/t", tensor=1, on_gpu=True)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & environment.keys()
    assert environment["no_proxy"] == "example.com,127.0.0.1,localhost"
    cpu = server_environment(base, python="/sglang/bin/python", tmp="/t", tensor=2, on_gpu=False)
    assert cpu["CUDA_VISIBLE_DEVICES"] == ""
    assert cpu["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1


@pytest.mark.parametrize(
    ("cores", "ranks", "text"),
    [([0, 1, 2, 3], 2, "0,1|2,3"), ([0, 1], 2, "0|1"), ([3], 2, "3|3"), ([0, 1, 2], 2, "0|1")],
)
def test_cores_of_ranks(cores, ranks, text):
    assert cores_of_ranks(cores, ranks) == text


def test_each_server_gets_one_gpu_per_rank():
    config = make_config("sglang.d2p1m2+d3p1m1", python="venv/bin/python")
    specs = {spec.name: spec for spec in plan(config, attempt=1, num_prompts=99, devices=list("01234567"))}
    devices = {name: spec.env["CUDA_VISIBLE_DEVICES"] for name, spec in specs.items()}
    assert (devices["generation_server/0"], devices["generation_server/1"]) == ("0,1", "2,3")
    assert [devices[f"model_worker/{i}"] for i in range(3)] == ["4", "5", "6"]
    assert devices["master/0"] == ""
    server = specs["generation_server/1"].config
    assert (server.engine, server.tensor_parallel) == ("sglang", 2)
    assert server.generation.python.startswith("/")


NCCL = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE")


@pytest.mark.parametrize(
    ("server_args", "users", "expected"),
    [
        ({}, {}, ("0", "0")),
        ({"enable-nccl-nvls": ""}, {}, ("0", "1")),
        ({"--enable-symm-mem": "true"}, {"NCCL_CUMEM_ENABLE": "0"}, ("1", "1")),  # the flag overrides the variable
        ({}, {"NCCL_CUMEM_ENABLE": "1"}, ("1", "0")),
    ],
)
def test_trainer_and_sglang_have_the_same_settings_of_nccl_for_a_broadcast(server_args, users, expected, monkeypatch):
    for name in NCCL:
        monkeypatch.delenv(name, raising=False)
    for name, value in users.items():
        monkeypatch.setenv(name, value)
    config = make_config("sglang.d1+d1", server_args=server_args)
    config = replace(config, weights=WeightsConfig(transport="broadcast"))
    specs = {spec.name: spec for spec in plan(config, attempt=1, num_prompts=1000, devices=["0", "1"])}
    inherited = {name: {**users, **spec.env} for name, spec in specs.items()}
    server = server_environment(inherited["generation_server/0"], python="/p", tmp="/t", tensor=1, on_gpu=True)
    for environment in (inherited["model_worker/0"], server):
        assert tuple(environment.get(name) for name in NCCL) == expected
    assert not set(NCCL) & set(specs["rollout_worker/0"].env)


@pytest.mark.parametrize(
    ("allocation", "weights", "devices"),
    [
        ("sglang.d1+d1", WeightsConfig(), ["0", "1"]),
        ("sglang.d1+d1", WeightsConfig(transport="broadcast", broadcast_backend="gloo"), ["0", "1"]),
        ("sglang.d1+d1", WeightsConfig(transport="broadcast"), []),
        ("transformers.d1+d1", WeightsConfig(transport="broadcast"), ["0", "1"]),  # both sides have NCCL's own defaults
    ],
)
def test_without_a_broadcast_by_nccl_to_sglang_nccl_keeps_its_settings(allocation, weights, devices):
    config = replace(make_config(allocation), weights=weights)
    for spec in plan(config, attempt=1, num_prompts=1000, devices=devices):
        assert not set(NCCL) & set(spec.env)


def test_an_external_server_gets_no_gpu():
    config = make_config("external.d2+d2", urls=["http://a:1", "http://b:1"])
    specs = {spec.name: spec for spec in plan(config, attempt=1, num_prompts=99, devices=list("0123"))}
    assert not specs["generation_server/0"].computes
    assert specs["generation_server/0"].env["CUDA_VISIBLE_DEVICES"] == ""
    assert specs["model_worker/0"].env["CUDA_VISIBLE_DEVICES"] == "0"


# ----------------------------------------------------------------------------------------------------------------- config


@pytest.mark.parametrize(
    ("allocation", "generation", "message"),
    [
        ("sglang.d1p2m1+d1", {}, "the engine sglang has no pipeline stages: use d1p1m1"),
        ("transformers.d1m2+d1", {}, "the engine transformers runs data parallel only: use d1p1m1"),
        ("external.d1m2+d1", {"urls": ["http://a:1"]}, "keeps the parallelism that it was started with"),
        (
            "external.d2+d2",
            {"urls": ["http://a:1"]},
            r"generation.urls=\['http://a:1'\]: give 2 URLs, one for each server",
        ),
        ("external.d1+d1", {"urls": ["a:1"]}, "generation.urls='a:1': write it as http://host:port"),
        ("sglang.d1+d1", {"urls": ["http://a:1"]}, "is for the engine external"),
        (
            "transformers.d1+d1",
            {"server_args": {"dtype": "half"}},
            "generation.server_args=.*: is for the engine sglang",
        ),
        (
            "transformers.d1+d1",
            {"server_args": {"kv-cache-dtype": "fp8_e4m3"}},
            "generation.server_args=.*fp8_e4m3.*: is for the engine sglang",
        ),
        ("sglang.d1+d1", {"server_args": {"port": "1"}}, "generation.server_args.port='1': is set by asyncrl"),
        ("sglang.d1+d1", {"server_args": {"tp-size": "2"}}, "use m of the allocation"),
        (
            "sglang.d1+d1",
            {"server_args": {"mem_fraction_static": "1"}},
            "write mem-fraction-static: the name of the command-line option",
        ),
        (
            "sglang.d1+d1",
            {"server_args": {"--dtype": "x"}},
            "write dtype: the name of the command-line option without --",
        ),
    ],
)
def test_bad_settings_are_refused(allocation, generation, message):
    with pytest.raises(ConfigError, match=message):
        validate(make_config(allocation, **generation))


def test_good_settings_are_accepted():
    validate(make_config("sglang.d4p1m2+d2", python="/x", server_args={"mem-fraction-static": "0.8"}))
    validate(make_config("external.d1+d1", urls=["http://10.0.0.1:30000"]))


def test_preflight_looks_for_sglang(model_path, tmp_path):
    environment = tmp_path / "venv"
    config = replace(make_config("sglang.d1+d1", python=f"{environment}/bin/python"), model_path=str(model_path))
    with pytest.raises(
        ConfigError, match=r"generation\.python='.*venv/bin/python': there is no SGLang in .*setup_sglang\.sh"
    ):
        preflight(replace(config, rollout=Rollout(tasks={"default": TaskConfig(reward="json:dumps")})))
    site = environment / "lib" / "python3.11" / "site-packages"
    for package in ("sglang-0.5.23", "torch-2.13.0+cpu", "torchvision-0.28.0"):
        (site / f"{package}.dist-info").mkdir(parents=True)
    (environment / "pyvenv.cfg").write_text("")
    found = find_program(SGLANG_PROGRAM, f"{environment}/bin/python")
    assert (found.version, found.torch, found.nccl) == ("0.5.23", "2.13.0+cpu", "")


def make_environment(folder, *packages):
    """Create the files of a virtual environment with these packages. Returns the path of its interpreter."""
    for package in packages:
        (folder / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("")
    return f"{folder}/bin/python"


@pytest.mark.parametrize(
    ("trainer", "overrides", "devices", "is_refused"),
    [
        (TorchVersions("2.13.0", "2.29.7"), {}, ["0"], True),
        (TorchVersions("2.13.0", "2.29.7"), {"broadcast_backend": "nccl"}, [], True),
        (TorchVersions("2.13.0"), {}, ["0"], True),  # NCCL is built into torch, so torch's version decides
        (TorchVersions("2.14.1", "2.30.7"), {}, ["0"], False),
        (TorchVersions("2.14.0", "2.30.7"), {}, ["0"], False),  # only the versions of NCCL must be equal
        (TorchVersions("2.14.1+cu130"), {}, ["0"], False),
        (TorchVersions("2.13.0", "2.29.7"), {"broadcast_backend": "gloo"}, ["0"], False),
        (TorchVersions("2.13.0", "2.29.7"), {"transport": "disk"}, ["0"], False),
        (TorchVersions("2.13.0+cpu"), {}, [], False),  # without GPUs the backend is gloo
    ],
)
def test_preflight_compares_the_nccl_of_a_broadcast(
    tmp_path, monkeypatch, model_path, trainer, overrides, devices, is_refused
):
    python = make_environment(tmp_path / "venv", "sglang-0.5.23", "torch-2.14.1", "nvidia_nccl_cu13-2.30.7")
    monkeypatch.setattr(preflight_module, "own_torch", lambda: trainer)
    monkeypatch.setattr(checklist, "visible_devices", lambda: devices)
    weights = WeightsConfig(**{"transport": "broadcast", **overrides})
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1", "answer": "2"}\n' * 64)
    (tmp_path / "rewards.py").write_text("def reward(*_):\n    return 1.0\n")
    config = replace(
        make_config("sglang.d1+d1", python=python),
        model_path=str(model_path),
        prompts=Prompts(path=str(tmp_path / "prompts.jsonl")),
        rollout=Rollout(tasks={"default": TaskConfig(reward=f"{tmp_path}/rewards.py:reward")}),
        weights=weights,
    )
    if not is_refused:
        assert preflight(config) == 64
        return
    with pytest.raises(ConfigError) as refused:
        preflight(config)
    told = str(refused.value)
    assert told.startswith("weights.transport='broadcast': ")
    assert f"the trainer has {trainer}, {python} has torch 2.14.1 with NCCL 2.30.7" in told
    assert "pip install torch==2.14.1" in told
    assert "weights.transport=disk" in told


def test_the_torch_of_this_environment_is_found_without_importing_it():
    assert own_torch().torch == importlib.metadata.version("torch")


# ----------------------------------------------------------------------------------------------------------------- pieces


def response(tokens=0):
    pending = GrowingResponse(EngineRequest("r", [1], SamplingParams()), 0.0, future=None)  # no caller waits for it
    pending.token_ids, pending.logprobs = [9] * tokens, [-1.0] * tokens
    pending.sent()
    return pending


def piece(ids, total, *, logprobs=None, spans=()):
    rows = [(-float(i), token, None) for i, token in enumerate(ids)] if logprobs is None else logprobs
    meta = PieceMeta(completion_tokens=total, output_token_logprobs=rows, weight_versions=list(spans))
    return Piece(output_ids=list(ids), meta_info=meta)


def test_pieces_with_only_new_tokens_are_appended():
    growing = response(2)
    assert [growing.take(piece(ids, total)) for ids, total in (([1], 1), ([2, 3], 3), ([], 3), ([4], 4))] == [
        1,
        2,
        0,
        1,
    ]
    assert growing.token_ids == [9, 9, 1, 2, 3, 4]


def test_pieces_with_all_tokens_so_far_add_only_the_new_ones():
    growing = response()
    assert [growing.take(piece(ids, len(ids))) for ids in ([1], [1, 2, 3], [1, 2, 3, 4])] == [1, 2, 1]
    assert growing.token_ids == [1, 2, 3, 4]


def test_an_abort_in_sglangs_queue_repeats_the_last_token():
    growing = response()
    growing.take(piece([1, 2, 3], 3))
    assert growing.take(piece([3], 3, logprobs=[(0.0, 1, None), (-1.0, 2, None), (-2.0, 3, None)])) == 0
    assert (growing.token_ids, growing.logprobs) == ([1, 2, 3], [0.0, -1.0, -2.0])


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (piece([1], 2), "1 tokens and 1 logprobs, but 2 should be new"),
        (piece([1], 1, logprobs=[]), "1 tokens and 0 logprobs"),
        (piece([1], 1, logprobs=[(-1.0, 2, None)]), "not of the same response"),
        (piece([1], 1, logprobs=[(math.nan, 1, None)]), "logprobs are not finite"),
        (piece([1], 1, logprobs=[(None, 1, None)]), "logprobs are not finite"),
    ],
)
def test_inconsistent_pieces_are_refused(bad, why):
    growing = response()
    with pytest.raises(ServerError, match=why):
        growing.take(bad)
    assert growing.token_ids == growing.logprobs == []


def test_an_aborted_response_may_have_ended_by_itself():
    """Otherwise the client would continue after the end of the text."""
    growing = response(1)
    growing.take(piece([5, 7], 2))
    assert growing.natural_end([0, 7]) == FinishReason(type="stop", matched=7)
    assert growing.natural_end([0]) is None
    growing.take(piece([1] * 125, 127))  # 128 tokens are requested
    assert growing.natural_end([0]) == FinishReason(type="length", length=128)
    assert response(1).natural_end([9]) is None  # that token was there before; no token is new


def span(version, start, end):
    return VersionSpan(version=str(version), start=start, end=end)


def test_version_labels_are_checked_and_shifted_behind_earlier_tokens():
    growing = response(2)
    growing.spans = [span(V0, 0, 2)]
    growing.take(piece([1, 2, 3], 3))
    growing.label(piece([], 3, spans=[span(V1, 0, 3)]), V1, V1)
    assert growing.spans == [span(V0, 0, 2), span(V1, 2, 5)]
    empty = response()
    empty.label(piece([], 0, spans=[span(V1, 0, 0)]), V1, V1)
    assert empty.spans == []


def test_version_labels_of_a_request_that_was_paused_in_place():
    growing = response()
    growing.take(piece([1, 2, 3], 3))
    growing.label(piece([], 3, spans=[span(V0, 0, 2), span(V1, 2, 3)]), V0, V1)
    assert growing.spans == [span(V0, 0, 2), span(V1, 2, 3)]


@pytest.mark.parametrize(
    ("spans", "why"),
    [
        ([span(V2, 0, 1)], "another program updates its weights"),
        ([span(V0, 0, 1)], "another program updates its weights"),
        ([VersionSpan(version="default", start=0, end=1)], "tokens of version 'default'"),
        ([], "do not cover 1 tokens"),
        ([span(V1, 1, 2)], "do not cover"),
    ],
)
def test_wrong_version_labels_are_refused(spans, why):
    growing = response()
    growing.take(piece([5], 1))
    with pytest.raises(ServerError, match=why):
        growing.label(piece([], 1, spans=spans), V1, V1)


def test_sampling_parameters_are_translated_for_sglang():
    greedy = sglang_params(SamplingParams(temperature=0.0, top_p=0.5, top_k=3, max_new_tokens=9), [0])
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"], greedy["stop_token_ids"]) == (0.0, 1.0, -1, [0])
    warm = sglang_params(SamplingParams(temperature=0.7, top_p=0.5, top_k=3), [])
    assert (warm["temperature"], warm["top_p"], warm["top_k"], warm["ignore_eos"]) == (0.7, 0.5, 3, False)
    assert Finish(type="stop", matched="text").as_ours().matched is None


# ---------------------------------------------------------------------------------------------------------- model and weights


def test_limits_of_a_model(model_path):
    assert ModelLimits.of(model_path) == ModelLimits(64, 512, frozenset({0}), tied=True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_version_must_have_the_tensors_of_the_model(tmp_path, tied):
    """A tied output layer is optional in the files. Any other missing or additional tensor is refused."""
    import torch
    from safetensors.torch import load_file, save_file

    make_tiny_model(tmp_path / "model", tie_embeddings=tied)
    tensors = ModelTensors(tmp_path / "model", tied=tied)
    whole = load_file(tmp_path / "model" / "model.safetensors")

    def verify(changed, number):
        source = tmp_path / f"source{number}"
        source.mkdir()
        (source / "config.json").write_bytes((tmp_path / "model" / "config.json").read_bytes())
        save_file(changed, source / "model.safetensors")
        version = WeightVersion(1, number)
        publish_folder(tmp_path / str(version), source_dir=source, version=version, fsync=False)
        with tensors.verified(tmp_path / str(version), version, 1.0) as folder:
            assert folder == tmp_path / str(version)

    verify(whole, 0)
    assert ("lm_head.weight" in whole) == (not tied)
    if tied:
        verify({**whole, "lm_head.weight": whole["model.embed_tokens.weight"].clone()}, 1)
    else:
        with pytest.raises(WeightsRefused, match=r"lm_head\.weight is missing"):
            verify({name: tensor for name, tensor in whole.items() if name != "lm_head.weight"}, 1)
    with pytest.raises(WeightsRefused, match=r"model\.norm\.weight is missing"):
        verify({name: tensor for name, tensor in whole.items() if name != "model.norm.weight"}, 2)
    with pytest.raises(WeightsRefused, match="more does not belong to this model"):
        verify({**whole, "more": torch.zeros(1)}, 3)
    with pytest.raises(WeightsRefused, match="has dtype I64, expected floating point"):
        verify({**whole, "model.norm.weight": whole["model.norm.weight"].long()}, 4)


# ------------------------------------------------------------------------------------------------------------------- logs


def test_sglangs_log_belongs_to_its_generation_server(tmp_path):
    assert worker_of("generation_server_0_sglang") == "generation_server/0/sglang"
    known = {"generation_server/0", "generation_server/0/sglang", "master/0"}
    assert select_workers(["generation_server"], known) == known - {"master/0"}
    assert select_workers(["generation_server_0_sglang"], known) == {"generation_server/0/sglang"}
    path = tmp_path / "generation_server_0_sglang.log"
    path.write_text("[2026-01-02 03:04:05 TP0] Load weight end.\n[2026-01-02 03:04:06] ERROR: it broke\nmore\n")
    log = LogFile(path)
    entries = list(log.new_entries(ended=True))
    log.close()
    assert {entry.worker for entry in entries} == {"generation_server/0/sglang"}
    assert [(entry.time, entry.level, entry.text) for entry in entries] == [
        ("2026-01-02 03:04:05.000", "INFO", "Load weight end."),
        ("2026-01-02 03:04:06.000", "ERROR", "it broke\nmore"),
    ]


def test_the_error_of_a_start_names_the_steps_that_took_the_longest():
    log = """\
[2026-03-01 12:00:00] python -m sglang.launch_server
[2026-03-01 12:00:20] server_args=ServerArgs(...)
a line without a time
[2026-03-01 12:00:21 TP0] Load weight begin. avail mem=78.60 GB
[2026-03-01 12:00:26 TP0] KV Cache is allocated
[2026-03-01 12:00:27 TP0] Capture cuda graph begin. This can take up to several minutes.
"""
    now = time.mktime(time.strptime("2026-03-01 12:02:00", "%Y-%m-%d %H:%M:%S"))
    assert longest_steps(log, now) == (
        "20 s after 'python -m sglang.launch_server', 5 s after 'Load weight begin. avail mem=78.60 GB', "
        "93 s after 'Capture cuda graph begin. This can take up to several minute'"
    )
    assert longest_steps("no time", now) == ""


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (
            "exec sleep 60",
            r"did not answer within 2 s \(generation.load_timeout_s; longest steps: .*s after 'Capture graphs'\)",
        ),
        ("exit 3", r"^the SGLang server has ended with exit code 3 while it was starting"),
    ],
)
async def test_only_a_start_that_takes_too_long_names_its_steps(tmp_path, last, said):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "[$(date "+%Y-%m-%d %H:%M:%S")] Capture graphs"\n{last}\n')
    python.chmod(0o755)
    server = ServerProcess(
        SGLANG,
        python=str(python),
        arguments=lambda port: [],
        environment=lambda tmp: dict(os.environ),
        log=tmp_path / "log",
        on_gpu=False,
    )

    async def never(url):
        return False

    with pytest.raises(ConfigError, match=said):
        await server.start(never, 2.0)


def test_the_end_of_a_log_is_readable(tmp_path):
    log = tmp_path / "sglang.log"
    log.write_text("first\n" + "x" * 10_000 + "\nlast\n")
    assert tail_of(log, line_chars=300).splitlines() == ["first", "x" * 300, "last"]
    assert tail_of(log, lines=1) == "last"
    assert tail_of(log, 6, line_chars=300) == "x" * 300 + "\nlast"
    assert "cannot be read" in tail_of(tmp_path / "none.log")
