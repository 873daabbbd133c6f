"""Settings of the algorithm."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from annotated_types import Gt

from strop.algorithms.distillation_config import DistillationConfig, check_policy_coef
from strop.algorithms.dynamic_sampling_config import FilterGroupsConfig
from strop.algorithms.group_functions.config import check_shaping
from strop.algorithms.names import AggregationMode, KlKind
from strop.algorithms.registry import REWARD_SHAPINGS
from strop.algorithms.reward_kl_config import KlControlConfig
from strop.algorithms.rollout_correction_config import CorrectionConfig, check_correction
from strop.algorithms.sample_selection_config import KeepConfig, check_choice
from strop.config.sections import section, where_on
from strop.utils.field_types import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveShare, Share

ClipRange = Annotated[NonNegativeFloat, "usual values lie between 0.1 and 0.3"]
_WITHOUT_RATIO = ("reinforce", "gpg")
"""Losses that take no ratio to another policy."""


def learns_from_older(policy_loss: str, old_log_probs: str | None, *, is_corrected: bool) -> bool:
    """Samples of older policies can be trained on with these settings: a correction is on, or the ratio of the loss is,
    or becomes where old_log_probs is not set, that to the policy that sampled."""
    if is_corrected:
        return True
    if old_log_probs is None:
        return _clips_what_is_older(policy_loss)
    return old_log_probs == "rollout" and policy_loss not in _WITHOUT_RATIO


def _clips_what_is_older(policy_loss: str) -> bool:
    """gspo's clip is so narrow that it would leave out nearly all samples of another policy."""
    return policy_loss not in (*_WITHOUT_RATIO, "gspo")


@section("algorithm")
class AlgorithmConfig:
    """Advantages from rewards, and the policy loss from advantages."""

    adv_estimator: str = "grpo"
    """Advantage estimator by its registered name: gae, grpo, dr_grpo, grpo_passk, gdpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, maxrl, raft, prime, gigpo,
    optimal_token_baseline, tir_optimal_token_baseline, or one of your own (extensions) or of an installed package
    (docs/packages.md).
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
    """Similarity from which gigpo compares the answers that were given in two states, by their texts: 1: equal;
    below: the share of characters in matching blocks."""
    reward_keys: tuple[str, ...] = ()
    """Parts of the reward, as the reward function names them in its result (`score` for the score itself), that
    gdpo normalizes each for itself."""
    reward_weights: tuple[float, ...] = ()
    """Weight of each of them; empty: 1 each."""
    policy_loss: str = "vanilla"
    """Policy loss by its registered name: vanilla (PPO's clipped surrogate), gspo, gmpo, cispo, sapo, dppo_tv,
    dppo_kl, dro, gpg (reinforce), clip_cov, kl_cov, or one of your own (extensions) or of an installed package
    (docs/packages.md)."""
    loss_settings: dict[str, Any] = field(default_factory=dict)
    """Further settings of the loss, by the names of its keyword arguments."""
    extensions: tuple[str, ...] = ()
    """Python files with functions of your own (estimators, losses, filters, reward shaping, samplers), which
    register themselves when they are imported."""
    clip_ratio: ClipRange = 0.2
    """The ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]; clip_ratio_low and clip_ratio_high override
    one side."""
    clip_ratio_low: ClipRange | None = None
    """Lower clip range; not set: clip_ratio. From 1 upwards the lower side never clips."""
    clip_ratio_high: ClipRange | None = None
    """Upper clip range; not set: clip_ratio."""
    clip_ratio_c: Annotated[
        float, Gt(1), "at 1 or below, tokens whose ratio has not moved would have no gradient"
    ] = 3.0
    """Dual clip: where the advantage is negative, the loss of a token is at most -advantage times this."""
    loss_agg_mode: AggregationMode | None = None
    """Aggregation of per-token terms to one loss, that of the policy and that of the critic. Denominators count over
    the whole optimizer batch. Not set: for both as in the paper of the policy loss (seq-mean-token-mean for gspo,
    gmpo and sapo), else token-mean."""
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
    cliprange_value: Annotated[float, Gt(0), ".inf never clips"] = 0.5
    """The critic's new value counts as moved by at most this from the old one; .inf never clips."""
    old_log_probs: Literal["recompute", "rollout"] | None = None
    """Denominator of the ratio: log-probs of the trainer's own weights at the start of the step (recompute),
    or the log-probs recorded while sampling (rollout). Not set: rollout where samples are of older policies
    (rollout.max_staleness) and algorithm.correction is off, for losses whose clip is made for it; else recompute."""
    policy_coef: NonNegativeFloat = 1.0
    """Weight of the policy loss beside the distillation term; 0: the teacher alone teaches, whatever the rewards."""
    reward_shaping: str = ""
    """A function of your own (extensions) or of an installed package (docs/packages.md) by its name that changes
    the rewards of a prompt's samples before they are trained on, after reward.weight and reward.overlong_buffer;
    empty: none."""
    shaping_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of that function, by the names of its keyword arguments."""
    use_kl_in_reward: bool = False
    """Take a KL penalty between the policy and the frozen reference model off the reward of each token. May
    stand beside use_kl_loss; then both act."""
    kl_penalty: KlKind = "kl"
    """KL estimator of that penalty, by the same names as kl_loss_type."""
    kl_ctrl: KlControlConfig = field(default_factory=KlControlConfig)
    """Coefficient of that penalty."""
    resampling: Literal["none", "pow", "max_min", "max_random"] = "none"
    """PF-PPO: train on as many samples as there are, drawn with replacement by their scores. pow: in proportion to
    |score|^resampling_power. max_min: the largest and the smallest score alone. max_random: the largest score with
    weight 0.4, every other with 0.1. none: each sample once."""
    resampling_power: NonNegativeFloat = 2.0
    """Exponent of resampling=pow."""
    resampling_within: Literal["batch", "prompt"] = "batch"
    """Samples that scores are compared with and drawn from: all of the step, or those of the same prompt."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    keep: KeepConfig = field(default_factory=KeepConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)

    def __post_init__(self) -> None:
        check_policy_coef(self)
        check_shaping(self)
        check_correction(self)
        check_choice(self)
        self._check_aggregation()
        self._check_reward_parts()

    @property
    def corrects_for_age(self) -> bool:
        """The loss knows which policy sampled each token: its ratio is taken to the rollout, or a correction is on."""
        return where_on(self.correction) is not None or self.is_ratio_to_rollout

    @property
    def clips_what_is_older(self) -> bool:
        """A ratio to the policy that sampled does what it should in the loss: some have none, and gspo's clip is so
        narrow that it would leave out nearly all samples of another policy."""
        return _clips_what_is_older(self.policy_loss)

    @property
    def is_ratio_to_rollout(self) -> bool:
        """The ratio of the loss is that to the policy that sampled."""
        return self.old_log_probs == "rollout" and self.policy_loss not in _WITHOUT_RATIO

    def _check_aggregation(self) -> None:
        wants_scale = self.loss_agg_mode == "seq-mean-token-sum-norm"
        if not wants_scale and self.loss_scale_factor is not None:
            raise ValueError(
                f"algorithm.loss_scale_factor is {self.loss_scale_factor}, but only "
                f"algorithm.loss_agg_mode=seq-mean-token-sum-norm uses it and that is "
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

    @property
    def has_known_names(self) -> bool:
        """The function is registered in this process."""
        return not self.reward_shaping or self.reward_shaping in REWARD_SHAPINGS

    @property
    def chooses_samples(self) -> bool:
        """Some samples may not be trained on, or several times."""
        chooses: bool = self.resampling != "none" or self.keep.is_on
        return chooses
