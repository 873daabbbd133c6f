"""The numbers of the algorithm, as a user sets them."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Annotated, Any, Literal

from annotated_types import Gt

from strop.algorithms.names import AggregationMode, KlKind
from strop.base.field_types import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
)
from strop.base.sections import section, section_on

ClipRange = Annotated[NonNegativeFloat, "usual values lie between 0.1 and 0.3"]
_WITHOUT_RATIO = ("reinforce", "gpg")
"""Losses that take no ratio to another policy."""


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


@section("algorithm.filter_groups")
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
    prompts_per_round: PositiveInt | None = None
    """Prompts of each round of sampling, for example three times data.prompts_per_step, so that one round is enough;
    groups beyond those that are wanted are left out. null: data.prompts_per_step, and in later rounds what is missing
    by the share of groups that taught so far. Where generation is ahead of training there are no rounds: so many are in
    play of each step at most."""
    max_rounds: PositiveInt = 10
    """Rounds of sampling in one step; where generation is ahead, of so many prompts as they would have."""
    at_limit: Literal["train", "stop"] = "train"
    """After the last round with too few groups: train on those there are, or end the run."""
    retire_solved: bool = False
    """Do not visit a prompt again once every sample of a group solved it."""
    defer_failed: NonNegativeInt = 0
    """Epochs for which a prompt rests after no sample solved it."""

    def __post_init__(self) -> None:
        key = "algorithm.filter_groups"
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


@section("algorithm")
class AlgorithmConfig:
    """How rewards become advantages, and advantages a loss."""

    adv_estimator: str = "grpo"
    """Advantage estimator by its registered name: gae, grpo, dr_grpo, grpo_passk, gdpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, maxrl, raft, prime, gigpo,
    optimal_token_baseline, tir_optimal_token_baseline, or one of your own (extensions).
    One that needs values (gae) brings a critic into the run, one that needs process rewards (prime) their model."""
    norm_adv_by_std: bool = True
    """Divide a group's centered rewards by their standard deviation. False is the Dr. GRPO advantage."""
    gamma: Share = 1.0
    """Discount of later rewards, per sampled token: gae and reinforce_plus_plus; of process rewards: prime;
    per answer: gigpo."""
    lam: Share = 1.0
    """GAE's lambda: 1 takes the rewards that came, 0 the critic's word one token on."""
    adv_settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the estimator, by the names of its keyword arguments."""
    anchor_similarity: PositiveShare = 1.0
    """How alike the texts of two states must be for gigpo to compare the answers that were given in them: 1: equal;
    below: the share of characters in matching blocks."""
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
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Which groups of samples are trained on; by default all."""
    reward_shaping: str = ""
    """A function of your own by its registered name (extensions) that changes the rewards of a prompt's samples
    before they are trained on, after reward.weight and reward.overlong_buffer; empty: none."""
    shaping_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of that function, by the names of its keyword arguments."""
    extensions: tuple[str, ...] = ()
    """Python files with functions of your own (estimators, losses, filters, reward shaping, samplers), which
    register themselves when they are imported."""
    clip_ratio: ClipRange = 0.2
    """The ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]; the two keys below override one side."""
    clip_ratio_low: ClipRange | None = None
    """Lower clip range; not set: clip_ratio. From 1 upwards the lower side never clips."""
    clip_ratio_high: ClipRange | None = None
    """Upper clip range; not set: clip_ratio."""
    clip_ratio_c: Annotated[
        float, Gt(1), "at 1 or below, tokens whose ratio has not moved would have no gradient"
    ] = 3.0
    """Dual clip: where the advantage is negative, the loss of a token is at most -advantage times this."""
    loss_agg_mode: AggregationMode | None = None
    """How per-token terms become one loss, that of the policy and that of the critic. Denominators count over the
    whole optimizer batch. Not set: for both as in the paper of the policy loss (seq-mean-token-mean for gspo, gmpo
    and sapo), else token-mean."""
    loss_scale_factor: PositiveFloat | None = None
    """Constant divisor of seq-mean-token-sum-norm, in tokens. Not set: data.max_response_tokens."""
    entropy_coeff: FiniteFloat = 0.0
    """Weight of the entropy bonus in the loss; positive values keep the policy more random."""
    use_kl_loss: bool = False
    """Add a KL term between the policy and the frozen reference model to the loss."""
    kl_loss_coef: FiniteFloat = 0.001
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
    cliprange_value: Annotated[float, Gt(0)] = 0.5
    """The critic's new value counts as moved by at most this from the old one; .inf never clips."""
    old_log_probs: Literal["recompute", "rollout"] | None = None
    """Where the denominator of the ratio comes from: the trainer's own weights at the start of the step (recompute),
    or the log-probs recorded while sampling (rollout). Not set: rollout where samples are of older policies
    (rollout.max_staleness) and algorithm.correction is off, for losses whose clip is made for it; else recompute."""

    def __post_init__(self) -> None:
        self._check_aggregation()
        self._check_reward_parts()
        if self.shaping_settings and not self.reward_shaping:
            raise ValueError(
                f"algorithm.shaping_settings has {', '.join(self.shaping_settings)}, but algorithm.reward_shaping "
                f"names no function: name it, or remove them"
            )

    @property
    def corrects_for_age(self) -> bool:
        """The loss knows which policy sampled each token: its ratio is taken to the rollout, or a correction is on."""
        return section_on(self, "correction") is not None or self.is_ratio_to_rollout

    @property
    def clips_what_is_older(self) -> bool:
        """A ratio to the policy that sampled does what it should in the loss: some have none, and gspo's clip is so
        narrow that it would leave out nearly all samples of another policy."""
        return self.policy_loss not in (*_WITHOUT_RATIO, "gspo")

    @property
    def is_ratio_to_rollout(self) -> bool:
        """The ratio of the loss is that to the policy that sampled."""
        return self.old_log_probs == "rollout" and self.policy_loss not in _WITHOUT_RATIO

    def _check_aggregation(self) -> None:
        wants_scale = self.loss_agg_mode == "seq-mean-token-sum-norm"
        if not wants_scale and self.loss_scale_factor is not None:
            raise ValueError(
                f"algorithm.loss_scale_factor is {self.loss_scale_factor}, but only "
                f"loss_agg_mode=seq-mean-token-sum-norm uses it and loss_agg_mode is "
                f"{self.loss_agg_mode or 'not set'}: "
                f"remove it, or change the mode"
            )

    def _check_reward_parts(self) -> None:
        if self.reward_weights and len(self.reward_weights) != len(self.reward_keys):
            raise ValueError(
                f"algorithm.reward_weights has {len(self.reward_weights)} numbers for {len(self.reward_keys)} "
                f"algorithm.reward_keys: give one weight per key"
            )
        if len(set(self.reward_keys)) < len(self.reward_keys):
            raise ValueError(f"algorithm.reward_keys names a part twice: {', '.join(self.reward_keys)}")

    @property
    def clip_low(self) -> float:
        """Lower clip range in force."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Upper clip range in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high
