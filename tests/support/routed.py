"""What the tests of routes compare: a sample with the sampler's experts, and those of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.data.sequence import SequenceSample
from asyncrl.generation.engine import Generated
from asyncrl.model.engine import TrainEngine
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.trajectory import Episode, Response, build_sample


def sample_of(prompts: list[list[int]], results: list[Generated]) -> SequenceSample:
    episodes = []
    for prompt, result in zip(prompts, results, strict=True):
        response = Response(prompt, finished=True)
        response.add_piece(
            result.token_ids,
            result.logprobs,
            [(WeightVersion.parse(span.version).pack(), span.end - span.start) for span in result.spans],
        )
        response.routes = result.routes
        episodes.append(Episode(prompt))
        episodes[-1].add_response(response)
    return build_sample("g", episodes)


def difference(trainer: TrainEngine, sample: SequenceSample) -> float:
    """The largest difference of a sampled token's logprob, relative to a logprob below -1: float32 has 24 bits."""
    found, sampled = trainer.logprobs(sample, temperature=1.0), sample.data["packed_logprobs"]
    assert found is not None
    return float((np.abs(found - sampled) / np.maximum(1.0, np.abs(sampled)))[sample.data["loss_mask"]].max())


def loss_fn(
    outputs: Mapping[str, Tensor], data: Mapping[str, Tensor], cu_seqlens: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(outputs["logprobs"] * data["loss_mask"]).sum() / 320, {}


def shares(trainer: TrainEngine, sample: SequenceSample) -> tuple[float, float]:
    """Shares of routers, and of tokens, that choose other experts than the sampler."""
    stats = trainer.try_step(sample, loss_fn, temperature=1.0)
    count = float(sample.data["loss_mask"].sum())
    return stats["other_experts_share"] / count, stats["other_experts_token_share"] / count


def experts_of(trainer: TrainEngine, sample: SequenceSample) -> np.ndarray[Any, Any]:
    """The experts to which the trainer's layers send the tokens of a sample in one micro-batch, as rows of routes."""
    used: list[Tensor] = []
    blocks = [m for m in trainer.model.modules() if type(m).__name__ == "Qwen3MoeExperts"]
    hooks = [m.register_forward_pre_hook(lambda _, args: used.append(args[1])) for m in blocks]
    trainer.logprobs(sample, temperature=1.0)
    for hook in hooks:
        hook.remove()
    return torch.cat(used, dim=1).cpu().numpy()
