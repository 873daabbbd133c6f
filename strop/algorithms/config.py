"""The numbers of the algorithm, as a user sets them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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
class KlControlConfig:
    """The coefficient of the KL penalty in the reward, and whether it follows the KL that is seen."""

    type: Literal["fixed", "adaptive"] = "fixed"
    """fixed: always kl_coef. adaptive: raised while the KL is above target_kl, lowered while it is below."""
    kl_coef: float = 0.001
    """The coefficient, in reward per nat; of an adaptive one, where it starts."""
    horizon: int = 10_000
    """Samples in which an adaptive coefficient changes by at most a fifth of itself."""
    target_kl: float = 0.1
    """KL per token that an adaptive coefficient steers towards, in nats."""

    def __post_init__(self) -> None:
        if self.type not in ("fixed", "adaptive"):
            raise ValueError(f"algorithm.kl_ctrl.type is {self.type!r}; use fixed or adaptive")
        if not (math.isfinite(self.kl_coef) and self.kl_coef >= 0):
            raise ValueError(
                f"algorithm.kl_ctrl.kl_coef is {self.kl_coef}, but a penalty has a finite coefficient of at "
                f"least 0"
            )
        if self.type == "adaptive" and self.kl_coef == 0:
            raise ValueError(
                "algorithm.kl_ctrl.kl_coef is 0, and an adaptive coefficient is changed by factors, so it "
                "would stay 0: start above 0, for example at 0.001"
            )
        if self.horizon < 1:
            raise ValueError(f"algorithm.kl_ctrl.horizon is {self.horizon} samples; use at least 1")
        if not (math.isfinite(self.target_kl) and self.target_kl > 0):
            raise ValueError(
                f"algorithm.kl_ctrl.target_kl is {self.target_kl}, but the KL is compared with it as a ratio: "
                f"use a finite number above 0"
            )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages, and advantages a loss."""

    adv_estimator: str = "grpo"
    """Advantage estimator by its registered name: gae, grpo, rloo, reinforce_plus_plus. One that needs
    values (gae) brings a critic into the run."""
    norm_adv_by_std: bool = True
    """Divide a group's centered rewards by their standard deviation. False is the Dr. GRPO advantage."""
    gamma: float = 1.0
    """Discount of later rewards, per sampled token: gae and reinforce_plus_plus."""
    lam: float = 1.0
    """GAE's lambda: 1 takes the rewards that came, 0 the critic's word one token on."""
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
    use_kl_in_reward: bool = False
    """Take a KL penalty between the policy and the frozen reference model off the reward of each token. May
    stand beside use_kl_loss; then both act."""
    kl_penalty: KlKind = "kl"
    """KL estimator of that penalty, by the same names as kl_loss_type."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    """Coefficient of that penalty."""
    cliprange_value: float = 0.5
    """The critic's new value counts as moved by at most this from the old one; .inf never clips."""
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
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"algorithm.{name} is {getattr(self, name)}, but it must lie between 0 and 1; use 1.0 for "
                    f"responses that are rewarded at their end"
                )
        if not self.cliprange_value > 0:
            raise ValueError(
                f"algorithm.cliprange_value is {self.cliprange_value}, but a range within which the critic "
                f"may move is above 0; use 0.5, or .inf to never clip"
            )
        self._check_aggregation()
        for name in ("kl_loss_type", "kl_penalty"):
            if getattr(self, name) not in KL_KINDS:
                raise ValueError(f"algorithm.{name} is {getattr(self, name)!r}; known: {', '.join(KL_KINDS)}")

    def _check_aggregation(self) -> None:
        if self.loss_agg_mode not in AGGREGATION_MODES:
            raise ValueError(
                f"algorithm.loss_agg_mode is {self.loss_agg_mode!r}; known: {', '.join(AGGREGATION_MODES)}"
            )
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
