"""The numbers of the algorithm, as a user sets them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
KlKind = Literal[
    "k1",
    "kl",
    "abs",
    "k2",
    "mse",
    "k3",
    "low_var_kl",
    "k1+",
    "kl+",
    "abs+",
    "k2+",
    "mse+",
    "k3+",
    "low_var_kl+",
]

AGGREGATION_MODES: tuple[str, ...] = get_args(AggregationMode)
KL_KINDS: tuple[str, ...] = get_args(KlKind)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages, and advantages a loss."""

    adv_estimator: str = "grpo"
    """Advantage estimator by its registered name: grpo, rloo, reinforce_plus_plus."""
    norm_adv_by_std: bool = True
    """Divide a group's centered rewards by their standard deviation. False is the Dr. GRPO advantage."""
    policy_loss: str = "vanilla"
    """Policy loss by its registered name: vanilla is PPO's clipped surrogate."""
    clip_ratio: float = 0.2
    """The ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]; the two keys below override one side."""
    clip_ratio_low: float | None = None
    """Lower clip range; not set: clip_ratio. From 1 upwards the lower side never clips."""
    clip_ratio_high: float | None = None
    """Upper clip range; not set: clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual clip: where the advantage is negative, the loss of a token is at most -advantage times this."""
    loss_agg_mode: AggregationMode = "token-mean"
    """How per-token terms become one loss. Denominators count over the whole optimizer batch."""
    loss_scale_factor: float | None = None
    """Constant divisor of seq-mean-token-sum-norm, in tokens; usually data.max_response_tokens."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss; positive values keep the policy more random."""
    use_kl_loss: bool = False
    """Add a KL term between the policy and the frozen reference model to the loss."""
    kl_loss_coef: float = 0.001
    """Weight of that KL term."""
    kl_loss_type: KlKind = "low_var_kl"
    """KL estimator: k1 (kl), abs, k2 (mse), k3 (low_var_kl); a final + takes its value and k2's gradient."""
    old_log_probs: Literal["recompute", "rollout"] = "recompute"
    """Where the denominator of the ratio comes from: the trainer's own weights at the start of the step,
    or the log-probs recorded while sampling."""

    def __post_init__(self) -> None:
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"algorithm.{name} is {value}, but a clip range is a number of at least 0; usual values "
                    f"lie between 0.1 and 0.3"
                )
        if not self.clip_ratio_c > 1:
            raise ValueError(
                f"algorithm.clip_ratio_c is {self.clip_ratio_c}, but dual clip needs a value above 1: at 1 "
                f"or below, it would remove the gradient of tokens whose ratio has not moved. Use 3.0"
            )
        for name in ("entropy_coeff", "kl_loss_coef"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"algorithm.{name} is {getattr(self, name)}: use a finite number")
        self._check_aggregation()

    def _check_aggregation(self) -> None:
        if self.loss_agg_mode not in AGGREGATION_MODES:
            raise ValueError(
                f"algorithm.loss_agg_mode is {self.loss_agg_mode!r}; known: {', '.join(AGGREGATION_MODES)}"
            )
        if self.kl_loss_type not in KL_KINDS:
            raise ValueError(f"algorithm.kl_loss_type is {self.kl_loss_type!r}; known: {', '.join(KL_KINDS)}")
        wants_scale = self.loss_agg_mode == "seq-mean-token-sum-norm"
        if wants_scale and self.loss_scale_factor is None:
            raise ValueError(
                "algorithm.loss_agg_mode=seq-mean-token-sum-norm divides by a constant, but "
                "algorithm.loss_scale_factor is not set: set it, usually to data.max_response_tokens"
            )
        if not wants_scale and self.loss_scale_factor is not None:
            raise ValueError(
                f"algorithm.loss_scale_factor is {self.loss_scale_factor}, but only "
                f"loss_agg_mode=seq-mean-token-sum-norm uses it and loss_agg_mode is {self.loss_agg_mode}: "
                f"remove it, or change the mode"
            )
        if self.loss_scale_factor is not None and not (
            math.isfinite(self.loss_scale_factor) and self.loss_scale_factor > 0
        ):
            raise ValueError(
                f"algorithm.loss_scale_factor is {self.loss_scale_factor}: it divides the loss, so use a "
                f"finite number above 0, usually data.max_response_tokens"
            )

    @property
    def clip_low(self) -> float:
        """Lower clip range in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
