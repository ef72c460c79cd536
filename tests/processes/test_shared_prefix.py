"""Sequences of a group that share their first tokens: the same outputs and the same gradients as without sharing."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

from asyncrl.architectures.agreement import BOUND
from asyncrl.architectures.small_copy import save_small_copy, small_config
from asyncrl.architectures.states import States
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.model import attention, self_check, states
from asyncrl.model.engine import TrainEngine
from asyncrl.model.packing import Packed
from tests.support.family_table import default_config
from tests.support.varlen_on_cpu import kernels_of_a_gpu

OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=0)
ON = TrainConfig(max_tokens_per_mb=400, logprob_chunk_tokens=64, optimizer=OPTIMIZER, share_prefix="on")
OFF = replace(ON, share_prefix="off")
# The small copy of Qwen3.5 enlarges a change of its embeddings in the last place to 2e-4 nats
RTOL = {"qwen3_5_text": 1e-4}
Shared = list[tuple[int, int]]  # of each sequence, as in attention.row_of
# Plain; grouped heads with norms; sinks and windows; soft caps and windows; windows; keys and values of unequal sizes; experts
ATTENTION = ("llama", "qwen3", "gpt_oss", "gemma2", "gemma3_text", "deepseek_v3", "qwen3_moe")
# A delta rule, a convolution, state spaces, beside attention in the same layer or not
WITH_STATE = ("qwen3_5_text", "lfm2", "mamba2", "falcon_h1")
FAMILIES = ATTENTION + WITH_STATE
# Each type of module with a state of the families that train, but that of Qwen3.5 with experts: it has the code of Qwen3.5
TYPES = (
    *WITH_STATE,
    "qwen3_next",
    "lfm2_moe",
    "lfm3",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
    "olmo_hybrid",
    "zamba2",
)


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            save_small_copy(default_config(family), made[family])
            remember_longer(made[family])
        return made[family]

    return make


def remember_longer(path: Path) -> None:
    """Let states decay slowly: differences of large logarithms of decays are what Qwen3.5's small copy loses digits in."""
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        decays = {name: tensor.clamp(max=-2.0) for name, tensor in tensors.items() if name.endswith("A_log")}
        save_file(tensors | decays, file, metadata={"format": "pt"})


def make_sample() -> SequenceSample:
    """Groups with prompts shorter and longer than responses, two of one length, one response of one token, two groups of one."""
    rng = np.random.default_rng(0)
    groups = []
    for prompt, responses in ((12, (5, 1, 30, 9)), (12, (3, 3)), (40, (7, 1, 2, 20, 40)), (9, (4,)), (1, (1,))):
        first = rng.integers(0, 60, prompt)
        ids = [np.concatenate([first, rng.integers(0, 60, n)]) for n in responses]
        groups.append(
            {
                "packed_input_ids": ids,
                # The second group trains the prompt, too: the gradients of its copies add up
                "loss_mask": [
                    np.arange(len(one)) >= (1 if prompt == 12 and len(responses) == 2 else prompt) for one in ids
                ],
                "advantages": [rng.normal(size=len(one)).astype(np.float32) for one in ids],
                "task_ids": 0,
            }
        )
    return SequenceSample.from_groups([f"g{number}" for number in range(len(groups))], groups)


def loss(outputs: Any, data: Any, cu_seqlens: torch.Tensor) -> Any:
    mask = data["loss_mask"]
    if "scores" in outputs:
        return outputs["scores"].square().sum() / 10, {}
    if "values" in outputs:
        return (outputs["values"] - data["advantages"])[mask].square().sum() / 100, {}
    terms = -data["advantages"] * outputs["logprobs"] - 0.3 * outputs["entropy"]
    return terms[mask].sum() / 100, {"length_max": cu_seqlens.diff().max()}


def outputs_and_gradients(
    path: Path, train: TrainConfig, kind: str = "lm"
) -> tuple[np.ndarray, dict[str, torch.Tensor], TrainEngine]:
    engine = TrainEngine(ModelConfig("model", str(path), "d1", [0], kind, True, OPTIMIZER), train)
    sample = make_sample()
    infer = {"lm": lambda: engine.logprobs(sample, temperature=0.7), "value": lambda: engine.values(sample)}
    found = infer.get(kind, lambda: engine.scores(sample))()
    engine.try_step(sample, loss, temperature=0.7)
    grads = {name: parameter.grad for name, parameter in engine.named_parameters().items()}
    assert found is not None
    return found, grads, engine


def assert_same(
    path: Path,
    train: TrainConfig = ON,
    kind: str = "lm",
    *,
    atol: float = 1e-5,
    rtol: float = 1e-5,
    least: float = 0.25,
) -> TrainEngine:
    """rtol: of a gradient, as a share of its largest number, or of 1e-3. least: share of the tokens that is saved."""
    found, grads, engine = outputs_and_gradients(path, train, kind)
    expected, others, apart = outputs_and_gradients(path, replace(train, share_prefix="off"), kind)
    assert engine.num_tokens == apart.num_tokens
    assert engine.num_tokens_shared > least * engine.num_tokens
    assert apart.num_tokens_shared == 0
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=atol)
    for name, grad in others.items():
        scale = max(float(grad.abs().max()), 1e-3)
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=rtol * scale, msg=name)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_gives_the_same_outputs_and_gradients(path_of: Callable[[str], Path], family: str) -> None:
    engine = assert_same(path_of(family), rtol=RTOL.get(family, 1e-5))
    assert bool(engine.with_state) == (family in WITH_STATE)


@pytest.mark.parametrize("family", TYPES)
def test_a_state_that_is_forked_is_exact(family: str) -> None:
    """In float64: the outputs of a module, and the gradients of its inputs and parameters, as of whole sequences. Two prefixes have
    equally many tokens, one has one token, and some suffixes have one token."""
    model = in_float64(family)
    module = next(iter(states.keep_apart(model).values()))
    lengths = [20, 13, 41, 12, 5, 7, 30, 15, 14, 2, 9]
    shared = ((0, 0), (0, 12), (2, 0), (2, 11), (4, 0), (5, 0), (0, 12), (7, 0), (7, 12), (9, 0), (9, 1))
    places = torch.from_numpy(attention.row_of(lengths, shared)[0])
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn_like(parameter)
    row = torch.randn(1, int(places.max()) + 1, model.config.get_text_config().hidden_size, dtype=torch.float64)
    row.requires_grad_()
    weights = torch.randn(1, len(places), row.shape[2], dtype=torch.float64)

    def computed(output: torch.Tensor) -> list[torch.Tensor]:
        return [output.detach(), *torch.autograd.grad((output * weights).sum(), [row, *module.parameters()])]

    found = computed(module(row, segments=attention.Segments.of(lengths, shared=shared))[:, places])
    expected = computed(module(row[:, places], segments=attention.Segments.of(lengths)))
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * max(1.0, float(other.abs().max()))


def in_float64(family: str) -> Any:
    """A small copy whose code computes in float64 what it computes in float32 for all models."""
    config = small_config(default_config(family))
    found = type(AutoModelForCausalLM.from_config(config))
    code = sys.modules[found.__module__]
    wide = ModuleType(code.__name__)
    wide.__dict__.update(__file__=code.__file__, __package__=code.__package__)
    source = inspect.getsource(code).replace("torch.float32", "torch.float64").replace(".float()", ".double()")
    exec(compile(source, str(code.__file__), "exec"), wide.__dict__)
    return getattr(wide, found.__name__)(config).double()


def test_a_scan_that_begins_anew_shares_nothing(path_of: Callable[[str], Path]) -> None:
    """Zamba's state is lost between two calls of several tokens."""
    model = ModelConfig("actor", str(path_of("zamba")), "d1", [0])
    engine = TrainEngine(model, replace(ON, share_prefix="auto"))
    engine.logprobs(make_sample(), temperature=1.0)
    assert engine.num_tokens_shared == 0
    with pytest.raises(ConfigError, match=r"train.share_prefix='on'.*ZambaMambaMixer.*use off"):
        TrainEngine(model, ON)


@pytest.mark.parametrize("kind", ["value", "reward"])
def test_values_and_scores(path_of: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    model_class = {"value": AutoModelForTokenClassification, "reward": AutoModelForSequenceClassification}[kind]
    torch.manual_seed(0)
    model_class.from_pretrained(path_of("llama"), num_labels=1).save_pretrained(tmp_path)
    assert_same(tmp_path, kind=kind)


@pytest.mark.parametrize("checkpointing", [True, "attention"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5_text"])
def test_gradient_checkpointing(path_of: Callable[[str], Path], family: str, checkpointing: bool | str) -> None:
    train = replace(ON, gradient_checkpointing=checkpointing)
    assert_same(path_of(family), train, rtol=RTOL.get(family, 1e-5))


@pytest.mark.parametrize("max_tokens", [30, 60, 10_000])
def test_groups_that_are_cut_and_whole_batches(path_of: Callable[[str], Path], max_tokens: int) -> None:
    assert_same(path_of("llama"), replace(ON, max_tokens_per_mb=max_tokens), least=0.05)


def test_bfloat16(path_of: Callable[[str], Path]) -> None:
    assert_same(path_of("llama"), replace(ON, dtype="bfloat16"), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_the_kernels_of_a_gpu(path_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The varlen kernel is a stand-in, which aligns queries with the last keys as the kernel does."""
    kernels_of_a_gpu(monkeypatch)
    assert_same(path_of(family), replace(ON, dtype="bfloat16"), atol=0.1, rtol=0.1)


def test_a_shared_prefix_counts_once(path_of: Callable[[str], Path]) -> None:
    _, _, engine = outputs_and_gradients(path_of("llama"), ON)
    _, _, apart = outputs_and_gradients(path_of("llama"), OFF)
    copies = [12] * 3 + [12] + [40] * 4  # tokens of the prefixes of all sequences but one of each group
    assert engine.trained_flops == apart.trained_flops - engine.flops.of_batch(copies, trains=True)
    assert engine.num_tokens_shared == 2 * sum(copies)  # in inference and in training


@pytest.mark.parametrize(("prompt", "is_shared"), [(2, False), (3, True)])
def test_auto_shares_where_that_saves_enough(path_of: Callable[[str], Path], prompt: int, is_shared: bool) -> None:
    """Two sequences of 30 tokens: 2 of 60 tokens are less than 5 %, and 3 are not."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, 60, prompt)
    rows = [np.concatenate([first, [60 + number], rng.integers(0, 60, 29 - prompt)]) for number in range(2)]
    sample = SequenceSample.from_groups(["g"], [{"packed_input_ids": rows}])
    saved = {}
    for choice in ("auto", "on", "off"):
        model = ModelConfig("model", str(path_of("llama")), "d1", [0])
        engine = TrainEngine(model, replace(ON, share_prefix=choice))
        engine.logprobs(sample, temperature=1.0)
        saved[choice] = engine.num_tokens_shared
    assert saved == {"auto": prompt * is_shared, "on": prompt, "off": 0}


# ------------------------------------------------------------------------------------------------------ planted faults


def with_layout(
    patch: pytest.MonkeyPatch, change: Callable[[list[int], Shared], tuple[list[int], Sequence[tuple[int, int]]]]
) -> None:
    """Layers get another layout of rows with shared prefixes. change: of the lengths, and of what each sequence shares."""
    of = attention.Segments.of.__func__  # type: ignore[attr-defined]

    def changed(cls: Any, lengths: Any, *, shared: Any = (), **options: Any) -> Any:
        if any(num for _, num in shared):
            lengths, shared = change(list(lengths), list(shared))
        return of(cls, lengths, shared=shared, **options)

    patch.setattr(attention.Segments, "of", classmethod(changed))


def a_suffix_sees_another(patch: pytest.MonkeyPatch) -> None:
    """The last two suffixes of one prefix in a row are one suffix."""

    def merged(lengths: list[int], shared: Shared) -> tuple[list[int], Shared]:
        siblings = [i for i, (one, following) in enumerate(pairwise(shared)) if one == following and one[1]]
        if not siblings:
            return lengths, shared
        at = siblings[-1]
        lengths[at] += lengths.pop(at + 1) - shared.pop(at + 1)[1]
        return lengths, [(source - (source > at), num) for source, num in shared]

    with_layout(patch, merged)


def positions_continue(patch: pytest.MonkeyPatch) -> None:
    """The position of a suffix's first token is that behind the suffix before it."""
    of = Packed.of.__func__  # type: ignore[attr-defined]

    def continued(cls: Any, *arguments: Any, **options: Any) -> Any:
        packed = of(cls, *arguments, **options)
        at = packed.position_ids.clone()
        starts = packed.segments.cu_seqlens.tolist()
        for start, end in pairwise(starts):
            if at[0, start]:
                at[0, start:end] = at[0, start - 1] + 1 + torch.arange(end - start)
        return replace(packed, position_ids=at)

    patch.setattr(Packed, "of", classmethod(continued))


def a_state_runs_on(patch: pytest.MonkeyPatch) -> None:
    """Layers with a state compute a row with shared prefixes as one sequence."""
    separately = states._separately

    def as_one(*arguments: Any, segments: Any = None, **options: Any) -> torch.Tensor:
        if segments is not None and segments.shared is not None:
            segments = attention.Segments.of([segments.num_tokens])
        return separately(*arguments, segments=segments, **options)

    patch.setattr(states, "_separately", as_one)


def suffixes_forget_the_prefix(patch: pytest.MonkeyPatch) -> None:
    """Suffixes begin with nothing before them."""
    with_layout(patch, lambda lengths, shared: ([n - num for n, (_, num) in zip(lengths, shared, strict=True)], ()))


def the_state_of_another_prefix(patch: pytest.MonkeyPatch) -> None:
    """Sequences go on from the state behind another prefix of as many tokens."""
    at = States.at
    patch.setattr(States, "at", lambda self, rows: at(self, rows.flip(0)))


def no_gradient_reaches_the_prefix(patch: pytest.MonkeyPatch) -> None:
    """A copy of a state has its values only."""
    at = States.at

    def detached(self: States, rows: torch.Tensor) -> States:
        with torch.no_grad():
            return at(self, rows)

    patch.setattr(States, "at", detached)


FAULTS = [
    ("llama", a_suffix_sees_another),
    ("llama", positions_continue),
    ("llama", suffixes_forget_the_prefix),
    ("gpt_oss", a_suffix_sees_another),
    ("gpt_oss", suffixes_forget_the_prefix),
    ("gemma2", suffixes_forget_the_prefix),
    ("qwen3_5_text", a_state_runs_on),
    ("qwen3_5_text", positions_continue),
    ("mamba2", a_suffix_sees_another),
    ("mamba2", no_gradient_reaches_the_prefix),
    ("lfm2", suffixes_forget_the_prefix),
    ("lfm2", the_state_of_another_prefix),
]


@pytest.mark.parametrize(("family", "fault"), FAULTS)
def test_a_planted_fault_changes_outputs(
    path_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, fault: Callable[..., None]
) -> None:
    path = path_of(family)
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        assert_same(path)


@pytest.mark.parametrize(("family", "fault"), FAULTS)
def test_the_check_at_start_finds_a_planted_fault(
    path_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, fault: Callable[..., None]
) -> None:
    model = ModelConfig("actor", str(path_of(family)), "d1", [0], trainable=True)

    def load(train: TrainConfig) -> TrainEngine:
        return self_check.load_checked(model, train, mesh=None, device=torch.device("cpu"))

    assert load(ON).num_tokens_shared > 0
    fault(monkeypatch)
    with pytest.raises(ConfigError, match=r"shares its first tokens.*share_prefix=off") as error:
        load(ON)
    gap = float(str(error.value).partition("differ by ")[2].split()[0])
    assert gap > 10 * BOUND
    assert load(OFF).num_tokens_shared == 0


def test_the_check_at_start_leaves_the_auxiliary_loss_of_routers_out(path_of: Callable[[str], Path]) -> None:
    """It subtracts gradients of the same texts. Those of the auxiliary loss would be added each time, and hide a difference."""
    model, found = ModelConfig("actor", str(path_of("qwen3_moe")), "d1", [0], trainable=True), []
    for coef in (0.0, 1e4):
        engine = TrainEngine(model, replace(ON, router_aux_loss_coef=coef))
        found.append(self_check._gradients_of_sharing(engine, *self_check._texts_that_share(engine)))
    assert found[1] == pytest.approx(found[0])
    assert engine.router_loss is not None


@pytest.mark.parametrize("max_tokens", [16, 64, 16384])
def test_the_check_at_start_shares_tokens_within_any_budget(path_of: Callable[[str], Path], max_tokens: int) -> None:
    model = ModelConfig("actor", str(path_of("llama")), "d1", [0], trainable=True)
    train = replace(ON, max_tokens_per_mb=max_tokens)
    engine = self_check.load_checked(model, train, mesh=None, device=torch.device("cpu"))
    assert engine.num_tokens_shared > 0
