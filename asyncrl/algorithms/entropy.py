"""The coefficient of the entropy bonus, adapted so that the policy's entropy does not fall below a target."""

from __future__ import annotations

import math
from collections.abc import Mapping


class EntropyController:
    """Raises the coefficient while the entropy is below the target, and lowers it while it is above:

        c_{k+1} = max(0, c_k + step)   if H_k < target
                  max(0, c_k - step)   if H_k > target
        coef_{k+1} = c_{k+1} if H_k <= target, else 0

    H_k: mean entropy of train step k, in nats per token. c_0 is given, and coef_0 = 0. So the bonus acts only below the target, and
    the coefficient that it needed there is kept. This is the adaptive entropy control of Skywork-OR1 (arXiv:2505.22312), except
    that there H_k decides about step k itself. `update` takes a mean over all ranks, so that every rank has the same coefficient.
    """

    def __init__(self, coef: float, target: float, step: float) -> None:
        self.target = target
        self.step = step
        self.kept = coef  # c_k
        self.is_on = False  # whether the entropy of the last step was at most the target

    @property
    def coef(self) -> float:
        return self.kept if self.is_on else 0.0

    def update(self, entropy: float) -> None:
        """Call once per train step. entropy: mean over its tokens, in nats. A value that is not finite changes nothing."""
        if not math.isfinite(entropy):
            return
        self.is_on = entropy <= self.target
        if entropy != self.target:
            self.kept = max(0.0, self.kept + (self.step if self.is_on else -self.step))

    def state(self) -> dict[str, float]:
        return {"entropy_coef": self.kept, "entropy_is_on": float(self.is_on)}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore what `state` returned."""
        self.kept, self.is_on = state["entropy_coef"], bool(state["entropy_is_on"])
