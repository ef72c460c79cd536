"""weights.verify_logprobs at the trainer: one text, with the same scores in every layout and known to every rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sharded_models import placement, shard

from asyncrl.model.logprob_check import TextScorer
from asyncrl.model.mesh import ModelMesh
from asyncrl.testing.tiny import make_tiny_model
from asyncrl.weights.versions import ScoredText
from tests.support.rank_processes import RankProcesses


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, initializer_range=0.2)
    return str(path)


def measure(rank: int, path: str, grid: str) -> list[ScoredText]:
    """Scores before and after the weights change."""
    mesh = ModelMesh.make(placement("actor", grid), "cpu") if grid != "d1" else None
    if mesh is None and rank:
        return []
    scorer, engine = TextScorer(seed=3), shard(path, mesh)
    before = scorer.measure(engine)
    with torch.no_grad():
        for parameter in engine.named_parameters().values():
            parameter.mul_(1.1)
    return [before, scorer.measure(engine)]


def test_every_rank_of_every_layout_has_the_same(model_path):
    with RankProcesses(8, limit_s=120.0) as ranks:
        (expected, *_) = ranks.run(measure, model_path, "d1", num_ranks=1)
        for grid in ("d2", "m2", "d2p2m2"):
            answers = ranks.run(measure, model_path, grid)
            found = [answer for answer in answers if answer]
            assert len(found) == placement("actor", grid).grid.size
            assert all(answer == found[0] for answer in found)
            for mine, wanted in zip(found[0], expected, strict=True):
                assert mine.input_ids == wanted.input_ids
                np.testing.assert_allclose(mine.logprobs, wanted.logprobs, rtol=1e-4, atol=1e-5)


def test_the_text_is_such_as_the_model_writes(model_path):
    """The text is as likely as the model's own samples: its mean logprob is near minus the mean entropy, unlike that of random
    tokens."""
    engine = shard(model_path, None)
    scored_text = TextScorer(seed=3).measure(engine)
    entropies = []
    for end in range(len(scored_text.input_ids) - len(scored_text.logprobs), len(scored_text.input_ids)):
        with torch.no_grad():
            logits_V = engine.model(input_ids=torch.tensor([scored_text.input_ids[:end]])).logits[0, -1]
        entropies.append(float(torch.distributions.Categorical(logits=logits_V).entropy()))
    mean, expected = np.mean(scored_text.logprobs), -np.mean(entropies)
    assert abs(mean - expected) < 0.6, (mean, expected)
    assert expected > -np.log(64) + 1.0  # the model is far from uniform
