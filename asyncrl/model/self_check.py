"""The trainer's half of a model's self-check: the logprobs of a sequence do not depend on the sequences packed beside it, or on
whether they share its first tokens.

A train step packs sequences of unequal lengths into one row. Each layer of the model must keep them apart. Attention does, if the
layer calls the implementation that asyncrl registers (attention.py). A layer that carries a state from token to token does not.

`check_packing` and `check_sharing` run on the model as it is loaded, in any layout. `check_small_copy` compares a small copy of the
architecture with plain transformers, beyond the ends of its windows.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException
from transformers import AttentionInterface, AutoConfig, PreTrainedConfig, PreTrainedModel

from asyncrl.architectures.agreement import (
    Agreement,
    Difference,
    Logprobs,
    SelfCheckError,
    architecture_errors,
    bound_of,
    gradient_bound_of,
    no_small_copy,
    not_repeatable,
    texts_of,
)
from asyncrl.architectures.auto_class import auto_class, is_proven_by_copy
from asyncrl.architectures.small_copy import save_small_copy
from asyncrl.config.processes import ModelConfig
from asyncrl.config.schema import ConfigError, OptimizerConfig, TrainConfig
from asyncrl.data.sequence import SequenceSample
from asyncrl.model.attention import NAME as ATTENTION
from asyncrl.model.attention import kernels_text, packed_attention
from asyncrl.model.engine import TrainEngine
from asyncrl.model.mesh import ModelMesh
from asyncrl.model.sharding import local_tensor
from asyncrl.model.tensor_exchange import raised_by_all, this_worker, workers_of
from asyncrl.runtime.unix_sockets import folder_of_run

logger = logging.getLogger(__name__)

# By the bits of a number: the largest relative difference between gradients that are equal but for rounding
_GRADIENT_BOUND = {16: 0.1, 32: 1e-3}
# Gradients with less than this share of the largest one's norm are rounding: that of the bias of keys is zero in exact arithmetic
_LEAST_GRADIENT = 1e-3

Gradients = Mapping[str, Tensor]  # by parameter: this rank's part, of the sum of all outputs


def load_checked(
    model: ModelConfig,
    train: TrainConfig,
    *,
    mesh: ModelMesh | None,
    device: torch.device,
    entered: Callable[[str], None] = lambda phase: None,
) -> TrainEngine:
    """Load a model, and check that it keeps packed sequences apart. Collective over all ranks of the model. Raises ConfigError; for
    weights that one rank cannot load, on all of them. entered: called at the begin of each phase after the load."""
    with raised_by_all(mesh.placement.workers if mesh is not None else (this_worker(),), ConfigError):
        engine = TrainEngine(model, train, mesh=mesh, device=device)
    entered("self-check")
    logger.info("attention of %s: %s", model.name, kernels_text(engine.why_rectangles))
    if engine.with_state:
        logger.info("%s computes %d layers with a state by sequence", model.name, len(engine.with_state))
    with architecture_errors(model.path, alone=mesh is None or mesh.placement.grid.size == 1):
        if model.kind == "lm" and model.trainable and (mesh is None or mesh.rank == mesh.placement.workers[0]):
            check_small_copy(engine.config, share_prefix=train.share_prefix)
        bound = check_packing(engine)
        check_sharing(engine)
        if train.compile == "on":
            compile_checked(engine, model.name, bound)
    return engine


def compile_checked(engine: TrainEngine, name: str, bound: float) -> None:
    """Compile the layers, and compare outputs and gradients with those before. Collective. bound: of outputs. Raises ConfigError if
    they cannot be compiled, and SelfCheckError on the ranks that see a larger difference."""
    why = ""
    if engine.num_tensor_ranks > 1:
        why = "its layers are split over tensor ranks"
    elif engine.context is not None:
        why = "its context ranks exchange heads, which compiled layers are not shown to compute"
    elif engine.with_state:
        why = f"{engine.with_state[0]} carries a state from token to token, which compiled layers are not shown to compute"
    elif engine.train.gradient_checkpointing and any(engine.why_rectangles[False]):
        why = f"with gradient checkpointing, attention in rectangles cannot be: {kernels_text(engine.why_rectangles)}"
    else:
        texts = texts_of(engine.vocab_size)
        eager, eager_grads = _in_each_kernel(engine, texts)
        engine.compile_layers()
        try:
            compiled, compiled_grads = _in_each_kernel(engine, texts)
        except TorchDynamoException as error:
            why = str(error).strip().partition("\n")[0]
    if why:
        raise ConfigError(f"train.compile='on': {name} cannot be compiled: {why}; use off")
    if eager and (worst := Difference.between(compiled, eager)).nats > bound:
        raise SelfCheckError(
            f"compiled layers compute other outputs: they differ by {worst.nats:.3g} (bound: {bound:.0e}) at token "
            f"{worst.token} of a text of {len(texts[worst.text % len(texts)])} tokens; use train.compile=off"
        )
    share, most = _relative_difference(compiled_grads, eager_grads), _GRADIENT_BOUND[torch.finfo(engine.dtype).bits]
    if share > most:
        raise SelfCheckError(
            f"compiled layers compute other gradients: their difference has {share:.3g} of the norm of the gradients (bound: "
            f"{most:g}); use train.compile=off"
        )
    logger.info("%s is compiled", name)


def _in_each_kernel(engine: TrainEngine, texts: Sequence[Sequence[int]]) -> tuple[list[Logprobs], list[Tensor]]:
    """Outputs (none on a rank without them) and gradients in each kernel of attention that a run may take."""
    outputs, grads = list[Logprobs](), list[Tensor]()
    for _ in _each_kernel(engine):
        outputs += compute(engine, texts) or []
        grads += _gradients(engine, texts).values()
    return outputs, grads


def _each_kernel(engine: TrainEngine) -> Iterator[None]:
    """Yield once, and again with all sequences counted as long if that changes the kernel of attention in some layer."""
    least, reasons = engine.long_tokens, engine.why_rectangles
    try:
        for engine.long_tokens in (least,) if reasons[True] == reasons[False] else (least, 0.0):
            yield
    finally:
        engine.long_tokens = least


def _gradients(engine: TrainEngine, texts: Sequence[Sequence[int]]) -> Gradients:
    """Of the parameters that have one; none for a frozen model. The engine is afterwards as before."""
    if engine.optimizer is None:
        return {}
    flops = engine.trained_flops
    engine.accumulate(_sample_of(texts), lambda outputs, *_: (next(iter(outputs.values())).sum(), {}), temperature=1.0)
    parameters = engine.named_parameters()
    grads = {name: local_tensor(p.grad).clone() for name, p in parameters.items() if p.grad is not None}
    engine.optimizer.zero_grad()
    engine.trained_flops = flops
    return grads


def _relative_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The norm of the difference, as a share of the norm of what is expected."""
    difference = math.sqrt(sum(float((one - other).square().sum()) for one, other in zip(found, expected, strict=True)))
    norm = math.sqrt(sum(float(other.square().sum()) for other in expected))
    return difference / norm if norm else difference


def check_packing(engine: TrainEngine) -> float:
    """Compare packed rows with each sequence alone, in both orders. Collective. Returns the bound of such differences, which on a
    rank without outputs means nothing. Raises SelfCheckError on the ranks that see it."""
    texts = texts_of(engine.vocab_size)
    with _attention_calls(engine.model) as silent:
        packed, *as_long = [compute(engine, texts) for _ in _each_kernel(engine)]
    alone = [compute(engine, [text]) for text in texts]
    turned = compute(engine, texts[::-1])
    with _attention_of(_in_wider_floats):
        rounded = compute(engine, texts)
    if silent:
        raise SelfCheckError(_bypassed(silent))
    if packed is None or turned is None or rounded is None:  # a rank without outputs
        return 0.0
    expected = [one for row in alone if row is not None for one in row]
    found = Difference.between(packed, expected), Difference.between(turned[::-1], expected)
    worst = max(found, key=lambda one: one.nats)
    of_kernels = [Difference.between(one, packed).nats for one in as_long if one is not None]
    bound = bound_of(torch.finfo(engine.dtype).bits, Difference.between(rounded, packed).nats)
    if worst.nats > bound:
        is_whole = len(workers_of(engine)) == 1
        raise SelfCheckError(_mixed(worst, bound, _first_difference(engine, texts) if is_whole else ""))
    if (gap := max(of_kernels, default=0.0)) > bound:
        raise SelfCheckError(
            f"attention of long sequences, in rectangles, has other outputs than the varlen kernel: they differ by {gap:.3g} "
            f"(bound: {bound:.0e}). One of torch's kernels computes something else on this GPU; use another version of torch"
        )
    return bound


def check_sharing(engine: TrainEngine) -> None:
    """Compare texts that share their first tokens in one row with the same texts that share nothing, in outputs and, for a trained
    model, in gradients. Collective. Raises SelfCheckError on the ranks that see a difference. Checks nothing if the engine shares
    no prefixes."""
    if not engine.shares_prefixes:
        return
    texts, groups = _texts_that_share(engine)
    before = engine.num_tokens_shared
    found = compute(engine, texts, groups=groups), compute(engine, texts)
    if engine.num_tokens_shared == before:
        return  # the budget of a micro-batch has no room for two of them
    with _rounded_embeddings(engine):
        rounded = compute(engine, texts)
    gap, most = _gradients_of_sharing(engine, texts, groups) if engine.optimizer is not None else (0.0, 0.0)
    shared, apart = found
    if shared is not None and apart is not None and rounded is not None:  # not a rank without outputs
        bound = bound_of(torch.finfo(engine.dtype).bits, Difference.between(rounded, apart).nats)
        if (worst := Difference.between(shared, apart)).nats > bound:
            raise SelfCheckError(
                f"a sequence that shares its first tokens with others has other outputs than the same sequence by itself: they "
                f"differ by {worst.nats:.3g} (bound: {bound:.0e}) at token {worst.token} of {len(texts[worst.text])}. Use "
                "train.share_prefix=off"
            )
    if not gap <= most:
        raise SelfCheckError(
            "a sequence that shares its first tokens with others has other gradients than the same sequence by itself: they differ "
            f"by {gap:.3g} of the gradients' norm (bound: {most:.0e}). Use train.share_prefix=off"
        )


def _gradients_of_sharing(
    engine: TrainEngine, texts: Sequence[Sequence[int]], groups: Sequence[int]
) -> tuple[float, float]:
    """The difference that sharing makes, and its bound, as shares of the gradients' norm over all ranks: a rank alone may hold
    gradients of its own tokens. The engine is afterwards as before. Gradients are compared in place, so they need no memory that
    training does not need."""
    assert engine.optimizer is not None
    flops, router_loss = engine.trained_flops, engine.router_loss
    engine.router_loss = None  # subtracting a text's gradients would add those of its auxiliary loss again
    apart, shared = _sample_of(texts), _sample_of(texts, groups)

    def total(outputs: Mapping[str, Tensor], *_: object) -> tuple[Tensor, dict[str, Tensor]]:
        return next(iter(outputs.values())).sum(), {}

    def norm_without(sample: SequenceSample) -> float:
        """The norm of what remains if the gradients of these texts are subtracted."""
        minus = engine.try_step(sample, lambda *found: (-total(*found)[0], {}), temperature=1.0, begins=False)
        return minus["grad_norm"]

    whole = engine.try_step(apart, total, temperature=1.0)["grad_norm"] or 1.0
    engine.accumulate(apart, total, temperature=1.0)
    gap = norm_without(shared)
    engine.accumulate(apart, total, temperature=1.0)
    with _rounded_embeddings(engine):
        noise = norm_without(apart)
    engine.optimizer.zero_grad()
    engine.trained_flops, engine.router_loss = flops, router_loss
    return gap / whole, max(_GRADIENT_BOUND[torch.finfo(engine.dtype).bits], 4 * noise / whole)


@contextlib.contextmanager
def _rounded_embeddings(engine: TrainEngine) -> Iterator[None]:
    """Change embeddings by one unit in the last place, up or down. Matrix products of rows with other numbers of tokens round
    differently; what a model makes of such a difference is its noise."""
    random = torch.Generator().manual_seed(0)

    def rounded(_: nn.Module, __: object, embedded: Tensor) -> Tensor:
        steps = torch.randint(-1, 2, embedded.shape, generator=random).to(embedded)
        return embedded * (1 + torch.finfo(embedded.dtype).eps * steps)

    hooks = [engine.model.get_input_embeddings().register_forward_hook(rounded)] if engine.module.is_first else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _texts_that_share(engine: TrainEngine) -> tuple[list[list[int]], list[int]]:
    """Groups of texts, and how many texts each has. In the first group, suffixes are longer and shorter than the prefix. The
    prefixes of the others have equally many tokens. Texts are shorter where the budget of a micro-batch demands it."""
    medium, long, short = texts_of(engine.vocab_size)
    most = max(2, engine.train.max_tokens_per_mb // 4)
    suffixes = [suffix[: max(1, most // 2)] for suffix in (short, long, medium, long[::-1])]
    first, *others = (prefix[:most] for prefix in (long[::-1], medium, medium[::-1]))
    groups = [[first + suffix for suffix in suffixes]]
    groups += [[prefix + suffix for suffix in suffixes[:2]] for prefix in others]
    return [text for group in groups for text in group], list(map(len, groups))


def _in_wider_floats(module: nn.Module, query: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
    """Attention in floats of twice the width: its outputs differ from packed_attention's by the rounding only."""
    wide = torch.float32 if torch.finfo(query.dtype).bits == 16 else torch.float64

    def widened(value: Any) -> Any:
        return value.to(wide) if isinstance(value, Tensor) and value.is_floating_point() else value

    options = {name: widened(value) for name, value in options.items()}
    with torch.autocast(query.device.type, enabled=False):
        output, _ = packed_attention(module, widened(query), *map(widened, arguments), **options)
    return output.to(query.dtype), None


def check_small_copy(config: PreTrainedConfig, *, share_prefix: str = "auto") -> None:
    """Compare the trainer's logprobs of a small copy of the architecture with those of plain transformers, each sequence alone.

    share_prefix: train.share_prefix. If no small copy of a causal language model can be made, it checks nothing; the check of the
    loaded model remains. Raises SelfCheckError or ConfigError.
    """
    with TemporaryDirectory(prefix="asyncrl-self-check-", dir=folder_of_run()) as folder:
        try:
            save_small_copy(config, Path(folder))
        except Exception as error:  # the architecture's own code, with sizes that it may refuse in any way
            if is_proven_by_copy(config):
                raise SelfCheckError(no_small_copy(error)) from error
            logger.info("no small copy of %s can be made for the self-check: %r", config.model_type, error)
            return
        check_saved_copy(Path(folder), share_prefix=share_prefix)


def check_saved_copy(path: Path, *, share_prefix: str) -> tuple[TrainEngine, Agreement]:
    """Check a small copy that is in this folder. Returns its trainer too. Raises SelfCheckError or ConfigError."""
    train = TrainConfig(dtype="float32", max_tokens_per_mb=256, share_prefix=share_prefix)
    model = ModelConfig("actor", str(path), "d1", [0], trainable=True, optimizer=OptimizerConfig())
    engine = TrainEngine(model, train)
    texts = texts_of(engine.vocab_size)
    plain = plain_outputs(path, texts)
    check_packing(engine)
    packed = compute(engine, texts)
    assert packed is not None
    if (worst := Difference.between(packed, plain.logprobs)).nats > (bound := plain.bound):
        raise SelfCheckError(
            f"the trainer's logprobs differ from those of plain transformers by {worst.nats:.3g} (bound: {bound:.0e}), at token "
            f"{worst.token} of a text of {len(texts[worst.text])} tokens, in a small copy of the architecture; asyncrl's "
            "attention does not compute what this architecture defines. Use another model"
        )
    share, name = _worst_gradient(_gradients(engine, texts), plain.gradients)
    if share > plain.gradient_bound:
        raise SelfCheckError(
            f"the trainer's gradients differ from those of plain transformers: the difference has {share:.3g} of the norm of the "
            f"gradient of {name} (bound: {plain.gradient_bound:.0e}), in a small copy of the architecture, whose logprobs are "
            "equal. Use another model"
        )
    check_sharing(engine)
    return engine, Agreement(worst.nats, share)


def _worst_gradient(found: Gradients, expected: Gradients) -> tuple[float, str]:
    """The largest difference of a parameter's gradient, as a share of the gradient's norm, and the parameter."""
    norms = {name: float(grad.norm()) for name, grad in expected.items()}
    least = _LEAST_GRADIENT * max(norms.values())
    worst = 0.0, ""
    for name in found.keys() | expected.keys():
        one, other = (grads.get(name, torch.zeros(())) for grads in (found, expected))
        share = float((one - other).norm()) / max(norms.get(name, 0.0), least)
        worst = max(worst, (math.inf if math.isnan(share) else share, name))
    return worst


@dataclass(frozen=True)
class PlainOutputs:
    """What plain transformers computes of each text alone, and the bounds for another computation of it."""

    logprobs: list[Logprobs]
    bound: float  # nats
    gradients: Gradients
    gradient_bound: float  # of _worst_gradient


def plain_outputs(path: Path, texts: Sequence[Sequence[int]]) -> PlainOutputs:
    """Raises SelfCheckError if the logprob of a token depends on later tokens."""
    found = []
    load = auto_class(AutoConfig.from_pretrained(path)).from_pretrained
    for implementation in ("eager", "sdpa"):
        try:
            model: Any = load(path, dtype=torch.float32, attn_implementation=implementation, use_safetensors=True)
        except ValueError:  # this architecture has no such implementation
            continue
        found.append((model.eval(), [_plain(model, text) for text in texts]))
    (model, expected), *others = found
    again = Difference.between([_plain(model, text) for text in texts], expected).nats
    if again > 1e-3:
        raise SelfCheckError(not_repeatable(type(model).__name__, again))
    short = [_plain(model, text[: len(text) // 2]) for text in texts]
    prefixes = [logprobs[: len(part)] for part, logprobs in zip(short, expected, strict=True)]
    ahead = Difference.between(short, prefixes).nats
    if ahead > 1e-3:
        raise SelfCheckError(
            f"the logprob of a token depends on the tokens behind it (by {ahead:.3g} nats): {type(model).__name__} is not a causal "
            "language model with this config.json, so it cannot be sampled token by token. Use a decoder"
        )
    noise = max([ahead, *(Difference.between(other, expected).nats for _, other in others)])
    gradients, *of_others = [_plain_gradients(one, texts) for one, _ in found]
    rounding = max((_worst_gradient(one, gradients)[0] for one in of_others), default=0.0)
    return PlainOutputs(expected, bound_of(32, noise), gradients, gradient_bound_of(rounding))


@torch.no_grad()
def _plain(model: nn.Module, text: Sequence[int]) -> Logprobs:
    return np.concatenate([np.zeros(1, np.float32), _plain_logprobs(model, text).cpu().numpy()])


def _plain_logprobs(model: nn.Module, text: Sequence[int]) -> Tensor:
    """Of each token but the first."""
    ids = torch.tensor([list(text)], device=next(model.parameters()).device)
    logits = model(input_ids=ids, use_cache=False).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]


def _plain_gradients(model: nn.Module, texts: Sequence[Sequence[int]]) -> Gradients:
    for text in texts:
        _plain_logprobs(model, text).sum().backward()  # type: ignore[no-untyped-call]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compute(
    engine: TrainEngine, texts: Sequence[Sequence[int]], *, groups: Sequence[int] = ()
) -> list[Logprobs] | None:
    """The outputs of these texts, packed; for a model without logprobs, its values or scores. None on a rank without outputs.

    groups: how many texts each group has; (): one."""
    sample = _sample_of(texts, groups)
    outputs = {
        "lm": lambda: engine.logprobs(sample, temperature=1.0),
        "value": lambda: engine.values(sample),
        "reward": lambda: engine.scores(sample),
    }[engine.kind]()
    if outputs is None:
        return None
    lengths = [1 if engine.kind == "reward" else len(text) for text in texts]
    return np.split(outputs, np.cumsum(lengths)[:-1])


def _sample_of(texts: Sequence[Sequence[int]], groups: Sequence[int] = ()) -> SequenceSample:
    ids = iter(np.array(text) for text in texts)
    of_groups = [{"packed_input_ids": list(islice(ids, size))} for size in groups or [1] * len(texts)]
    return SequenceSample.from_groups([str(index) for index in range(len(of_groups))], of_groups)


@contextlib.contextmanager
def _attention_of(attention: Callable[..., tuple[Tensor, None]]) -> Iterator[None]:
    """Make the model's layers call another function in place of packed_attention."""
    AttentionInterface.register(ATTENTION, attention)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION, packed_attention)


# -------------------------------------------------------------------------------------------------------- what went wrong


@contextlib.contextmanager
def _attention_calls(model: PreTrainedModel) -> Iterator[list[str]]:
    """Yield a list that has, after the block, the names of the attention layers that ran without the registered attention."""
    ran: dict[nn.Module, str] = {}
    called: set[nn.Module] = set()
    silent: list[str] = []

    def attention(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        called.add(module)
        return packed_attention(module, *arguments, **options)

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if _has_heads(module):
                hook = module.register_forward_pre_hook(lambda layer, _, name=name: ran.update({layer: name}))
                hooks.callback(hook.remove)
        hooks.enter_context(_attention_of(attention))
        yield silent
    silent += [f"{name} ({type(module).__name__})" for module, name in ran.items() if module not in called]


def _has_heads(module: nn.Module) -> bool:
    """Whether this is an attention layer: by its name, and by its own weight matrices."""
    weights = [getattr(child, "weight", None) for child in module.children()]
    return "Attention" in type(module).__name__ and any(isinstance(one, Tensor) and one.dim() == 2 for one in weights)


def _bypassed(silent: Sequence[str]) -> str:
    more = f" and {len(silent) - 1} more layers" if len(silent) > 1 else ""
    return (
        f"{silent[0]}{more} did not call asyncrl's attention, so nothing keeps the sequences of a packed row apart there. "
        "transformers has no replaceable attention for this architecture. Use another model"
    )


def _mixed(worst: Difference, bound: float, layer: str) -> str:
    where = f" The first difference is in {layer}." if layer else ""
    return (
        f"a sequence in a packed row has other outputs than the same sequence alone: they differ by {worst.nats:.3g} (bound: "
        f"{bound:.0e}).{where} This layer mixes the sequences of a row, for example by a state that runs on from one sequence "
        "into the next. asyncrl cannot train this architecture. Use one in which only attention mixes tokens"
    )


def _first_difference(engine: TrainEngine, texts: Sequence[Sequence[int]]) -> str:
    """The first layer of the last text in a packed row whose output is not that of the text alone; "": none was found."""
    outputs: list[list[tuple[str, Tensor]]] = []

    def note(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) and output else output
            if isinstance(value, Tensor) and value.dim() == 3:
                outputs[-1].append((f"{name} ({type(module).__name__})", value[0].detach().float()))

        return hook

    with contextlib.ExitStack() as hooks:
        for name, module in engine.model.named_modules():
            parent = engine.model.get_submodule(name.rpartition(".")[0])
            if not isinstance(parent, nn.ModuleList) and name.count(".") and _in_layers(engine.model, name):
                hooks.callback(module.register_forward_hook(note(name)).remove)
        for group in (texts, texts[-1:]):
            outputs.append([])
            compute(engine, group)
    packed, alone = outputs
    length = len(texts[-1])
    for (name, row), (_, own) in zip(packed, alone, strict=False):
        start = sum(len(text) for text in texts[:-1])
        if row.shape[0] >= start + length and own.shape[0] >= length:
            gap = (row[start : start + length] - own[:length]).abs().max()
            if float(gap) > 1e-3 * max(1.0, float(own.abs().max())):
                return name
    return ""


def _in_layers(model: nn.Module, name: str) -> bool:
    """Whether this module is a part of a layer, one level below it: layers are the items of lists of modules."""
    owner = name.rpartition(".")[0]
    return isinstance(model.get_submodule(owner.rpartition(".")[0]), nn.ModuleList)
