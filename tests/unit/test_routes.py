"""Routes: their bytes, the scores of given experts, and how pieces, turns and cuts of a response join."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_words import meta_of
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from asyncrl.architectures.routes import ROUTERS, replaced, routers_of, scores_of
from asyncrl.config.schema import ConfigError, GenerationConfig
from asyncrl.data.model_limits import ModelLimits
from asyncrl.data.routes import ROUTES, RouteLayout, Routes
from asyncrl.data.sequence import SequenceSample
from asyncrl.generation.sglang_process import server_arguments
from asyncrl.generation.sglang_routes import SGLangRoutes
from asyncrl.model.packing import SequenceBatch
from asyncrl.model.trajectory_receiver import trajectory_error
from asyncrl.rewards.trajectory import Episode, Response, build_sample, complete_sample
from tests.support.families import make_family

LAYOUT = RouteLayout((0, 2, 3), top_k=2, num_experts=8)
# Families that the table of tests/support/families.py lacks
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
}
PROVEN = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe")


def routes(first: int, count: int, layout: RouteLayout = LAYOUT) -> Routes:
    """Rows that differ from position to position."""
    positions = np.arange(first, first + count)[:, None]
    return Routes(layout, ((positions + np.arange(layout.width)) % layout.num_experts).astype(layout.dtype))


def model_of(family: str) -> PreTrainedModel:
    if family not in OTHERS:
        return make_family(None, family)
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    made: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **OTHERS[family]))
    return made


@pytest.mark.parametrize(("num_experts", "each"), [(8, 1), (255, 1), (256, 2), (512, 2)])
def test_bytes_say_which_layers_their_rows_describe(num_experts: int, each: int) -> None:
    layout = RouteLayout((1, 3), 2, num_experts)
    assert layout.bytes_per_token == 4 * each
    made = routes(0, 5, layout)
    again = Routes.decode(made.encode(start=2, length=4))
    assert again.layout == layout
    assert again.rows[:3].tolist() == made.rows[2:].tolist()
    assert again.rows[3:].tolist() == [[layout.unknown] * 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda run: run[:4],
        lambda run: run[:-1],
        lambda run: np.concatenate([run[:2], np.array([9], np.uint8), run[3:]]),  # top_k 9 of 8 experts
        lambda run: np.concatenate([run[:-1], np.array([8], np.uint8)]),  # expert 8 of 8
    ],
)
def test_bytes_that_are_no_routes_are_refused(change: Any) -> None:
    with pytest.raises(ValueError, match="routes"):
        Routes.decode(change(routes(0, 3).encode()))


def test_a_token_keeps_its_first_row() -> None:
    later = Routes(LAYOUT, routes(0, 6).rows + np.uint8(0))
    later.rows[:3] = 7  # computed again after an update, with other weights
    joined = routes(0, 4).joined(later, start=0)
    assert joined.rows.tolist() == routes(0, 6).rows.tolist()
    assert routes(0, 4).joined(routes(4, 2), start=4).rows.tolist() == routes(0, 6).rows.tolist()
    for wrong, start in ((routes(5, 2), 5), (routes(0, 3), 0), (Routes(RouteLayout((0,), 2, 8), later.rows[:, :2]), 4)):
        with pytest.raises(ValueError, match="do not continue"):
            routes(0, 4).joined(wrong, start=start)


@pytest.mark.parametrize("family", PROVEN)
def test_scores_of_given_experts_are_those_of_the_router(family: str) -> None:
    torch.manual_seed(0)
    model = model_of(family)
    layout, routers = routers_of(model, "here")
    dense = {"deepseek_v3": 1, "glm4_moe": 1}.get(family, 0)
    assert layout == RouteLayout(tuple(range(dense, 2)), 2, routers[0].num_experts)  # dense layers are left out
    for router in routers:
        if hasattr(router, "e_score_correction_bias"):  # it chooses, and scores nothing
            router.e_score_correction_bias.normal_()
        hidden = torch.randn(64, 64)
        output = router(hidden)
        logits, scores, experts = output
        assert torch.allclose(scores_of(router, logits, experts), scores, rtol=0, atol=1e-7)
        other = torch.rand(64, layout.num_experts).argsort(-1)[:, :2]
        known = torch.arange(64) % 2 == 0
        _, new, chosen = replaced(router, output, other, known)
        assert torch.equal(chosen, torch.where(known[:, None], other, experts))
        assert torch.allclose(new[~known], scores[~known], rtol=0, atol=1e-7)
        new.sum().backward(inputs=[router.weight], retain_graph=True)
        grad = torch.autograd.grad(new[:, 0].square().sum(), router.weight)[0]
        assert float(grad.abs().sum(1).min()) > 0  # every expert's row of the router learns


def test_each_class_of_routers_is_proven() -> None:
    found = {type(router).__name__ for family in PROVEN for router in routers_of(model_of(family), "here")[1]}
    assert found == ROUTERS.keys()


@pytest.mark.parametrize(
    ("family", "why"), [("llama4_text", "no router of a supported class"), ("llama", "no experts")]
)
def test_other_models_are_refused(family: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        routers_of(make_family(None, family), "here")


def response(inputs: list[int], count: int) -> Response:
    made = Response(inputs, finished=True)
    made.add_piece([9] * count, [-1.0] * count, [(0, count)])
    made.routes = routes(0, len(inputs) + count - 1)
    return made


def test_routes_of_turns_and_cuts_reach_the_sample() -> None:
    first = response([1, 2, 3], 6)
    first.truncate(4)
    assert first.routes is not None
    assert len(first.routes) == 6
    episode = Episode([1, 2, 3])
    episode.add_response(first)
    episode.add_observation([5, 5])
    second = response(episode.input_ids[:], 2)
    assert second.routes is not None
    second.routes.rows[:6] = 7  # the second turn computes the first one again
    episode.add_response(second)
    episode.add_observation([6])
    alone = Episode([1, 2, 3])
    alone.add_response(response([1, 2, 3], 1))
    sample = complete_sample(build_sample("g", [episode, alone]), ticket_id="t", task_id=0, birth_time=0.0, routes=True)
    long, short = (Routes.decode(run) for run in sample.slices(ROUTES)[0])
    assert long.rows[:10].tolist() == routes(0, 10).rows.tolist()
    assert (long.rows[10:] == LAYOUT.unknown).all()
    assert (short.rows[3] == LAYOUT.unknown).all()
    assert (len(long), len(short)) == (12, 4)
    assert ROUTES in SequenceBatch.of(sample).data
    assert SequenceSample.gather([sample]).data[ROUTES].tolist() == sample.data[ROUTES].tolist()


@pytest.mark.parametrize("known", [[False], [True, False], [False, True]])
def test_a_trajectory_without_routes_is_refused(known: list[bool]) -> None:
    """All sequences of a group have them, or none."""
    episodes = [Episode([1]) for _ in known]
    for episode, has_routes in zip(episodes, known, strict=True):
        made = response([1], 3)
        made.routes = made.routes if has_routes else None
        episode.add_response(made)
    sample = build_sample("g", episodes)
    assert ROUTES not in sample.keys
    with pytest.raises(ValueError, match=r"lacks the keys.*routed_experts"):
        complete_sample(sample, ticket_id="t", task_id=0, birth_time=0.0, routes=True)


def test_a_head_refuses_routes_of_another_length() -> None:
    episode = Episode([1])
    episode.add_response(response([1], 3))
    sample = complete_sample(build_sample("g", [episode]), ticket_id="t", task_id=0, birth_time=0.0, routes=True)
    limits = ModelLimits(vocab_size=64, max_length=64)
    assert trajectory_error(meta_of(sample), sample, limits=limits) == ""
    run = sample.data[ROUTES]
    for wrong, problem in (
        (run[: -LAYOUT.bytes_per_token], "of [3] tokens; the sequences have [4]"),
        (run[:-1], "bytes for each token"),
    ):
        data = SequenceSample.from_groups(["t"], [{ROUTES: [wrong]}])
        changed = SequenceSample(sample.ids, sample.seqlens | data.seqlens, sample.data | data.data)
        assert problem in trajectory_error(meta_of(changed), changed, limits=limits)


# --------------------------------------------------------------------------------------------------------- SGLang's answers


def test_sglangs_numbers_become_rows(tmp_path: Path) -> None:
    model = make_family(tmp_path, "qwen3_moe")
    found = SGLangRoutes.of(tmp_path)
    assert found.layout == routers_of(model, "here")[0]
    numbers = np.arange(3 * found.layout.width, dtype="<i4") % found.layout.num_experts

    def decoded(numbers: Any, num_tokens: int = 4) -> Routes:
        return found.decode(base64.b64encode(numbers.tobytes()).decode(), num_tokens=num_tokens)

    assert decoded(numbers).rows.tolist() == numbers.reshape(3, -1).tolist()
    for wrong, why in ((numbers[:-1], "experts of 4 tokens"), (numbers - 1, "experts -1 to"), (numbers + 4, "to 7")):
        with pytest.raises(ValueError, match=why):
            decoded(wrong)
    for text in ("", "?"):
        with pytest.raises(ValueError, match=r"0 experts of 4 tokens|base64|padding"):
            found.decode(text, num_tokens=4)


def test_models_that_were_not_compared_with_sglang_are_refused(tmp_path: Path) -> None:
    for name, family, changes in (
        ("other", "mixtral", {}),
        ("dense", "qwen3_moe", {"mlp_only_layers": [1]}),
        ("sparse", "qwen3_moe", {"decoder_sparse_step": 2}),
    ):
        make_family(tmp_path / name, family, **changes)
        with pytest.raises(ConfigError, match=r"train.routes: .*set train.routes=off"):
            SGLangRoutes.of(tmp_path / name)


def test_sglang_is_started_to_return_experts_without_a_prefix_cache() -> None:
    def arguments(returns_routes: bool) -> list[str]:
        return server_arguments(
            GenerationConfig(),
            "m",
            port=1,
            tensor=1,
            seed=1,
            max_length=64,
            on_gpu=True,
            returns_routes=returns_routes,
        )

    wanted = {"--enable-return-routed-experts", "--disable-radix-cache"}
    assert wanted <= set(arguments(True))
    assert not wanted & set(arguments(False))
