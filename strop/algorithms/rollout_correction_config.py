"""Settings of rollout correction: importance weights, their bounds, and rejection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from strop.config.sections import section
from strop.utils.field_types import PositiveShare

if TYPE_CHECKING:
    from strop.algorithms.config import AlgorithmConfig

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
KINDS = ("k1", "k2", "k3")
STATISTICS: tuple[str, ...] = tuple(
    f"{level}_{kind}" for level in LEVELS for kind in KINDS if (level, kind) != ("seq_max", "k1")
)
"""Statistics that `reject` can bound. The largest k1 of a row is missing: k1 has a sign, and the ratio that is
far off below would pass."""


_AROUND_1 = "the ratio is 1 where trainer and rollout agree"


@dataclass(frozen=True, kw_only=True)
class RejectRule:
    """Parsed entry of `reject`: its statistic, and the range in which a token or sample stays."""

    level: str
    """token, seq_sum, seq_mean or seq_max."""
    kind: str
    """k1, k2 or k3."""
    lower: float
    """k1: smallest ratio that stays. Others: minus infinity, since a divergence has no lower bound."""
    upper: float
    """k1: largest ratio that stays. Others: largest value of the statistic that stays."""


@section("algorithm.correction")
class CorrectionConfig:
    """Correction for tokens that another policy than the trainer's sampled. Off by default.

    With ratio = exp(old_log_probs - rollout_log_probs): of a token, of a whole response (`sequence`: the
    product over its tokens) or the geometric mean of a response's tokens (`geometric`).
    """

    weights: Literal["none", "token", "sequence", "geometric"] = "none"
    """Ratio that multiplies a token's loss; none: no weights."""
    mode: Literal["truncate", "mask"] = "truncate"
    """truncate: a ratio above `upper` becomes `upper` (TIS). mask: a ratio outside [lower, upper] becomes 0
    (MIS, IcePop); the token still counts in the loss's denominators, unlike a rejected one."""
    upper: Annotated[float, Ge(1), _AROUND_1] = 2.0
    """Largest weight."""
    lower: Annotated[PositiveShare, _AROUND_1] = 0.5
    """Smallest weight of mode=mask; a smaller one becomes 0."""
    normalize: bool = False
    """Divide the weights by their mean over the batch: over tokens, or over samples where a sample has one."""
    reject: dict[str, Any] = field(default_factory=dict)
    """Statistics and their bounds; tokens, or whole samples, beyond any of them are not trained on and count
    in no denominator. {seq_mean_k1: [0.999, 1.001]}: smallest and largest ratio; one number u stands for
    [1/u, u]. {seq_mean_k3: 0.01}: largest value of the statistic, which k2 and k3 take alone."""

    def __post_init__(self) -> None:
        if self.weights == "none" and (self.mode == "mask" or self.normalize):
            key, value = ("mode", "mask") if self.mode == "mask" else ("normalize", "true")
            raise ValueError(
                f"algorithm.correction.{key} is {value}, but algorithm.correction.weights=none has no weights "
                f"for it: set weights to token, sequence or geometric, or remove {key}"
            )
        if self.weights == "none" and self.upper != 2.0:
            raise ValueError(
                f"algorithm.correction.upper is {self.upper}, but algorithm.correction.weights=none has no weights "
                f"to bound: set weights to token, sequence or geometric, or remove upper"
            )
        if self.lower != 0.5 and (self.weights == "none" or self.mode != "mask"):
            reason = (
                "algorithm.correction.weights=none has no weights"
                if self.weights == "none"
                else "algorithm.correction.mode=truncate has no lower bound"
            )
            raise ValueError(
                f"algorithm.correction.lower is {self.lower}, but {reason}: set "
                f"algorithm.correction.mode=mask with weights, or remove lower"
            )
        for name, bound in self.reject.items():
            read_rule(name, bound)

    @property
    def is_on(self) -> bool:
        """Some tokens are weighted or rejected."""
        return self.weights != "none" or bool(self.reject)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the correction adds to a batch."""
        return ("loss_mask",) if self.weights == "none" else ("loss_mask", "rollout_is_weights")

    @property
    def rules(self) -> Mapping[str, RejectRule]:
        """The entries of `reject`, read, by statistic."""
        return {name: read_rule(name, bound) for name, bound in self.reject.items()}


def check_correction(algorithm: AlgorithmConfig) -> None:
    """Refuse weights where the ratio of the loss corrects already, as a ValueError."""
    if algorithm.correction.weights != "none" and algorithm.is_ratio_to_rollout:
        raise ValueError(
            f"algorithm.correction.weights is {algorithm.correction.weights}, but with "
            f"algorithm.old_log_probs=rollout the ratio of algorithm.policy_loss={algorithm.policy_loss} is taken "
            f"against the rollout already and would be corrected twice: set algorithm.correction.weights=none, "
            f"algorithm.old_log_probs=recompute, or algorithm.policy_loss=reinforce"
        )


def read_rule(name: str, bound: Any) -> RejectRule:
    """One entry of `reject`.

    Raises:
        ValueError: unknown statistic, or a bound that is none.
    """
    key = f"algorithm.correction.reject.{name}"
    if name == "seq_max_k1":
        raise ValueError(
            f"{key} is not offered, because k1 has a sign and its largest value would overlook ratios far "
            f"below 1: use token_k1 to reject single tokens, or seq_max_k2 to reject samples by their worst token"
        )
    if name not in STATISTICS:
        raise ValueError(f"{key}: there is no statistic {name!r}; known: {', '.join(STATISTICS)}")
    level, _, kind = name.rpartition("_")
    if kind == "k1":
        lower, upper = _ratio_range(key, bound)
        return RejectRule(level=level, kind=kind, lower=lower, upper=upper)
    if not (_is_number(bound) and 0 < bound < math.inf):
        raise ValueError(
            f"{key} is {bound!r}, but {kind} is a divergence, 0 where trainer and rollout agree: give its "
            f"largest value alone, a finite number above 0, for example 0.01"
        )
    return RejectRule(level=level, kind=kind, lower=-math.inf, upper=float(bound))


def _ratio_range(key: str, bound: Any) -> tuple[float, float]:
    if _is_number(bound):
        if not bound > 1:
            raise ValueError(
                f"{key} is {bound!r}; one number u stands for ratios from 1/u to u, so it must be above 1, for "
                f"example 2.0; or give both: [0.5, 2.0]"
            )
        return 1 / float(bound), float(bound)
    is_pair = isinstance(bound, list | tuple) and len(bound) == 2 and all(map(_is_number, bound))
    if not is_pair:
        raise ValueError(
            f"{key} is {bound!r}; give the smallest and the largest ratio that stay as a list, for example "
            f"[0.5, 2.0], or one number u for [1/u, u]"
        )
    lower, upper = bound
    if not 0 < lower <= 1 <= upper:
        raise ValueError(
            f"{key} is [{lower}, {upper}], but the ratio is 1 where trainer and rollout agree: use a lower "
            f"bound above 0 and at most 1, and an upper bound of at least 1"
        )
    return float(lower), float(upper)


def _is_number(value: object) -> bool:
    """A number that can be compared: neither a boolean nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
