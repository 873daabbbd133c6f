"""The numbers of the algorithm, as a user sets them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from strop.algorithms.correction_config import CorrectionConfig
from strop.algorithms.distillation_config import DistillationConfig
from strop.algorithms.kl_kinds import KL_KINDS, KlKind

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
Resampling = Literal["none", "pow", "max_min", "max_random"]

AGGREGATION_MODES: tuple[str, ...] = get_args(AggregationMode)
RESAMPLINGS: tuple[str, ...] = get_args(Resampling)


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
class FilterGroupsConfig:
    """DAPO's dynamic sampling: ask for prompts until enough groups of samples can teach."""

    enable: bool = False
    """Leave out groups whose samples all got the same, and sample others in their place."""
    metric: Literal["score", "acc"] = "acc"
    """What is compared within a group: the score, or the scorer's `acc` where it gives one."""
    lowest_mean: float | None = None
    """Leave out groups with a mean below this too: harder than the band of difficulty."""
    highest_mean: float | None = None
    """Leave out groups with a mean above this too: easier than the band."""
    filter: str = ""
    """A filter of your own by its registered name (extensions), which judges the groups that these rules leave;
    empty: none."""
    max_rounds: int = 10
    """Rounds of sampling in one step, each with at most data.prompts_per_step prompts."""
    at_limit: Literal["train", "stop"] = "train"
    """After the last round with too few groups: train on those there are, or end the run."""
    retire_solved: bool = False
    """Do not visit a prompt again once every sample of a group solved it."""
    defer_failed: int = 0
    """Epochs for which a prompt rests after no sample solved it."""

    def __post_init__(self) -> None:
        key = "algorithm.filter_groups"
        if self.metric not in ("score", "acc"):
            raise ValueError(f"{key}.metric is {self.metric!r}; use score or acc")
        if self.at_limit not in ("train", "stop"):
            raise ValueError(f"{key}.at_limit is {self.at_limit!r}; use train or stop")
        if self.max_rounds < 1:
            raise ValueError(f"{key}.max_rounds is {self.max_rounds}; a step needs at least 1")
        if self.defer_failed < 0:
            raise ValueError(f"{key}.defer_failed is {self.defer_failed} epochs; use 0 for no rest")
        low, high = self.lowest_mean, self.highest_mean
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"{key}.lowest_mean is {low}, above highest_mean, which is {high}: no group is between"
            )
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if changed and not self.enable:
            raise ValueError(
                f"{key}.{changed[0]} is set, but {key}.enable is false: set that to true, or remove it"
            )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become advantages, and advantages a loss."""

    adv_estimator: str = "grpo"
    """Advantage estimator by its registered name: gae, grpo, dr_grpo, grpo_passk, gdpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, maxrl, optimal_token_baseline, tir_optimal_token_baseline, or
    one of your own (extensions). One that needs values (gae) brings a critic into the run."""
    norm_adv_by_std: bool = True
    """Divide a group's centered rewards by their standard deviation. False is the Dr. GRPO advantage."""
    gamma: float = 1.0
    """Discount of later rewards, per sampled token: gae and reinforce_plus_plus."""
    lam: float = 1.0
    """GAE's lambda: 1 takes the rewards that came, 0 the critic's word one token on."""
    adv_settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the estimator, by the names of its keyword arguments."""
    reward_keys: tuple[str, ...] = ()
    """Parts of the reward, as the reward function names them in its result (`score` for the score itself), that
    gdpo normalizes each for itself."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each of them; empty: 1 each."""
    policy_loss: str = "vanilla"
    """Policy loss by its registered name: vanilla (PPO's clipped surrogate), gspo, gmpo, cispo, sapo, dppo_tv,
    dppo_kl, dro, gpg (reinforce), clip_cov, kl_cov, or one of your own (extensions)."""
    loss_settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the loss, by the names of its keyword arguments."""
    policy_coef: float = 1.0
    """Weight of the policy loss beside the distillation term; 0: the teacher alone teaches, whatever the rewards."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """A term that pulls the policy towards a teacher (teacher.path)."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """What is done about tokens whose log-probs in the rollout differ from the trainer's."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Which groups of samples are trained on; by default all."""
    reward_shaping: str = ""
    """A function of your own by its registered name (extensions) that changes the rewards of a prompt's samples
    before they are trained on, after reward.weight and reward.overlong_buffer; empty: none."""
    shaping_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of that function, by the names of its keyword arguments."""
    resampling: Resampling = "none"
    """PF-PPO: train on as many samples as there are, drawn with replacement by their scores. pow: in proportion to
    |score|^resampling_power. max_min: the largest and the smallest score alone. max_random: the largest score with
    weight 0.4, every other with 0.1. none: each sample once."""
    resampling_power: float = 2.0
    """Exponent of resampling=pow."""
    resampling_within: Literal["batch", "prompt"] = "batch"
    """What scores are compared with and drawn from: all samples of the step, or those of the same prompt."""
    extensions: tuple[str, ...] = ()
    """Python files with functions of your own (estimators, losses, filters, reward shaping, samplers), which
    register themselves when they are imported."""
    clip_ratio: float = 0.2
    """The ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]; the two keys below override one side."""
    clip_ratio_low: float | None = None
    """Lower clip range; not set: clip_ratio. From 1 upwards the lower side never clips."""
    clip_ratio_high: float | None = None
    """Upper clip range; not set: clip_ratio."""
    clip_ratio_c: float = 3.0
    """Dual clip: where the advantage is negative, the loss of a token is at most -advantage times this."""
    loss_agg_mode: AggregationMode | None = None
    """How per-token terms become one loss, that of the policy and that of the critic. Denominators count over the
    whole optimizer batch. Not set: for both as in the paper of the policy loss (seq-mean-token-mean for gspo, gmpo
    and sapo), else token-mean."""
    loss_scale_factor: float | None = None
    """Constant divisor of seq-mean-token-sum-norm, in tokens. Not set: data.max_response_tokens."""
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
        self._check_reward_parts()
        self._check_correction()
        self._check_policy_coef()
        self._check_resampling()
        if self.shaping_settings and not self.reward_shaping:
            raise ValueError(
                f"algorithm.shaping_settings has {', '.join(self.shaping_settings)}, but algorithm.reward_shaping "
                f"names no function: name it, or remove them"
            )
        for name in ("kl_loss_type", "kl_penalty"):
            if getattr(self, name) not in KL_KINDS:
                raise ValueError(f"algorithm.{name} is {getattr(self, name)!r}; known: {', '.join(KL_KINDS)}")

    def _check_aggregation(self) -> None:
        if self.loss_agg_mode is not None and self.loss_agg_mode not in AGGREGATION_MODES:
            raise ValueError(
                f"algorithm.loss_agg_mode is {self.loss_agg_mode!r}; known: {', '.join(AGGREGATION_MODES)}"
            )
        wants_scale = self.loss_agg_mode == "seq-mean-token-sum-norm"
        if not wants_scale and self.loss_scale_factor is not None:
            raise ValueError(
                f"algorithm.loss_scale_factor is {self.loss_scale_factor}, but only "
                f"loss_agg_mode=seq-mean-token-sum-norm uses it and loss_agg_mode is "
                f"{self.loss_agg_mode or 'not set'}: "
                f"remove it, or change the mode"
            )
        if self.loss_scale_factor is not None and not (
            math.isfinite(self.loss_scale_factor) and self.loss_scale_factor > 0
        ):
            raise ValueError(
                f"algorithm.loss_scale_factor is {self.loss_scale_factor}: it divides the loss, so use a "
                f"finite number above 0, usually data.max_response_tokens"
            )

    def _check_reward_parts(self) -> None:
        if self.reward_weights and len(self.reward_weights) != len(self.reward_keys):
            raise ValueError(
                f"algorithm.reward_weights has {len(self.reward_weights)} numbers for {len(self.reward_keys)} "
                f"algorithm.reward_keys: give one weight per key"
            )
        if len(set(self.reward_keys)) < len(self.reward_keys):
            raise ValueError(f"algorithm.reward_keys names a part twice: {', '.join(self.reward_keys)}")

    def _check_resampling(self) -> None:
        if self.resampling not in RESAMPLINGS:
            raise ValueError(f"algorithm.resampling is {self.resampling!r}; known: {', '.join(RESAMPLINGS)}")
        if self.resampling_within not in ("batch", "prompt"):
            raise ValueError(
                f"algorithm.resampling_within is {self.resampling_within!r}; use batch or prompt"
            )
        if not (math.isfinite(self.resampling_power) and self.resampling_power >= 0):
            raise ValueError(
                f"algorithm.resampling_power is {self.resampling_power}: use a finite number of at least 0, such as "
                f"2.0"
            )
        if self.resampling != "pow" and self.resampling_power != 2.0:
            raise ValueError(
                f"algorithm.resampling_power is {self.resampling_power}, but algorithm.resampling="
                f"{self.resampling} takes no power: set algorithm.resampling=pow, or remove it"
            )
        if self.resampling == "none" and self.resampling_within != "batch":
            raise ValueError(
                f"algorithm.resampling_within is {self.resampling_within}, but algorithm.resampling=none draws "
                f"nothing: choose a resampling, or remove it"
            )

    def _check_correction(self) -> None:
        holds_it = self.old_log_probs == "rollout" and self.policy_loss not in ("reinforce", "gpg")
        if self.correction.weights != "none" and holds_it:
            raise ValueError(
                f"algorithm.correction.weights is {self.correction.weights}, but with "
                f"algorithm.old_log_probs=rollout the ratio of policy_loss={self.policy_loss} is taken against the "
                f"rollout already and would be corrected twice: set weights=none, old_log_probs=recompute, or "
                f"policy_loss=reinforce"
            )

    def _check_policy_coef(self) -> None:
        if not (math.isfinite(self.policy_coef) and self.policy_coef >= 0):
            raise ValueError(
                f"algorithm.policy_coef is {self.policy_coef}, but the policy loss has a finite weight of at least 0"
            )
        if self.policy_coef != 1.0 and not self.distillation.is_on:
            raise ValueError(
                f"algorithm.policy_coef is {self.policy_coef}, but there is no teacher to weigh the policy loss "
                f"against: set algorithm.distillation.kind, or remove it"
            )
        if self.policy_coef != 0:
            return
        for key, is_set in (
            ("use_kl_in_reward", self.use_kl_in_reward),
            ("correction.weights", self.correction.weights != "none"),
            ("filter_groups.enable", self.filter_groups.enable),
        ):
            if is_set:
                raise ValueError(
                    f"algorithm.{key} is set, but it changes what advantages teach, and with algorithm.policy_coef=0 "
                    f"they teach nothing: remove one of the two"
                )

    @property
    def clip_low(self) -> float:
        """Lower clip range in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
