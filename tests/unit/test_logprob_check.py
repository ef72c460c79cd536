"""weights.verify_logprobs: which logprobs let a version pass, and the error message about those that do not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from asyncrl.config.processes import GenerationServerConfig
from asyncrl.config.schema import ConfigError
from asyncrl.generation.checks import LogprobCheck, LogprobMismatch
from asyncrl.launch.experiment import load_experiment
from asyncrl.launch.program import plan
from asyncrl.protocol.versions import WeightVersion
from asyncrl.weights.versions import ScoredText

V0, V1, V2 = (WeightVersion(1, version) for version in range(3))
IDS = [7, 8, 9, 10, 11]
BEFORE, AFTER = ScoredText(IDS, [-1.0, -2.0, -3.0]), ScoredText(IDS, [-1.1, -1.9, -3.3])


def scored(scored_text: ScoredText, *shifts: float) -> list[float]:
    """Return a server's reply: one logprob per token, and 0 for the first token."""
    shifts = shifts or (0.0,) * len(scored_text.logprobs)
    return [0.0, -5.0, *(logprob + shift for logprob, shift in zip(scored_text.logprobs, shifts, strict=True))]


def test_logprobs_within_the_tolerance_pass() -> None:
    check = LogprobCheck(0.3)
    assert check.check(V0, BEFORE, "a", scored(BEFORE)) == 0.0
    assert check.check(V1, AFTER, "b", scored(AFTER, 0.0, 0.14, 0.0)) == pytest.approx(
        0.14
    )  # noise: below 0.05 on average


@pytest.mark.parametrize(
    "shifts",
    [(0.0, 0.31, 0.0), (0.06, 0.06, -0.06), (0.0, math.nan, 0.0), (0.0, -math.inf, 0.0)],
    ids=["one", "all", "nan", "inf"],
)
def test_logprobs_beyond_the_tolerance_are_refused_with_their_difference(shifts: tuple[float, ...]) -> None:
    with pytest.raises(LogprobMismatch, match=f"weights {V1} were loaded, .*differ by .*weights.verify_tolerance"):
        LogprobCheck(0.3).check(V1, AFTER, "b", scored(AFTER, *shifts))


def test_old_weights_are_named_in_the_error() -> None:
    check = LogprobCheck(1e-3)
    check.check(V0, BEFORE, "a", scored(BEFORE, 1e-5, 0.0, 0.0))
    with pytest.raises(
        LogprobMismatch,
        match=f"they are bit-identical to those of {V0}: the engine still computes with the old weights",
    ):
        check.check(V1, AFTER, "b", scored(BEFORE, 1e-5, 0.0, 0.0))
    check.check(V1, AFTER, "b", scored(AFTER))  # after a retry the new weights are loaded


def test_old_weights_are_found_within_the_tolerance() -> None:
    """A small step in a coarse dtype: the tolerance is larger than the step, but the server's logprobs did not change at all."""
    small = ScoredText(IDS, [logprob + 1e-4 for logprob in BEFORE.logprobs])
    noise = (0.02, -0.03, 0.01)
    check = LogprobCheck(0.3)
    check.check(V0, BEFORE, "a", scored(BEFORE, *noise))
    with pytest.raises(LogprobMismatch, match=r"did not change, while the trainer's did \(by 0\.0001 on average\)"):
        check.check(V1, small, "b", scored(BEFORE, *noise))
    check.check(V1, small, "b", scored(BEFORE, 0.02, -0.03, 0.0101))


def test_logprobs_may_stay_equal_if_the_weights_do() -> None:
    near = ScoredText(IDS, [logprob + 1e-3 for logprob in BEFORE.logprobs])
    check = LogprobCheck(0.3)
    check.check(V0, BEFORE, "a", scored(BEFORE))
    check.check(V1, near, "a", scored(BEFORE))  # the same files: the step is lost in bfloat16's rounding
    check.check(V2, near, "b", scored(BEFORE))  # the trainer's logprobs did not change either


def test_logprobs_of_different_texts_are_not_compared() -> None:
    """A restarted trainer scores another text."""
    check = LogprobCheck(0.3)
    check.check(V0, BEFORE, "a", scored(BEFORE))
    other = ScoredText([1, 2, 3, 4, 5], [logprob + 1e-3 for logprob in BEFORE.logprobs])
    check.check(V1, other, "b", scored(BEFORE))


def test_decoded_tokens_must_have_the_logprobs_of_a_forward_pass() -> None:
    check = LogprobCheck(0.3)
    assert check.check_decoded(V0, [], []) == 0.0
    assert check.check_decoded(V0, [-1.0, -2.0], [-1.0, -2.05]) == pytest.approx(0.05)
    with pytest.raises(LogprobMismatch, match=r"not those of its own forward pass: they differ by at most 0\.4"):
        check.check_decoded(V0, [-1.0, -2.0], [-1.4, -2.0])


def test_too_few_logprobs_are_refused() -> None:
    with pytest.raises(LogprobMismatch, match="2 logprobs for the text's 3 tokens"):
        LogprobCheck(0.3).check(V0, BEFORE, "a", [0.0, -1.0])


# ---------------------------------------------------------------------------------------------------------------- config

CONFIG = """
model_path: m
prompts: {path: p.jsonl}
rollout: {tasks: {default: {reward: "rewards.py:reward"}}}
"""


def tolerance(folder: Path, *overrides: str, devices: tuple[str, ...] = ()) -> float:
    """Return the tolerance in the config of a generation server."""
    file = folder / "run.yaml"
    file.write_text(CONFIG)
    specs = plan(load_experiment(file, overrides), attempt=1, num_prompts=100, devices=devices)
    config = next(spec.config for spec in specs if spec.kind == "generation_server")
    assert isinstance(config, GenerationServerConfig)
    return config.verify_tolerance


def test_the_default_tolerance_depends_on_the_dtypes(tmp_path: Path) -> None:
    on = "weights.verify_logprobs=true"
    assert tolerance(tmp_path) == tolerance(tmp_path, on) == 1e-3
    assert tolerance(tmp_path, "weights.verify_logprobs=false") == 0.0
    assert tolerance(tmp_path, on, "generation.dtype=bfloat16") == 0.3
    assert tolerance(tmp_path, on, "train.dtype=bfloat16") == 0.3
    assert tolerance(tmp_path, on, "generation.dtype=bfloat16", "weights.verify_tolerance=0.5") == 0.5
    assert tolerance(tmp_path, "weights.verify_tolerance=0.5") == 0.5
    float32 = on, "generation.dtype=float32", "train.dtype=float32"
    assert tolerance(tmp_path, *float32, devices=("0",)) == 0.3  # TF32 has a third of float32's digits
    assert tolerance(tmp_path, *float32, "train.tf32=false", devices=("0",)) == 1e-3


@pytest.mark.parametrize(
    ("overrides", "is_on"),
    [
        ([], True),
        (["allocation=sglang.d1+d1"], True),
        (["generation.interrupt=in_place"], True),
        (["allocation=sglang.d1+d1", "generation.interrupt=in_place"], False),
        (["mode=rollout_only"], False),
    ],
)
def test_the_check_is_on_wherever_it_is_possible(tmp_path: Path, overrides: list[str], is_on: bool) -> None:
    """A config that does not name it is never refused because of it."""
    assert (tolerance(tmp_path, *overrides) > 0) == is_on


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["mode=rollout_only"], "weights.verify_logprobs=True: compares servers with a trainer, and mode=rollout_only"),
        (
            ["allocation=sglang.d1+d1", "generation.interrupt=in_place"],
            "weights.verify_logprobs=True: SGLang scores nothing while it is paused in place",
        ),
        (["weights.verify_tolerance=-1"], "weights.verify_tolerance=-1.0: must not be negative"),
        (["runtime.max_restarts=-1"], "runtime.max_restarts=-1: must not be negative"),
    ],
)
def test_configs_that_cannot_be_verified_are_refused(tmp_path: Path, overrides: list[str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tolerance(tmp_path, "weights.verify_logprobs=true", *overrides)
    assert told in str(caught.value)
