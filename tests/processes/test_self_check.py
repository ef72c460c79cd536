"""The self-check of a model finds each planted fault before a token is trained or sampled, with ten times its bound or more."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from functorch.compile import make_boxed_func
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.exc import InvalidCxxCompiler
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

from asyncrl.architectures import small_copy
from asyncrl.architectures.agreement import BOUND, GRADIENT_BOUND, SelfCheckError
from asyncrl.architectures.attention import Pattern
from asyncrl.architectures.small_copy import WINDOW, longest_window, save_small_copy, small_config
from asyncrl.cli import attention_check
from asyncrl.cli.architecture_check import Task, check_architecture, judge_architecture
from asyncrl.cli.attention_check import judge_attention
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, ExperimentConfig, GenerationConfig, TrainConfig
from asyncrl.generation import self_check as generation_check
from asyncrl.generation import states as generation_states
from asyncrl.generation import transformers as engine_module
from asyncrl.generation.engine import EngineArguments
from asyncrl.generation.transformers import TransformersEngine
from asyncrl.launch.checks.checklist import Case
from asyncrl.launch.checks.memory import ModelSize
from asyncrl.model import attention, self_check, states
from asyncrl.model.engine import TrainEngine
from asyncrl.model.packing import Packed
from asyncrl.model.sharding import load_config
from asyncrl.testing.tiny import make_tiny_model
from tests.support.process_wide import sockets_in
from tests.support.varlen_on_cpu import kernels_of_a_gpu

LIMIT_S = 60.0
SMALL = GenerationConfig(page_size=8, num_blocks=64, max_batch_tokens=64, max_running_requests=8)


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


def make(path: Path, family: str, **settings: Any) -> Path:
    save_small_copy(CONFIG_MAPPING[family](**settings), path)
    return path


def train(path: Path, **settings: Any) -> None:
    """Load and check a model as a model worker does."""
    model = ModelConfig("actor", str(path), "d1", [0], trainable=True)
    settings = TrainConfig(dtype="float32", **settings)
    self_check.load_checked(model, settings, mesh=None, device=torch.device("cpu"))


async def sample(path: Path, config: GenerationConfig = SMALL) -> TransformersEngine:
    """Start and close the embedded engine."""
    engine = TransformersEngine(EngineArguments(str(path), config), device="cpu")
    try:
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
    finally:
        await engine.close()
    return engine


def figure(error: pytest.ExceptionInfo[Any]) -> float:
    found = re.search(r"by (\d[\d.]*(?:e[+-]\d+)?)", str(error.value))
    assert found is not None, error.value
    return float(found[1])


# ------------------------------------------------------------------------------------------------------------- the trainer


def state_across_rows(patch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward

    def stateful(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) + 0.1 * x.cumsum(1)

    patch.setattr(modeling_llama.LlamaMLP, "forward", stateful)


def positions_shifted(patch: pytest.MonkeyPatch) -> None:
    of = Packed.of.__func__  # type: ignore[attr-defined]

    def shifted(cls: type[Packed], *arguments: Any, **options: Any) -> Packed:
        packed: Packed = of(cls, *arguments, **options)
        at = packed.position_ids
        return replace(packed, position_ids=at + 3 * (torch.arange(at.shape[1]) - at > 0))

    patch.setattr(Packed, "of", classmethod(shifted))


def rope_by_neighbour(patch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def stretched(self: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return forward(self, x, position_ids / (1 + position_ids.max() / 64))

    patch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", stretched)


def dropout_left_on(patch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaMLP.forward

    def dropped(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(forward(self, x), 0.1, training=True)

    patch.setattr(modeling_llama.LlamaMLP, "forward", dropped)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        ("llama", state_across_rows),
        ("gpt2", positions_shifted),
        ("llama", rope_by_neighbour),
        ("llama", dropout_left_on),
    ],
)
def test_the_trainer_finds_a_sequence_that_depends_on_its_neighbours(
    family: str, fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, family)
    train(path)
    fault(monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(f"model_path={str(path)!r}")) as error:
        train(path)
    assert figure(error) > 10 * BOUND


def test_dropout_of_training_is_no_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradient checkpointing the model is in training mode. Plain transformers and the small copy do not see this dropout."""
    path = make(tmp_path, "llama")
    forward = modeling_llama.LlamaMLP.forward

    def dropped(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(forward(self, x), 0.1, training=self.training)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", dropped)
    train(path)
    with pytest.raises(ConfigError, match="packed row has other outputs") as error:
        train(path, gradient_checkpointing=True)
    assert figure(error) > 10 * BOUND


def test_layers_are_not_left_out_in_training(tmp_path: Path) -> None:
    """With gradient checkpointing the model is in training mode, in which OPT leaves out each layer with this probability."""
    train(make(tmp_path, "opt", layerdrop=0.5), gradient_checkpointing=True)


def test_dropout_of_a_text_config_is_disabled(tmp_path: Path) -> None:
    CONFIG_MAPPING["gemma3"](text_config={"attention_dropout": 0.1}).save_pretrained(tmp_path)
    assert load_config(tmp_path, "lm").get_text_config().attention_dropout == 0


def test_the_error_names_the_first_layer_that_mixes_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "llama")
    state_across_rows(monkeypatch)
    with pytest.raises(ConfigError, match=r"first difference is in model\.layers\.0\.mlp \(LlamaMLP\)"):
        train(path)


def test_layers_with_a_state_are_refused_by_name_if_they_do_not_learn_the_segments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mamba \(JambaMambaMixer\)") as error:
        train(make(tmp_path, "jamba"))
    assert figure(error) > 10 * BOUND


def test_a_state_that_runs_on_into_the_next_sequence_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "qwen3_next")
    train(path)
    whole_row = states.Segments.of
    monkeypatch.setattr(
        states, "in_rectangles", lambda compute, packed, _: _as_one_sequence(compute, packed, whole_row)
    )
    with pytest.raises(ConfigError, match=r"linear_attn \(Qwen3NextGatedDeltaNet\)") as error:
        train(path)
    assert figure(error) > 10 * BOUND


def _as_one_sequence(compute: Any, packed: Any, segments_of: Any) -> torch.Tensor:
    return attention.in_rectangles(compute, packed, segments_of([len(packed[0])]))


def test_a_gradient_that_is_lost_in_a_packed_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "llama")
    train(path)

    def weaker(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return 0.99 * grad.index_select(0, places), None, None

    monkeypatch.setattr(attention._Scatter, "backward", staticmethod(weaker))
    with pytest.raises(ConfigError, match="trainer's gradients differ") as error:
        train(path)
    found = re.search(r"has (\S+) of the norm of the gradient of model\.layers\.\d\.", str(error.value))
    assert found is not None, error.value
    assert float(found[1]) > 10 * GRADIENT_BOUND


def test_layers_with_a_state_are_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"linear_attn carries a state.*use off"):
        train(make(tmp_path, "qwen3_next"), compile="on")


def test_attention_that_is_not_replaceable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"BloomAttention.*did not call asyncrl's attention"):
        train(make(tmp_path, "bloom"))


def test_a_layer_that_bypasses_the_registered_attention_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer computes the same, so no figure shows the bypass."""
    path = make(tmp_path, "llama")
    train(path)
    found = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface
    monkeypatch.setattr(
        modeling_llama.ALL_ATTENTION_FUNCTIONS,
        "get_interface",
        lambda name, default: attention.packed_attention if name == attention.NAME else found(name, default),
    )
    with pytest.raises(
        ConfigError, match=r"model\.layers\.0\.self_attn \(LlamaAttention\) and 1 more layers did not call"
    ):
        train(path)


def test_a_window_that_is_off_by_one_differs_from_plain_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, "mistral")
    train(path)
    off_by_one(monkeypatch)
    with pytest.raises(ConfigError, match="plain transformers") as error:
        train(path)
    assert figure(error) > 10 * BOUND


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    causal = attention._causal

    def wider(query: Any, key: Any, value: Any, terms: Any) -> Any:
        window = terms.pattern.window
        return causal(query, key, value, replace(terms, pattern=Pattern(window=window + 1 if window else 0)))

    patch.setattr(attention, "_causal", wider)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SelfCheckError, match="depends on the tokens behind it"):
        self_check.plain_outputs(make(tmp_path, "xlnet"), [list(range(5, 25))])


# -------------------------------------------------------------------------------------------------------------- the engine


def stale_blocks(patch: pytest.MonkeyPatch) -> None:
    """Decoding reads the keys that a page had before it was written again."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    update = PagedAttentionCache.update

    def stale(self: Any, key_states: Any, value_states: Any, **options: Any) -> Any:
        is_decoding = key_states.shape[2] <= 4
        return update(self, key_states * (0.0 if is_decoding else 1.0), value_states, **options)

    patch.setattr(PagedAttentionCache, "update", stale)


def decoding_positions_shifted(patch: pytest.MonkeyPatch) -> None:
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def shifted(self: nn.Module, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        is_decoding = position_ids.shape[1] <= 4
        return forward(self, x, position_ids + is_decoding * 2)

    patch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", shifted)


def temperature_not_applied(patch: pytest.MonkeyPatch) -> None:
    plain = engine_module.sample_tokens
    patch.setattr(
        engine_module,
        "sample_tokens",
        lambda logits, temperature, *rest, **options: plain(logits, temperature * 1.1, *rest, **options),
    )


@pytest.mark.parametrize("fault", [stale_blocks, decoding_positions_shifted, temperature_not_applied])
async def test_the_engine_finds_decoding_that_is_not_the_forward_pass(
    fault: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, "llama")
    await sample(path)
    fault(monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(f"model_path={str(path)!r}")) as error:
        await sample(path)
    assert figure(error) > 10 * BOUND


@pytest.mark.parametrize("fault", ["forgotten", "swapped"])
async def test_the_engine_finds_a_state_that_is_not_the_requests_own(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, go_on = make(tmp_path, "qwen3_5_text"), generation_states._go_on
    await sample(path)
    wrong = {"forgotten": lambda *_: None, "swapped": lambda layer, states: go_on(layer, states[::-1])}[fault]
    monkeypatch.setattr(generation_states, "_go_on", wrong)
    with pytest.raises(ConfigError, match="was decoded with another logprob") as error:
        await sample(path)
    assert figure(error) > 10 * BOUND


async def test_an_engine_that_sleeps_keeps_no_states(tmp_path: Path) -> None:
    engine = TransformersEngine(EngineArguments(str(make(tmp_path, "qwen3_5_text")), SMALL), device="cpu")
    try:
        async with asyncio.timeout(LIMIT_S):
            await engine.start()  # its self-check samples
            states = weakref.ref(engine._states)
            await engine.sleep()
        assert states() is None
    finally:
        await engine.close()


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "gemma2", "qwen2"])
async def test_cache_and_states_have_the_bytes_that_the_quick_estimate_counts(family: str, tmp_path: Path) -> None:
    """Keys and values only of layers with attention, whatever their windows; a state for each request in the other ones."""
    if family in ("qwen2", "qwen3_5_text"):
        make_tiny_model(tmp_path, family, num_layers=5)
    else:
        make(tmp_path, family, **({"layer_types": ["conv", "full_attention"] * 16} if family == "lfm2" else {}))
    engine = TransformersEngine(EngineArguments(str(tmp_path), SMALL), device="cpu")
    try:
        async with asyncio.timeout(LIMIT_S):
            await engine.start()
        cache, states = engine._manager.processor.cache, engine._states._states
    finally:
        await engine.close()
    size, of_block = ModelSize.of(str(tmp_path)), cache.bytes_per_sector
    assert cache.num_blocks == SMALL.num_blocks
    assert cache.cache_tensor.nbytes == size.cache_bytes(SMALL) + 2 * of_block  # two blocks take the rows of padding
    assert bool(states) == bool(size.states_bytes(SMALL)) == (family in ("lfm2", "qwen3_5_text"))
    for of_request in states.values():  # of those of the self-check
        tensors = [tensor for state in of_request.values() for tensor in (state.conv, state.recurrent)]
        found = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
        assert SMALL.max_running_requests * found == size.states_bytes(SMALL)


async def test_the_engine_refuses_layers_that_transformers_decodes_otherwise(tmp_path: Path) -> None:
    """A step of one token has no least time step there, which a forward pass has."""
    with pytest.raises(ConfigError, match=r"'zamba2'.*decoded with another logprob.*Use another model, or SGLang"):
        await sample(make(tmp_path, "zamba2"))


async def test_a_fault_beyond_a_length_of_the_original_shows_in_the_small_copy(tmp_path: Path) -> None:
    """Llama 4 scales queries by their position in the batch, from floor_scale positions on (8,192 in its models)."""
    config = CONFIG_MAPPING["llama4_text"]()
    small = small_config(config)
    small.floor_scale = small.attention_chunk_size = config.floor_scale
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="cannot sample from an architecture of type 'llama4_text'"):
        await sample(tmp_path)


async def test_the_check_leaves_no_trace_in_a_fresh_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make(tmp_path, "llama")
    tokens: list[int] = []
    arguments = EngineArguments(str(path), SMALL, on_tokens=lambda number, _: tokens.append(number))

    async def started() -> tuple[object, torch.Tensor]:
        torch.manual_seed(7)
        engine = TransformersEngine(arguments, device="cpu")
        await engine.start()
        try:
            return engine.stats(), torch.rand(3)
        finally:
            await engine.close()

    async def unchecked(*_: object, **__: object) -> None: ...

    stats, drawn = await started()
    monkeypatch.setattr(engine_module, "check_decoding", unchecked)
    assert stats == (await started())[0]
    assert torch.equal(drawn, (await started())[1])
    assert tokens == []


async def test_rounding_of_a_deep_model_is_no_fault(tmp_path: Path) -> None:
    """In float32 its decoded tokens differ by more than the bound for exact computations, like transformers' own attentions."""
    make_tiny_model(
        tmp_path, hidden_size=512, intermediate_size=2048, num_layers=12, num_heads=8, initializer_range=0.08
    )
    await sample(tmp_path, GenerationConfig())
    train(tmp_path)


async def test_a_window_beyond_the_texts_is_checked_on_a_small_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path, "llama")
    checked: list[str] = []

    async def note(config: Any, settings: Any, make: Any) -> None:
        checked.append(config.model_type)

    monkeypatch.setattr(engine_module, "check_small_copy", note)
    await sample(path)
    monkeypatch.setattr(engine_module, "longest_window", lambda _: 4096)
    await sample(path)
    assert checked == ["llama"]


# ----------------------------------------------------------------------------------------------------------- small copies


async def test_small_copies_lie_in_the_folder_that_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed in its self-check leaves nothing behind, because the reaper removes the folder."""
    folders: list[Path] = []

    def stop(_: Any, folder: Path) -> None:
        folders.append(folder.parent)
        raise ConfigError("stop")

    config = CONFIG_MAPPING["llama"]()
    for module in (self_check, generation_check):
        monkeypatch.setattr(module, "save_small_copy", stop)
    with sockets_in(str(tmp_path)):
        self_check.check_small_copy(config)
        with pytest.raises(ConfigError, match="stop"):
            await generation_check.check_small_copy(config, SMALL, lambda *_: pytest.fail("no engine is made"))
    assert folders == [tmp_path, tmp_path]


def test_a_small_copy_keeps_each_kind_of_layer_and_shortens_windows() -> None:
    original = CONFIG_MAPPING["gemma3_text"]()
    small = small_config(original)
    assert set(small.layer_types) == set(original.layer_types)
    assert len(small.layer_types) == small.num_hidden_layers < original.num_hidden_layers
    assert (longest_window(original), longest_window(small)) == (4096, WINDOW)
    assert longest_window(CONFIG_MAPPING["llama"]()) == 0


def test_the_same_config_gives_the_same_small_copy(tmp_path: Path) -> None:
    random = torch.get_rng_state()
    files = [make(tmp_path / name, "qwen3_moe") / "model.safetensors" for name in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert torch.equal(torch.get_rng_state(), random)


def test_a_small_copy_keeps_what_the_sizes_of_a_config_have_in_common() -> None:
    small = small_config(CONFIG_MAPPING["zamba2"]())
    assert small.attention_hidden_size == 2 * small.hidden_size
    assert small_config(CONFIG_MAPPING["zamba"]()).layers_block_type.count("hybrid") == 2  # they share their weights
    layer = small_config(CONFIG_MAPPING["dots3_note_text"]()).per_layer_config["sliding_attention"]
    assert layer.head_dim == layer.qk_nope_head_dim + layer.qk_rope_head_dim
    layers = small_config(CONFIG_MAPPING["gemma4_text"]()).per_layer_config
    assert layers["full_attention"].head_dim == 2 * layers["sliding_attention"].head_dim


# --------------------------------------------------------------------------------------------------------------- the check


def save_config(path: Path, family: str) -> str:
    CONFIG_MAPPING[family]().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(("family", "state"), [("llama", "ok"), ("jamba", "fail")])
def test_check_judges_a_large_architecture_in_a_process_of_its_own(family: str, state: str, tmp_path: Path) -> None:
    config = ExperimentConfig(model_path=save_config(tmp_path, family))
    (finding,) = judge_architecture(config)
    assert (finding.name, finding.state) == ("architecture", state)
    if state == "fail":
        assert "JambaMambaMixer" in finding.value


@pytest.mark.parametrize(
    ("family", "told"),
    [
        ("dbrx", "transformers makes no model of its config.json: .*rope_theta"),
        ("musicgen", "Multiple valid text configs"),
    ],
)
def test_a_config_of_which_transformers_makes_no_model_is_refused(family: str, told: str, tmp_path: Path) -> None:
    result = check_architecture(Task(save_config(tmp_path, family), True, None))
    assert re.match(f"model_path='{tmp_path}': .*{told}", result.problem)


def test_a_model_of_which_only_a_small_copy_cannot_be_made_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an odd size")

    monkeypatch.setattr(small_copy, "save_small_copy", refuse)
    result = check_architecture(Task(save_config(tmp_path, "llama"), True, None))
    assert (result.problem, result.not_checked) == (
        "",
        "no small copy of it can be made: AssertionError('an odd size')",
    )


def test_an_export_whose_tensors_mean_something_else_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncrl.model import export

    def swapped(model: Any) -> dict[str, torch.Tensor]:
        tensors = share(model)
        first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
        tensors[first], tensors[second] = tensors[second], tensors[first]
        return tensors

    share = export.take_share
    task = Task(save_config(tmp_path, "llama"), True, GenerationConfig())
    assert check_architecture(task).problem == ""
    monkeypatch.setattr(export, "take_share", swapped)
    assert "after an export and a load" in check_architecture(task).problem


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_neox"])
def test_a_folder_with_other_names_than_an_export_is_refused_where_servers_need_its_names(
    family: str, tmp_path: Path
) -> None:
    """transformers loads both folders, and asyncrl's own engine loads what the trainer exports from both."""
    saved = make(tmp_path / "saved", family)
    model = AutoModelForCausalLM.from_pretrained(saved)
    own = tmp_path / "own"
    shutil.copytree(saved, own)
    save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        own / "model.safetensors",
        {"format": "pt"},
    )
    by_folder = Task(str(saved), True, None, by_folder=True)
    assert check_architecture(by_folder).problem == ""
    assert check_architecture(msgspec.structs.replace(by_folder, path=str(own), by_folder=False)).problem == ""
    problem = check_architecture(msgspec.structs.replace(by_folder, path=str(own))).problem
    assert re.match(
        f"model_path='{own}': its tensors are not those that the trainer exports.* does not belong to this model.*from_config",
        problem,
    )
    copied = AutoModelForCausalLM.from_config(model.config)  # the remedy
    copied.load_state_dict(AutoModelForCausalLM.from_pretrained(own).state_dict())
    copied.save_pretrained(tmp_path / "again")
    assert check_architecture(msgspec.structs.replace(by_folder, path=str(tmp_path / "again"))).problem == ""


def test_an_architecture_of_which_no_small_copy_can_be_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("an odd size")

    path = make(tmp_path, "llama")
    monkeypatch.setattr(self_check, "save_small_copy", refuse)
    with caplog.at_level(logging.INFO):
        train(path)
    assert "no small copy of llama can be made" in caplog.text


@pytest.fixture
def tiny(tmp_path):
    make_tiny_model(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def no_compiler(monkeypatch):
    """torch.compile as on a machine without a C compiler."""

    def fail(*_: Any) -> Any:
        raise InvalidCxxCompiler()

    compile_layers = TrainEngine.compile_layers
    monkeypatch.setattr(TrainEngine, "compile_layers", lambda engine: compile_layers(engine, fail))


def test_a_model_that_cannot_be_compiled_is_refused(tiny, no_compiler):
    with pytest.raises(ConfigError, match=r"train.compile='on': actor cannot be compiled: .*; use off"):
        train(tiny, compile="on")


def test_rectangles_with_checkpointing_are_not_compiled(tiny):
    with pytest.raises(
        ConfigError, match=r"attention in rectangles cannot be: rectangles \(the device is cpu.*use off"
    ):
        train(tiny, compile="on", gradient_checkpointing=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler reads it
@pytest.mark.parametrize("what", ["outputs", "gradients"])
def test_compiled_layers_that_compute_something_else_are_refused(tiny, monkeypatch, what):
    """The compiler here makes wrong code for one of the two passes."""

    def wrong(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(
            lambda *arguments: [1.1 * value if is_float(value) else value for value in graph(*arguments)]
        )

    def right(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(graph)

    def is_float(value: Any) -> bool:
        return torch.is_tensor(value) and value.is_floating_point()

    forward, backward = (wrong, right) if what == "outputs" else (right, wrong)
    compiler = aot_autograd(fw_compiler=forward, bw_compiler=backward)
    compile_layers = TrainEngine.compile_layers
    monkeypatch.setattr(TrainEngine, "compile_layers", lambda engine: compile_layers(engine, compiler))
    with pytest.raises(ConfigError, match=rf"compiled layers compute other {what}.*use train.compile=off"):
        train(tiny, compile="on")


def test_check_names_the_kernels_of_attention(tiny, monkeypatch):
    config = ExperimentConfig(model_path=str(tiny))
    (on_cpu,) = judge_attention(Case(config, devices=[]))
    assert (on_cpu.state, on_cpu.value) == ("ok", "in rectangles, by sdpa: the trainer computes on the CPU")
    monkeypatch.setenv("ASYNCRL_SIMULATED_GPUS", "1")
    (found,) = judge_attention(Case(config, devices=["0"]))
    why = "the device is cpu, not a GPU with FlashAttention"
    assert (found.state, found.value) == ("ok", f"rectangles ({why}) in 2 of 2 layers")
    monkeypatch.setattr(attention_check, "LIMIT_S", 0.01)
    (late,) = judge_attention(Case(config, devices=["0"]))
    assert (late.state, late.remedy) == ("warn", "the log of model_worker_0 names the kernels")
    assert judge_attention(Case(replace(config, mode="rollout_only"), devices=["0"])) == []


COMPILE_LAYERS = TrainEngine.compile_layers


def train_as_on_a_gpu(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, first: Callable[[], None] = lambda: None, **settings: Any
) -> TrainEngine:
    """The kernels of attention are those of a GPU; compiled code runs each operation by itself. first: before the compilation."""
    kernels_of_a_gpu(monkeypatch)
    monkeypatch.setattr(TrainEngine, "compile_layers", lambda engine: (first(), COMPILE_LAYERS(engine, "aot_eager")))
    model = ModelConfig("actor", str(path), "d1", [0], trainable=True)
    settings = TrainConfig(dtype="bfloat16", **settings)
    return self_check.load_checked(model, settings, mesh=None, device=torch.device("cpu"))


@pytest.fixture
def spoil_rectangles(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A fault of the kernel of long sequences in 16 bits."""
    compute = attention._in_rectangles

    def spoiled(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
        return compute(query, *arguments) * (30 if query.dtype == torch.bfloat16 else 1)

    return lambda: monkeypatch.setattr(attention, "_in_rectangles", spoiled)


def test_both_kernels_that_a_run_may_take_are_checked(tiny, monkeypatch, spoil_rectangles):
    assert train_as_on_a_gpu(tiny, monkeypatch).long_tokens == 2000
    spoil_rectangles()
    with pytest.raises(ConfigError, match="attention of long sequences, in rectangles, has other outputs"):
        train_as_on_a_gpu(tiny, monkeypatch)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler reads it
def test_both_kernels_that_a_run_may_take_are_checked_when_compiled(tiny, monkeypatch, spoil_rectangles):
    assert train_as_on_a_gpu(tiny, monkeypatch, compile="on").long_tokens == 2000
    with pytest.raises(ConfigError, match="compiled layers compute other outputs"):
        train_as_on_a_gpu(tiny, monkeypatch, first=spoil_rectangles, compile="on")


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("choice", [True, "attention"])
def test_compiled_layers_with_checkpointing_stay_in_the_varlen_kernel(tiny, monkeypatch, spoil_rectangles, choice):
    first = spoil_rectangles  # no row takes them
    engine = train_as_on_a_gpu(tiny, monkeypatch, first=first, compile="on", gradient_checkpointing=choice)
    assert engine.long_tokens == math.inf
