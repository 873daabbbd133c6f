"""The coefficient of the KL penalty in the reward: fixed, or adaptive towards a target KL.

The coefficient is state of the run: it lives with the loop, goes into checkpoints as plain numbers, and is handed to
the penalty (`reward_kl.apply_kl_penalty`) as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from strop.algorithms.reward_kl_config import MAX_RELATIVE_ERROR, KlControlConfig, check_horizon
from strop.utils.metrics import Metric

REWARD_KL_COEF = Metric(
    "actor/reward_kl_penalty_coeff", "1", "factor of the KL in the reward, when there is one"
)


class FixedKLController:
    """A coefficient that stays as it was set."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef
        """The coefficient of the next step, in reward per nat."""

    def update(self, current_kl: float, num_samples: int) -> None:
        """Nothing: the KL of a step changes no fixed coefficient."""

    def state(self) -> dict[str, float]:
        """Empty: the configuration holds the coefficient."""
        return {}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Nothing: the configuration holds the coefficient."""


class AdaptiveKLController:
    """A coefficient that grows while the KL is above its target and shrinks while it is below.

        coef <- coef * (1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon)

    Its value is part of a checkpoint: without it, a resumed run would start again from kl_coef.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.
    """

    def __init__(self, kl_coef: float, *, target_kl: float, horizon: int) -> None:
        self.value = kl_coef
        """The coefficient of the next step, in reward per nat."""
        self._target_kl, self._horizon = target_kl, horizon

    def update(self, current_kl: float, num_samples: int) -> None:
        """Move the coefficient by the KL of a step of `num_samples` samples.

        Raises:
            ValueError: the KL is not finite, or the step is so large beside the horizon that the coefficient could
                become 0 or negative.
        """
        if not math.isfinite(current_kl):
            raise ValueError(
                f"the KL of the policy to the reference is {current_kl}, which no coefficient can follow; "
                f"look at the log-probs of both"
            )
        check_horizon(self._horizon, num_samples)
        error = min(max(current_kl / self._target_kl - 1, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
        self.value *= 1 + error * num_samples / self._horizon

    def state(self) -> dict[str, float]:
        """Plain numbers for a checkpoint."""
        return {"kl_coef": self.value}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Continue from `state()`.

        Raises:
            ValueError: the state is that of a fixed coefficient.
        """
        if "kl_coef" not in state:
            raise ValueError(
                f"the checkpoint holds no coefficient of the KL penalty (found: {sorted(state) or 'nothing'}); "
                f"it is of a run with algorithm.kl_ctrl.type=fixed, so resume it with that"
            )
        self.value = float(state["kl_coef"])


KLController = FixedKLController | AdaptiveKLController


def kl_controller(settings: KlControlConfig) -> KLController:
    """The controller that algorithm.kl_ctrl asks for."""
    if settings.type == "adaptive":
        return AdaptiveKLController(settings.kl_coef, target_kl=settings.target_kl, horizon=settings.horizon)
    return FixedKLController(settings.kl_coef)
