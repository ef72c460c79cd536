"""The tables of loss terms and of metrics: the contract that each row keeps, with the tables' rows and with one more of each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from fake_metric import FALLEN, NAME
from fake_term import COEF, KIND, PULL
from test_curves import curves_of, step
from torch import Tensor

from asyncrl.algorithms.metrics import MAX, METRICS, Metric
from asyncrl.algorithms.ppo import TERMS, LossTerm, PPOLoss, Term, loss_keys
from asyncrl.cli.curves import PANELS, picture
from asyncrl.cli.run_files import read_runs
from asyncrl.config.schema import PPOConfig
from asyncrl.runtime.metrics import MetricsWriter

torch.set_num_threads(1)

CONFIG = PPOConfig(kl_coef=0.1, kl_in="loss", kl_estimator="k2", entropy_coef=0.2)  # all terms are on
LENGTHS = [5, 1, 9, 4]
DENOMINATOR = 10.0
BASE_KEYS = {"loss_mask", "advantages", "packed_logprobs", "proximal_logprobs"}
Tensors = dict[str, Tensor]

with_each_term = pytest.mark.parametrize("term", [*TERMS.values(), PULL], ids=[*TERMS, KIND])


@pytest.fixture(autouse=True)
def one_more_row_in_each_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TERMS, KIND, PULL)
    monkeypatch.setitem(METRICS, NAME, FALLEN)


def cu_seqlens(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def batch() -> tuple[Tensors, Tensors]:
    """Outputs and data of sequences, of which one has no trained token."""
    random = torch.Generator().manual_seed(1)
    mask = torch.rand(sum(LENGTHS), generator=random) < 0.7
    mask[LENGTHS[0]] = False
    names = ("logprobs", "packed_logprobs", "proximal_logprobs", "packed_ref_logprobs", "advantages")
    data: Tensors = {name: -2 + 0.4 * torch.randn(len(mask), generator=random) for name in names}
    outputs = {"logprobs": data.pop("logprobs"), "entropy": torch.rand(len(mask), generator=random)}
    return outputs, {**data, "loss_mask": mask}


def gradients(loss: Tensor, outputs: Tensors) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(outputs.values()), allow_unused=True)
    return [torch.zeros(sum(LENGTHS)) if grad is None else grad for grad in found]


def computed(term: LossTerm, *, unmasked: float | None = None) -> tuple[Term, list[Tensor]]:
    """The term of the batch, and its gradients. unmasked: replaces every value of the tokens that are not trained."""
    outputs, data = batch()
    mask = data["loss_mask"]
    if unmasked is not None:
        outputs, data = (
            {name: value if value is mask else value.masked_fill(~mask, unmasked) for name, value in tensors.items()}
            for tensors in (outputs, data)
        )
    outputs = {name: value.requires_grad_() for name, value in outputs.items()}
    data = {key: data[key] for key in BASE_KEYS | set(term.keys)}  # only the keys that the row names
    made = term.compute(outputs, data, cu_seqlens(LENGTHS), CONFIG)
    return made, gradients(made.loss_T.sum(), outputs)


@with_each_term
def test_a_term_is_a_loss_of_each_token_with_statistics_without_gradient(term: LossTerm) -> None:
    made, grads = computed(term)
    mask = batch()[1]["loss_mask"]
    assert made.loss_T.dtype == torch.float32
    assert made.loss_T.shape == mask.shape
    assert made.loss_T.requires_grad
    assert not made.loss_T[~mask].any()
    assert any(grad[mask].any() for grad in grads)
    assert not any(grad[~mask].any() for grad in grads)
    assert all(value.ndim == 0 and not value.requires_grad for value in made.stats.values())


@with_each_term
@pytest.mark.parametrize("unmasked", [math.nan, math.inf])
def test_tokens_that_are_not_trained_change_nothing(term: LossTerm, unmasked: float) -> None:
    (plain, plain_grads), (made, grads) = computed(term), computed(term, unmasked=unmasked)
    assert torch.equal(made.loss_T, plain.loss_T)
    assert {name: float(value) for name, value in made.stats.items()} == pytest.approx(
        {name: float(value) for name, value in plain.stats.items()}
    )
    assert all(map(torch.equal, grads, plain_grads))


@with_each_term
def test_a_term_that_is_off_changes_no_bit_and_reads_no_key(term: LossTerm, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss() -> float:
        outputs, data = batch()
        return float(
            PPOLoss(CONFIG, DENOMINATOR)(outputs, {k: data[k] for k in loss_keys(CONFIG)}, cu_seqlens(LENGTHS))[0]
        )

    name = next(name for name, row in TERMS.items() if row is term)
    monkeypatch.setitem(TERMS, "unused", LossTerm(term.compute, lambda _: False, ("missing",)))
    with_off = loss()
    assert "missing" not in loss_keys(CONFIG)
    monkeypatch.delitem(TERMS, "unused")
    assert loss() == with_off
    monkeypatch.delitem(TERMS, name)
    assert name == "policy" or loss() != with_off


def test_the_loss_and_its_statistics_add_up_over_micro_batches() -> None:
    outputs, data = batch()
    whole_loss, whole = PPOLoss(CONFIG, DENOMINATOR)(outputs, data, cu_seqlens(LENGTHS))
    parts, start = [], 0
    for lengths in (LENGTHS[:2], LENGTHS[2:]):
        here = slice(start, start := start + sum(lengths))
        part = [{name: value[here] for name, value in tensors.items()} for tensors in (outputs, data)]
        parts.append(PPOLoss(CONFIG, DENOMINATOR)(*part, cu_seqlens(lengths)))
    assert float(sum(loss for loss, _ in parts)) == pytest.approx(float(whole_loss), rel=1e-5)
    assert {"pull", "fallen_share"} < whole.keys()
    for name, value in whole.items():
        values = [float(stats[name]) for _, stats in parts]
        assert (max(values) if name.endswith(MAX) else sum(values)) == pytest.approx(float(value), rel=1e-5), name


def test_the_loss_is_the_sum_of_its_terms() -> None:
    outputs, data = batch()
    loss, stats = PPOLoss(CONFIG, DENOMINATOR)(outputs, data, cu_seqlens(LENGTHS))
    of_terms = [float(term.compute(outputs, data, cu_seqlens(LENGTHS), CONFIG).loss_T.sum()) for term in TERMS.values()]
    assert float(loss) == pytest.approx(sum(of_terms) / DENOMINATOR, rel=1e-5)
    difference = (outputs["logprobs"] - data["packed_ref_logprobs"])[data["loss_mask"]]
    assert of_terms[-1] == pytest.approx(COEF * float(difference.square().sum()), rel=1e-5)
    assert float(stats["pull"]) == pytest.approx(float(difference.abs().sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "metric"), [entry for entry in [*METRICS.items(), (NAME, FALLEN)] if entry[1].of is not None]
)
@pytest.mark.parametrize("decoupled", [True, False])
def test_a_metric_of_tokens_is_reported_by_configs_that_have_it(name: str, metric: Metric, *, decoupled: bool) -> None:
    outputs, data = batch()
    config = PPOConfig(use_decoupled_loss=decoupled)
    _, stats = PPOLoss(config, DENOMINATOR)(outputs, data, cu_seqlens(LENGTHS))
    only_decoupled = name.startswith(("actor/behav_", "actor/cap_"))
    assert (name.removeprefix("actor/") in stats) == (decoupled or not only_decoupled)
    assert metric.panel in ("", *(panel for panel, *_ in PANELS))


def test_a_metric_reaches_files_and_the_picture(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, attempt=1, tensorboard=True)
    writer.write(1, {**step(1), NAME: 0.25})
    writer.close()
    assert any(NAME.encode() in file.read_bytes() for file in (tmp_path / "tensorboard" / "attempt_1").iterdir())
    shown = picture(read_runs([tmp_path]))
    assert curves_of(shown, "clip_share")[tmp_path.name, FALLEN.curve] == [(1, 25)]
