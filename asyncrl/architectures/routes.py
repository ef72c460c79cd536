"""The routers of mixtures of experts: which modules choose the experts, and the scores of experts that were chosen elsewhere.

A router of transformers is a module that returns (logits, scores, experts). A forward hook sees its choice, and may replace the
experts and their scores. The scores follow from the dense logits of all experts, so the router keeps its gradient.

Shapes: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from asyncrl.config.schema import ConfigError
from asyncrl.data.routes import RouteLayout

_EXPERT_WEIGHTS = ("gate_up_proj", "down_proj", "up_proj")
_ROUTER_NAMES = ("gate", "router")  # in a block with experts; all families of transformers have one of them
_LAYER = re.compile(r"layers\.(\d+)\.")


def _softmax_of_all(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    probs_TK = logits_TE.float().softmax(-1).gather(1, experts_TK)
    return probs_TK / probs_TK.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else probs_TK


def _softmax_of_chosen(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    return logits_TE.gather(1, experts_TK).softmax(-1)


def _sigmoid(router: Any, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    scores_TK = logits_TE.sigmoid().gather(1, experts_TK)
    if router.norm_topk_prob:
        scores_TK = scores_TK / (scores_TK.sum(-1, keepdim=True) + 1e-20)
    return scores_TK * float(router.routed_scaling_factor)


# How a class of routers scores given experts, from its logits. tests/unit/test_routes.py compares each with the router itself
ROUTERS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "Qwen2MoeTopKRouter": _softmax_of_all,
    "Qwen3MoeTopKRouter": _softmax_of_all,
    "OlmoeTopKRouter": _softmax_of_all,
    "MixtralTopKRouter": _softmax_of_all,
    "GptOssTopKRouter": _softmax_of_chosen,
    "DeepseekV3TopkRouter": _sigmoid,
    "Glm4MoeTopkRouter": _sigmoid,
}


def is_softmax(router: nn.Module) -> bool:
    return ROUTERS[type(router).__name__] is not _sigmoid


def scores_of(router: nn.Module, logits_TE: Tensor, experts_TK: Tensor) -> Tensor:
    """The scores with which the router would weight these experts: [T, K]."""
    scores_TK: Tensor = ROUTERS[type(router).__name__](router, logits_TE, experts_TK)
    return scores_TK


def routers_of(model: nn.Module, path: str, *, off: str = "train.routes=off") -> tuple[RouteLayout, list[nn.Module]]:
    """The routers of a model, in the order of its layers. Raises ConfigError if it has none, or if one is of a class that is not
    in ROUTERS. off: the setting without which they are not needed."""
    what = f"{off.partition('=')[0]}: model_path={path!r}"
    found: list[tuple[int, nn.Module]] = []
    for name, block in model.named_modules():
        if not any(is_experts(child) for child in block.children()):
            continue
        routers = [child for child in block.children() if type(child).__name__ in ROUTERS]
        numbers = _LAYER.findall(f"{name}.")
        if len(routers) != 1 or len(numbers) != 1:
            classes = ", ".join(type(child).__name__ for child in block.children())
            raise ConfigError(
                f"{what}: {name} ({classes}) has no router of a supported class ({', '.join(ROUTERS)}); set {off}"
            )
        found.append((int(numbers[0]), routers[0]))
    sizes = {(int(router.top_k), int(router.num_experts)) for _, router in found}  # type: ignore[arg-type]
    if len(sizes) != 1:
        raise ConfigError(
            f"{what} has {'experts of several sizes' if sizes else 'no experts'}; set {off}, or use another model"
        )
    top_k, num_experts = sizes.pop()
    if num_experts >= 0xFFFF:
        raise ConfigError(f"{what} has {num_experts} experts, more than the numbers of routes can hold; set {off}")
    return RouteLayout(tuple(number for number, _ in found), top_k, num_experts), [router for _, router in found]


def keep_router_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the routers of a model with float32 weights compute as those of a model of this dtype, also under autocast. Some cast
    what they multiply to float32, as DeepSeek-V3's do, and autocast would cast it back. FSDP and servers have no autocast."""
    for block in list(model.modules()):
        if any(is_experts(child) for child in block.children()):
            for router in filter(None, (getattr(block, name, None) for name in _ROUTER_NAMES)):
                router.forward = partial(_without_autocast, router, router.forward, dtype)


def _without_autocast(
    router: nn.Module, forward: Callable[..., Any], dtype: torch.dtype, *args: Any, **kwargs: Any
) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    own = [(module._parameters, dict(module._parameters)) for module in router.modules()]
    for slots, parameters in own:
        slots.update({name: cast(parameter) for name, parameter in parameters.items()})
    try:
        with torch.autocast(args[0].device.type, enabled=False):
            return forward(*map(cast, args), **{name: cast(value) for name, value in kwargs.items()})
    finally:
        for slots, parameters in own:
            slots.update(parameters)


def is_experts(module: nn.Module) -> bool:
    """Whether the module holds the weights of a layer's experts in tensors with one entry for each expert."""
    return any(
        isinstance(weight := getattr(module, name, None), Tensor) and weight.ndim == 3 for name in _EXPERT_WEIGHTS
    )


def replaced(router: nn.Module, output: tuple[Tensor, ...], experts_TK: Tensor, known_T: Tensor) -> tuple[Tensor, ...]:
    """The router's output with these experts where they are known, and with its own elsewhere."""
    logits_TE, scores_TK, own_TK = output
    chosen_TK = torch.where(known_T[:, None], experts_TK, own_TK)
    return logits_TE, scores_of(router, logits_TE, chosen_TK).to(scores_TK.dtype), chosen_TK
