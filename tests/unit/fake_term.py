"""A loss term that no run uses: it pulls the policy towards the reference by the squared difference of their logprobs. One
function, and one row in TERMS, as a new term needs."""

from collections.abc import Mapping

from torch import Tensor

from asyncrl.algorithms.packed import masked_sum
from asyncrl.algorithms.ppo import LossTerm, Term
from asyncrl.config.schema import PPOConfig

KIND = "pull"
COEF = 0.3


def pull_term(outputs: Mapping[str, Tensor], data: Mapping[str, Tensor], _: Tensor, config: PPOConfig) -> Term:
    mask_T = data["loss_mask"].bool()
    difference_T = (outputs["logprobs"] - data["packed_ref_logprobs"]).masked_fill(~mask_T, 0.0)
    return Term(COEF * difference_T.square(), {"pull": masked_sum(difference_T.abs(), mask_T)})


PULL = LossTerm(pull_term, keys=("packed_ref_logprobs",))
