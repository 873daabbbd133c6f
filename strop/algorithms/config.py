"""The numbers of the algorithm, as a user sets them."""

from __future__ import annotations

from dataclasses import field, fields
from typing import Annotated, Any, Literal, get_args

from annotated_types import Gt

from strop.algorithms.correction_config import CorrectionConfig
from strop.base.field_types import (
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Share,
)
from strop.base.sections import section

AggregationMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"
]
ClipRange = Annotated[NonNegativeFloat, "usual values lie between 0.1 and 0.3"]
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
"""Names of the KL estimators (kl.py)."""
KL_KINDS: tuple[str, ...] = get_args(KlKind)
AGGREGATION_MODES: tuple[str, ...] = get_args(AggregationMode)
_OF_ONE_KIND = {"reverse_kl": ("kl_kind",), "forward_kl": ("top_k", "with_tail")}
"""Settings that one kind alone reads."""
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


@section("algorithm.keep")
class KeepConfig:
    """Rejection sampling: which samples are trained on at all. Off by default: all are."""

    best: PositiveInt | None = None
    """At most so many samples of each prompt: those with the largest scores, of equal ones the first. null: all."""
    min_score: FiniteFloat | None = None
    """Samples with at least this score. null: any. Rewards of right and wrong need it: without, the best of a prompt
    that no sample solved is a wrong one."""

    @property
    def is_on(self) -> bool:
        """Some samples may be left out."""
        return self.best is not None or self.min_score is not None


@section("algorithm.distillation")
class DistillationConfig:
    """A term of the loss that pulls the policy towards a teacher, on the policy's own samples. Off by default."""

    kind: Literal["none", "reverse_kl", "forward_kl"] = "none"
    """reverse_kl: KL(policy || teacher), estimated at each sampled token; the teacher computes one log-prob per token.
    forward_kl: KL(teacher || policy), over the teacher's top_k tokens at each place. none: there is no teacher."""
    coef: PositiveFloat = 1.0
    """Weight of the term in the loss."""
    top_k: PositiveInt = 64
    """forward_kl: how many of the teacher's most likely tokens are compared at each place."""
    with_tail: bool = False
    """forward_kl: count all other tokens as one more, so that the term is a divergence, never below 0."""
    kl_kind: KlKind = "k1+"
    """reverse_kl: the estimator, by the names of algorithm.kl_loss_type. k1+ has the value of the log-ratio and the
    gradient of the divergence."""

    def __post_init__(self) -> None:
        key = "algorithm.distillation"
        own = _OF_ONE_KIND.get(self.kind, ())
        for one in fields(self):
            if one.name == "kind" or getattr(self, one.name) == one.default:
                continue
            if self.kind == "none":
                raise ValueError(
                    f"{key}.{one.name} is {getattr(self, one.name)}, but {key}.kind=none has no teacher: set kind to "
                    f"reverse_kl or forward_kl, or remove it"
                )
            if one.name != "coef" and one.name not in own:
                other = next(kind for kind, names in _OF_ONE_KIND.items() if one.name in names)
                raise ValueError(
                    f"{key}.{one.name} is {getattr(self, one.name)}, but it is a setting of kind={other} and kind is "
                    f"{self.kind}: change the kind, or remove it"
                )
        if self.kl_kind in ("k1", "kl"):
            raise ValueError(
                f"{key}.kl_kind is {self.kl_kind}, whose gradient averages to zero, so nothing would be learned: use "
                f"k1+, which has the same value and the gradient of the divergence"
            )

    @property
    def is_on(self) -> bool:
        """There is a teacher."""
        return self.kind != "none"


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
    policy_coef: NonNegativeFloat = 1.0
    """Weight of the policy loss beside the distillation term; 0: the teacher alone teaches, whatever the rewards."""
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    """A term that pulls the policy towards a teacher (teacher.path)."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """What is done about tokens whose log-probs in the rollout differ from the trainer's."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    """Which groups of samples are trained on; by default all."""
    keep: KeepConfig = field(default_factory=KeepConfig)
    """Which samples of a group are trained on; by default all."""
    reward_shaping: str = ""
    """A function of your own by its registered name (extensions) that changes the rewards of a prompt's samples
    before they are trained on, after reward.weight and reward.overlong_buffer; empty: none."""
    shaping_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of that function, by the names of its keyword arguments."""
    resampling: Literal["none", "pow", "max_min", "max_random"] = "none"
    """PF-PPO: train on as many samples as there are, drawn with replacement by their scores. pow: in proportion to
    |score|^resampling_power. max_min: the largest and the smallest score alone. max_random: the largest score with
    weight 0.4, every other with 0.1. none: each sample once."""
    resampling_power: NonNegativeFloat = 2.0
    """Exponent of resampling=pow."""
    resampling_within: Literal["batch", "prompt"] = "batch"
    """What scores are compared with and drawn from: all samples of the step, or those of the same prompt."""
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
        self._check_correction()
        self._check_policy_coef()
        self._check_resampling()
        self._check_keep()
        if self.shaping_settings and not self.reward_shaping:
            raise ValueError(
                f"algorithm.shaping_settings has {', '.join(self.shaping_settings)}, but algorithm.reward_shaping "
                f"names no function: name it, or remove them"
            )

    @property
    def corrects_for_age(self) -> bool:
        """The loss knows which policy sampled each token: its ratio is taken to the rollout, or a correction is on."""
        return self.correction.is_on or self._is_ratio_to_rollout

    @property
    def clips_what_is_older(self) -> bool:
        """A ratio to the policy that sampled does what it should in the loss: some have none, and gspo's clip is so
        narrow that it would leave out nearly all samples of another policy."""
        return self.policy_loss not in (*_WITHOUT_RATIO, "gspo")

    @property
    def _is_ratio_to_rollout(self) -> bool:
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

    def _check_resampling(self) -> None:
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

    def _check_keep(self) -> None:
        if self.adv_estimator == "raft" and not self.keep.is_on:
            raise ValueError(
                "algorithm.adv_estimator=raft imitates every sample that is kept, and algorithm.keep keeps all, right "
                "or wrong: set algorithm.keep.best or algorithm.keep.min_score"
            )
        if self.keep.is_on and self.resampling != "none":
            raise ValueError(
                f"algorithm.keep and algorithm.resampling={self.resampling} both choose the samples that are trained "
                f"on: remove one of the two"
            )

    def _check_correction(self) -> None:
        if self.correction.weights != "none" and self._is_ratio_to_rollout:
            raise ValueError(
                f"algorithm.correction.weights is {self.correction.weights}, but with "
                f"algorithm.old_log_probs=rollout the ratio of policy_loss={self.policy_loss} is taken against the "
                f"rollout already and would be corrected twice: set weights=none, old_log_probs=recompute, or "
                f"policy_loss=reinforce"
            )

    def _check_policy_coef(self) -> None:
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
