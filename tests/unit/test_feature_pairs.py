"""Every pair of features of the training side that the checks accept gives the update that its features define.

`release` runs all pairs, CI those of the features that change how a step is computed most.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import feature_pairs
import pytest
from feature_pairs import FEATURES, LEFT_OUT, Contradiction, Outcome, config_of, fields_of_features, fields_of_schema

from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.launch.experiment import validate

PAIRS = list(itertools.combinations(FEATURES, 2))
QUICK = [
    ("streaming", "arriving_inference"),
    ("streaming", "reference missing"),
    ("streaming", "actor_inf missing"),
    ("streaming", "step function in chunks"),
    ("streaming", "adaptive kl"),
    ("streaming", "critic"),
    ("streaming", "entropy_target"),
    ("streaming", "reward that is not finite"),
    ("streaming", "detached actor_inf"),
    ("arriving_inference", "refreshed reference"),
    ("arriving_inference", "reference missing"),
    ("arriving_inference", "step function in chunks"),
    ("streaming", "advantages on a CPU worker"),
    ("streaming", "CPU worker that restarts"),
    ("streaming", "minibatches"),
    ("streaming", "epochs"),
    ("streaming", "minibatches that step early"),
    ("streaming", "minibatches and passes"),
    ("streaming", "minibatches of a critic"),
    ("streaming", "arriving actor_inf"),
    ("arriving actor_inf", "minibatches"),
    ("arriving_inference", "actor_inf missing"),
    ("ppo in parts", "arriving actor_inf"),
    ("ppo in parts", "minibatches"),
    ("ppo in parts", "advantages on a CPU worker"),
    ("ppo in parts", "CPU worker that restarts"),
    ("ppo in parts", "arriving_inference"),
    ("reinforce_pp in parts", "minibatches and passes"),
    ("reinforce_pp in parts", "reference missing"),
    ("reinforce_pp in parts", "epochs"),
    ("reinforce_pp in parts", "CPU worker that restarts"),
    ("advantages on a CPU worker", "adaptive kl"),
    ("advantages on a CPU worker", "reference missing"),
    ("advantages on a CPU worker", "actor_inf missing"),
    ("shared devices", "ema"),
    ("step function in chunks", "ptx"),
    ("streaming", "words that a function reads"),
    ("streaming", "proximal pass"),
    ("ptx", "proximal pass"),
    ("entropy_target", "proximal pass"),
    ("sequences", "proximal pass"),
    ("share_prefix", "streaming"),
    ("share_prefix", "ptx"),
    ("share_prefix", "critic"),
    ("share_prefix", "several sequences of a session"),
    ("share_prefix", "checkpointing that keeps attention"),
    ("share_prefix", "small micro-batches"),
    ("lora", "share_prefix"),
    ("lora", "streaming"),
    ("lora", "arriving_inference"),
    ("lora", "gradient_checkpointing"),
    ("lora", "small micro-batches"),
    ("lora", "actor_inf on its own workers"),
    ("lora", "detached actor_inf"),
    ("lora with its base as reference", "streaming"),
    ("lora with its base as reference", "offload of the actor"),
    ("lora with its base as reference", "reference on its own workers"),
    ("lora with its base as reference", "shared devices"),
    ("routes", "streaming"),
    ("routes", "ppo in parts"),
    ("routes", "proximal pass"),
    ("routes", "small micro-batches"),
    ("routes", "arriving actor_inf"),
    ("routes and minibatches in parts", "arriving_inference"),
    ("auxiliary loss of routers", "small micro-batches"),
    ("auxiliary loss of routers", "share_prefix"),
    ("auxiliary loss of routers", "gradient_checkpointing"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    feature_pairs.make_models(folder)
    return folder


_PLAIN: dict[tuple[str, ...], Outcome] = {}


def configs_of(pair: tuple[str, str], models: Path) -> tuple[ExperimentConfig, ExperimentConfig] | str:
    """The configs of a pair: with both halves, and plain. Returns why it is not run, if it is not."""
    features = [FEATURES[name] for name in pair]
    try:
        config, plain = (config_of(features, models, plain=plain) for plain in (False, True))
    except Contradiction as error:
        return f"both set {error}"
    if config == plain:
        return "both define the update"
    try:
        validate(config)
    except ConfigError as error:
        return f"refused: {error}"
    validate(plain)
    return config, plain


async def check_pair(pair: tuple[str, str], models: Path, folder: Path) -> str:
    """Run a pair and compare it. Returns why it was not run, or ""."""
    features, configs = [FEATURES[name] for name in pair], configs_of(pair, models)
    if isinstance(configs, str):
        return configs
    config, plain = configs
    folders = [folder / "pair", folder / "plain"]
    for each in folders:
        each.mkdir(parents=True)
    found = await feature_pairs.outcome_of(config, features, folders[0])
    expected = await feature_pairs.outcome_of(plain, features, folders[1])
    tolerance = max(feature.tolerance for feature in features)
    assert found.weights.keys() == expected.weights.keys()
    for role, weights in expected.weights.items():
        for name, weight in weights.items():
            difference = (found.weights[role][name] - weight).abs().max()
            assert difference <= tolerance, f"{role} {name} differs by {difference:.3g}"
    assert found.states.keys() == expected.states.keys()
    for name, state in expected.states.items():
        assert found.states[name] == pytest.approx(state, rel=1e-4), name
    rough = 100 * tolerance
    for step, of_plain in zip(found.stats, expected.stats, strict=True):
        assert step == pytest.approx(of_plain, rel=rough, abs=rough, nan_ok=True)
    return ""


@pytest.mark.parametrize("pair", QUICK, ids=" and ".join)
async def test_pairs_of_features(pair: tuple[str, str], models: Path, tmp_path: Path) -> None:
    assert await check_pair(pair, models, tmp_path) == ""


@pytest.mark.release
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", FEATURES)
async def test_all_pairs_of_features(first: str, models: Path, tmp_path: Path) -> None:
    wrong = {}
    for number, second in enumerate(name for a, name in PAIRS if a == first):
        try:
            await asyncio.wait_for(check_pair((first, second), models, tmp_path / str(number)), 60.0)
        except Exception as error:  # all pairs are reported
            wrong[second] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{first} and {name}: {text[:600]}" for name, text in wrong.items())


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_is_run_with_others(name: str) -> None:
    """A feature that is refused with every other one would test nothing."""
    found = [configs_of(pair, Path("/models")) for pair in PAIRS if name in pair]
    assert sum(not isinstance(configs, str) for configs in found) >= 5, found


def test_each_field_of_the_training_side_belongs_to_a_feature_or_is_left_out_for_a_reason() -> None:
    """A new field needs a feature above, so that it meets all other features."""
    for name, of_schema in fields_of_schema().items():
        ours = fields_of_features()[name]
        assert of_schema - ours - LEFT_OUT[name].keys() == set(), f"{name}: in no feature"
        assert LEFT_OUT[name].keys() - of_schema == set(), f"{name}: gone"
        assert ours & LEFT_OUT[name].keys() == set(), f"{name}: both"
