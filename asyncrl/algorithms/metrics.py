"""The metrics that commands show, and how those of the policy loss are computed. No torch at import: commands read the table, too.

A metric has one name in metrics.jsonl, TensorBoard, trackers and `plot --metric`. A row of METRICS adds a metric of the
trained tokens: the function `of`, and the curve that `asyncrl-launch plot` draws. Metrics without `of` come from elsewhere:
rewards, lengths, ages and times from master/report.py, statistics of a batch's groups from model/interfaces.py (`batch_stats`),
statistics that decide something from the code that decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MAX = "_max"  # end of the names of maxima; all other metrics of tokens are means


@dataclass(frozen=True)
class TokenLoss:
    """Result of `policy_token_loss`, per token; 0 or False where mask_T is False. Only `loss_T` carries a gradient."""

    loss_T: Tensor
    ratio_T: Tensor  # current / anchor
    weight_T: Tensor  # proximal / behaviour, before the bounds; 1 with the naive loss
    clipped_T: Tensor  # bool: clip_loss took the clipped term, or cispo_loss clipped the ratio
    dual_clipped_T: Tensor  # bool: the dual clip lowered the loss
    capped_T: Tensor  # bool: the behaviour weight is beyond its bounds


@dataclass(frozen=True)
class Tokens:
    """The tokens of a micro-batch, as a metric sees them: float32, [T], packed. Those that are not trained may be NaN."""

    logprobs_T: Tensor  # of the current policy
    anchor_T: Tensor  # logprobs of the anchor (`anchor_key`)
    behav_T: Tensor | None  # logprobs of the behaviour policy; None: the naive loss, which does not compare with it
    loss: TokenLoss


@dataclass(frozen=True)
class Metric:
    """One number of a train step or an evaluation."""

    panel: str = ""  # name of the panel in which `plot` draws it (cli/curves.py PANELS); "": only with --metric
    curve: str = ""  # what the legend calls it
    percent: bool = False  # a share, drawn in percent
    optional: bool = False  # only some configs have it
    # The metric of each token, [T], float32 or bool; None: this config does not have it. The step's metric is the mean over all
    # trained tokens, or with a name that ends in MAX the maximum, at least 0. It runs without gradient, on every micro-batch.
    of: Callable[[Tokens], Tensor | None] | None = None


# Modes of evaluations in the names of their metrics. ema: of the actor's moving average (train.ema)
EVAL_MODES = ("sampled", "greedy", "ema_sampled", "ema_greedy")


class EvalName(NamedTuple):
    """The name of a metric of an evaluation: eval/MODE_VALUE for the set of eval.prompts, eval/SET/MODE_VALUE for another one. The
    metrics of one of several tasks of a set end in .TASK."""

    eval_set: str  # has no dot and no slash
    mode: str  # one of EVAL_MODES
    value: str  # has no dot and no slash
    task: str = ""  # "": all prompts of the set

    def __str__(self) -> str:
        place = f"eval/{self.eval_set}" if self.eval_set else "eval"
        return f"{place}/{self.mode}_{self.value}{f'.{self.task}' if self.task else ''}"

    @classmethod
    def parse(cls, name: str) -> EvalName | None:
        """Inverse of `str`. None: the name of no metric of an evaluation."""
        group, _, rest = name.partition("/")
        place, _, task = rest.partition(".")
        eval_set, _, own = place.rpartition("/")
        mode = next((mode for mode in EVAL_MODES if own.startswith(f"{mode}_")), "")
        return cls(eval_set, mode, own.removeprefix(f"{mode}_"), task) if group == "eval" and mode else None


def at_most_k(names: Iterable[str], reward: EvalName) -> list[EvalName]:
    """Of the metrics beside this one: pass@k and majority@k of the largest k that there is."""
    beside = [name for name in filter(None, map(EvalName.parse, names)) if name._replace(value=reward.value) == reward]
    most: dict[str, tuple[int, EvalName]] = {}
    for name in beside:
        estimator, at, k = name.value.partition("@")
        if at and k.isdecimal():
            most[estimator] = max(most.get(estimator, (0, name)), (int(k), name))
    return [name for _, name in most.values()]


METRICS = {  # group/name; evaluations have the group eval (EvalName)
    "reward/mean": Metric("reward", "train batch, sampled"),
    "eval/sampled_reward": Metric("reward", "evaluation, sampled"),
    "eval/greedy_reward": Metric("reward", "evaluation, greedy"),
    "offpolicy/head_mean": Metric("off_policyness", "mean"),
    "offpolicy/head_max": Metric("off_policyness", "oldest of the batch"),
    "length/response_mean": Metric("response_length", "mean"),
    "length/response_max": Metric("response_length", "longest of the batch"),
    "reward/equal_group_share": Metric("without_signal", "groups with equal rewards", percent=True, optional=True),
    "length/truncated_share": Metric("without_signal", "responses cut off", percent=True, optional=True),
    "actor/entropy": Metric("entropy"),
    "actor/approx_kl": Metric("kl", "anchor to current"),
    # k1 estimate of KL(behaviour || proximal)
    "actor/behav_approx_kl": Metric(
        "kl",
        "behaviour to proximal",
        optional=True,
        of=lambda tokens: tokens.behav_T - tokens.anchor_T if tokens.behav_T is not None else None,
    ),
    "kl/token_mean": Metric("kl", "policy to reference", optional=True),
    "actor/grad_norm": Metric("grad_norm"),
    "actor/policy_loss": Metric(of=lambda tokens: tokens.loss.loss_T),
    "actor/clip_share": Metric("clip_share", "clipped", percent=True, of=lambda tokens: tokens.loss.clipped_T),
    "actor/dual_clip_share": Metric(of=lambda tokens: tokens.loss.dual_clipped_T),
    "actor/cap_share": Metric(
        "clip_share",
        "behaviour weight out of bounds",
        percent=True,
        optional=True,
        of=lambda tokens: tokens.loss.capped_T if tokens.behav_T is not None else None,
    ),
    "actor/behav_weight": Metric(
        of=lambda tokens: tokens.loss.weight_T if tokens.behav_T is not None else None,
    ),
    "actor/behav_weight_max": Metric(
        of=lambda tokens: tokens.loss.weight_T if tokens.behav_T is not None else None,
    ),
    # With train.routes: routers that choose other experts than the sampler's. A share of all, and of the tokens that have one
    "actor/other_experts_share": Metric(),
    "actor/other_experts_token_share": Metric(),
    "throughput/tokens_per_s": Metric("tokens"),
    "throughput/train_tokens_per_s_per_device": Metric("device_tokens", "training", optional=True),
    "throughput/generated_tokens_per_s_per_device": Metric("device_tokens", "generation", optional=True),
}
