"""train.mismatch: which first step is compared, what counts, and the text of the error."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from asyncrl.config.processes import MismatchConfig, ModelWorkerConfig
from asyncrl.config.schema import ConfigError
from asyncrl.data.sequence import SequenceSample
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import plan
from asyncrl.master.executor import OnPolicy
from asyncrl.model.first_step import Compared, FirstStep, MismatchError, compare, verdict
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion

BOUNDS = MismatchConfig(action="stop", temperature=0.7, kl=1e-4, bound=1e-3, share=0.01)


# ------------------------------------------------------------------------------------------- which step is on-policy


def meta(*versions: WeightVersion, attempt: int = 2) -> TrajectoryMeta:
    packed = [version.pack() for version in versions]
    return TrajectoryMeta(
        ticket_id="t",
        locator=Locator(0, 0),
        attempt=attempt,
        head=0,
        keys=[],
        seqlens=[4] * len(packed),
        response_lengths=[2] * len(packed),
        rewards=[0.0] * len(packed),
        version_start=packed,
        version_end=packed,
        birth_time=0.0,
    )


def test_only_the_first_train_step_of_an_attempt_is_on_policy_for_certain() -> None:
    first = OnPolicy()
    own = [meta(WeightVersion(2, 7)), meta(WeightVersion(2, 7), WeightVersion(2, 7))]
    assert first.begin(7, own)
    assert first.begin(7, own)  # a further part of the same batch
    first.trained()
    assert not first.begin(8, [meta(WeightVersion(2, 8))])


@pytest.mark.parametrize("other", [WeightVersion(1, 9), WeightVersion(2, 6)])
def test_a_group_of_other_weights_makes_the_batch_off_policy(other: WeightVersion) -> None:
    """An earlier attempt, or a recording (mode=train_only) of an earlier version."""
    assert not OnPolicy().begin(7, [meta(WeightVersion(2, 7)), meta(WeightVersion(2, 7), other)])


def test_steps_that_train_only_the_critic_leave_the_actor_as_it_is() -> None:
    first = OnPolicy()
    assert first.begin(0, [meta(WeightVersion(2, 0))])  # train.num_critic_only_steps: `trained` is not called
    assert first.begin(2, [meta(WeightVersion(2, 0), WeightVersion(2, 2))])


# -------------------------------------------------------------------------------------------------------- comparing


def sample(behaviour: list[float], trained: list[bool], proximal: list[float] | None = None) -> SequenceSample:
    """Two groups: one of two sequences (2 and 3 tokens), one of a sequence of 2."""
    keys = {
        "packed_input_ids": (np.arange(7), "i8"),
        "packed_logprobs": (behaviour, "f4"),
        "trained_mask": (trained, "?"),
    }
    if proximal is not None:
        keys["proximal_logprobs"] = (proximal, "f4")
    cut = {name: np.split(np.asarray(values, dtype), [2, 5]) for name, (values, dtype) in keys.items()}
    groups = [{name: parts[:2] for name, parts in cut.items()}, {name: parts[2:] for name, parts in cut.items()}]
    return SequenceSample.from_groups(["a", "b"], groups)


TRAINED = [False, True, False, True, True, False, True]
LOGPROBS = [0.0, -1.0, 0.0, -2.0, -3.0, 0.0, -0.5]


def trainer(*changes: tuple[int, float]) -> npt.NDArray[np.float32]:
    found = np.array(LOGPROBS, np.float32)
    found[[0, 2, 5]] = [-9.0, -8.0, -7.0]  # the trainer has logprobs of prompts and environment turns, too
    for at, change in changes:
        found[at] += change
    return found


def test_tokens_that_are_not_trained_do_not_count() -> None:
    found = compare(sample(LOGPROBS, TRAINED), trainer(), 1e-3)
    assert (found.num_tokens, found.total, found.num_beyond, found.worst) == (4, 0.0, 0, ())
    assert verdict(found, BOUNDS) == ""


def test_a_difference_is_named_with_sequence_and_token() -> None:
    found = compare(sample(LOGPROBS, TRAINED), trainer((3, -0.25), (6, 2.5)), 1e-3)
    assert found.approx_kl == pytest.approx(-2.25 / 4)
    assert found.share == 0.5
    assert [(one.group, one.sequence, one.token, one.length) for one in found.worst] == [("b", 0, 1, 2), ("a", 1, 1, 3)]
    text = verdict(found, BOUNDS)
    assert "behav_approx_kl is -0.562 nats per token (allowed: 0.0001)" in text
    assert "50.00% of 4 tokens differ by more than 0.001 (allowed: 1.00%), the largest by 2.5" in text
    assert "b, response 0: token 1 of 2, servers -0.5, trainer 2" in text
    assert "generation.attention=sdpa" in text


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_logprob_that_is_not_finite_is_a_mismatch(value: float) -> None:
    found = compare(sample(LOGPROBS, TRAINED), trainer((4, value)), 0.5)
    text = verdict(found, MismatchConfig("stop", 1.0, 1e9, 0.5, 1.0))
    assert "a, response 1: token 2 of 3, servers -3, trainer not finite" in text


def test_opposite_differences_do_not_cancel_in_the_share() -> None:
    found = compare(sample(LOGPROBS, TRAINED), trainer((3, 0.5), (4, -0.5)), 1e-3)
    assert found.approx_kl == 0.0
    assert verdict(found, BOUNDS)


def test_comparisons_of_ranks_and_parts_add_up() -> None:
    whole = compare(sample(LOGPROBS, TRAINED), trainer((1, 0.1), (3, 0.2), (6, 0.3)), 1e-3)
    parts = [
        compare(sample(LOGPROBS, TRAINED).select_ids([group]), trainer((1, 0.1), (3, 0.2), (6, 0.3))[at], 1e-3)
        for group, at in (("a", slice(0, 5)), ("b", slice(5, 7)))
    ]
    assert parts[0] + parts[1] == whole
    assert sum(parts, Compared()) == whole


class Engine:
    """The only rank of a model. Its logprobs depend on the temperature."""

    is_head, mesh = True, None

    def __init__(self, error: float = 0.0) -> None:
        self.error = error
        self.asked: list[float] = []

    def logprobs(self, sample: SequenceSample | None, *, temperature: float) -> npt.NDArray[np.float32] | None:
        self.asked.append(temperature)
        return None if sample is None else trainer((6, self.error + temperature - BOUNDS.temperature))


def check(engine: Engine, config: MismatchConfig = BOUNDS, **more: Any) -> dict[str, float]:
    logger = logging.getLogger("test")
    arguments = {"proximal_at": None, "last": True, **more}
    return FirstStep(config, logger).check(cast(Any, engine), sample(LOGPROBS, TRAINED, LOGPROBS), **arguments)


def test_the_trainer_computes_at_the_temperature_of_sampling() -> None:
    """train.ppo.temperature may differ from rollout.sampling.temperature. Behaviour logprobs are at the latter."""
    engine = Engine()
    assert check(engine)["mismatch/max"] < 1e-6
    assert check(engine, proximal_at=1.0)["mismatch/max"] < 1e-6
    assert engine.asked == [0.7, 0.7]
    check(engine, proximal_at=0.7)  # actor_inf has computed them
    assert engine.asked == [0.7, 0.7]


def test_stop_raises_and_warn_warns(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(MismatchError, match="the largest by 1"):
        check(Engine(1.0))
    stats = check(Engine(1.0), MismatchConfig("warn", 0.7, 1e-4, 1e-3, 0.01))
    assert stats == pytest.approx({"mismatch/approx_kl": -0.25, "mismatch/share": 0.25, "mismatch/max": 1.0})
    assert "the largest by 1" in caplog.text


def test_the_parts_of_a_batch_are_judged_together() -> None:
    step, engine = FirstStep(BOUNDS, logging.getLogger("test")), cast(Any, Engine(1.0))
    assert step.check(engine, sample(LOGPROBS, TRAINED), proximal_at=None, last=False) == {}
    with pytest.raises(MismatchError, match=r"25\.00% of 4 tokens"):
        step.check(engine, None, proximal_at=None, last=True)


# ---------------------------------------------------------------------------------------------------------------- bounds

CONFIG = """
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}}
"""


def bounds(folder: Path, *overrides: str, devices: tuple[str, ...] = ()) -> MismatchConfig | None:
    file = folder / "run.yaml"
    file.write_text(CONFIG)
    specs = plan(load_experiment(file, overrides), attempt=1, num_prompts=100, devices=devices)
    config = next(spec.config for spec in specs if spec.kind == "model_worker")
    assert isinstance(config, ModelWorkerConfig)
    return config.mismatch


def test_the_bounds_depend_on_dtypes_engine_and_mode(tmp_path: Path) -> None:
    tight, wide = (1e-4, 1e-3, 0.01), (0.05, 0.5, 0.05)

    def of(*overrides: str, **more: Any) -> tuple[float, float, float]:
        found = bounds(tmp_path, *overrides, **more)
        assert found is not None
        return found.kl, found.bound, found.share

    assert of() == of("mode=sync", "allocation=d1") == tight
    assert of("generation.dtype=bfloat16") == of("train.dtype=bfloat16") == of("allocation=sglang.d1+d1") == wide
    assert of("generation.dtype=float32", "train.dtype=float32", devices=("0",)) == wide  # TF32
    assert bounds(tmp_path, "train.mismatch=off") is None
    replayed = bounds(tmp_path, "mode=train_only", "replay.path=r", "train.mismatch=stop")
    assert replayed is not None
    assert (replayed.action, replayed.kl) == ("warn", 0.05)  # any engine may have made a recording


def test_the_temperature_is_that_of_the_behaviour_logprobs(tmp_path: Path) -> None:
    def of(*overrides: str) -> float:
        found = bounds(tmp_path, *overrides)
        assert found is not None
        return found.temperature

    assert of("rollout.sampling.temperature=0.7", "train.ppo.temperature=1.0") == 0.7
    assert of("rollout.sampling.temperature=0.7", "rollout.sampling.greedy=true") == 1.0
    assert of("mode=sync", "allocation=d1", "rollout.sampling.temperature=0.7", "train.ppo.temperature=1.0") == 1.0


def test_another_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.mismatch='maybe'.*stop, warn"):
        bounds(tmp_path, "train.mismatch=maybe")
