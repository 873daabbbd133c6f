"""Settings of the KL penalty in the reward."""

from __future__ import annotations

import math
from typing import Literal

from strop.config.sections import section
from strop.utils.field_types import NonNegativeFloat, PositiveFloat, PositiveInt

MAX_RELATIVE_ERROR = 0.2
"""Bound on the relative distance from the target that one update of an adaptive coefficient answers to."""


@section("algorithm.kl_ctrl")
class KlControlConfig:
    """The coefficient of the KL penalty in the reward, and whether it follows the KL that is seen."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: always kl_coef. adaptive: raised while the KL is above target_kl, lowered while it is below."""
    kl_coef: NonNegativeFloat = 0.001
    """The coefficient, in reward per nat; of an adaptive one, where it starts."""
    horizon: PositiveInt = 10_000
    """Samples in which an adaptive coefficient changes by at most a fifth of itself."""
    target_kl: PositiveFloat = 0.1
    """KL per token that an adaptive coefficient steers towards, in nats."""

    def __post_init__(self) -> None:
        if self.type == "adaptive" and self.kl_coef == 0:
            raise ValueError(
                "algorithm.kl_ctrl.kl_coef is 0, and an adaptive coefficient is changed by factors, so it "
                "would stay 0: start above 0, for example at 0.001"
            )


def check_horizon(horizon: int, num_samples: int) -> None:
    """Refuse a step so large beside the horizon that an adaptive coefficient could become 0 or negative.

    Raises:
        ValueError: it is.
    """
    if MAX_RELATIVE_ERROR * num_samples >= horizon:
        raise ValueError(
            f"algorithm.kl_ctrl.horizon is {horizon} samples, but one step has {num_samples}, so one update could turn "
            f"the coefficient negative: set it above {math.floor(MAX_RELATIVE_ERROR * num_samples)}, usually to many "
            f"steps' samples"
        )
