"""From the metrics of a run to named diagnoses: each rule is a pure function of the history of the metrics.

A rule gives one sentence, what was seen and what to do, or an empty text. The thresholds are starting points:
they were chosen so that a healthy run of the examples says nothing, and are listed in docs/preflight.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from strop.algorithms.batch_metrics import ADVANTAGES, GROUPS, PROBS_DIFF, REWARD_KL, SCORE
from strop.algorithms.losses.policy import DISTILLATION_LOSS, ENTROPY, KL_LOSS
from strop.algorithms.specs import PG_CLIPFRAC, PPO_KL
from strop.observability.health.history import RECENT, History
from strop.observability.health.side_rules import (
    process_rewards_at_chance,
    process_rewards_swamp,
    tool_fails,
    useless_critic,
)
from strop.workers.metrics import LENGTH, OUTCOMES, VALIDATION
from strop.workers.rows import GRAD_NORM, LEARNING_RATE, SKIPPED_UPDATES
from strop.workers.staleness_metrics import STALENESS

IN_A_ROW = 3
"""Steps in a row after which something is no accident."""
FEW_GROUPS = 0.2
"""Share of groups with different rewards, over ten steps, below which most sampling is wasted."""
LOW_ENTROPY = 0.05
"""Mean entropy of a token, in nats, at which the policy hardly explores."""
ENTROPY_GROWTH = 2.0
"""Growth of the entropy over that of the first five steps."""
LONG_CUT_SHARE, CUT_GROWTH = 0.5, 0.2
"""Share of answers cut at the limit, and its growth within twenty steps."""
LOST_REWARD, ENTROPY_JUMP = 0.5, 1.5
"""From one step to the next, loss of the mean reward as a share of what it was above the smallest, and entropy times or
divided by this."""
LARGE_KL, LARGE_CLIP_SHARE = 0.2, 0.3
"""KL between the old and the new policy of a step, in nats per token, and share of clipped tokens."""
KL_GROWTH = 10.0
"""Growth of the KL to the reference over the twenty steps before."""
GRADIENT_GROWTH = 10.0
"""Gradient norm over the median of the twenty steps before."""
SCORER_FAILURES = 0.02
"""Share of samples that could not be scored."""
MISMATCH, MISMATCH_GROWTH, SMALL_MISMATCH = 0.01, 2.0, 0.001
"""Mean difference of engine and trainer in a token's probability; its growth over the first five steps, once it
is no longer small."""
LONGER, WORSE = 1.5, 0.05
"""Growth of the answers, and loss of reward, over the first five steps."""
EVALUATIONS = 3
"""Validations in a row that are worse than the one before."""

MIXED, ALL_MIN, ALL_MAX, ALL_EQUAL, SINGLE = (
    GROUPS.of(kind) for kind in ("mixed", "all_min", "all_max", "all_equal", "single")
)
CUT, MEAN_LENGTH = LENGTH.of("response_length", "clip_ratio"), LENGTH.of("response_length", "mean")
MEAN_SCORE, SCORE_MIN = SCORE.of("mean"), SCORE.of("min")
ADVANTAGE_MAX, ADVANTAGE_MIN = ADVANTAGES.of("max"), ADVANTAGES.of("min")
GRADIENT, SKIPPED, RATE = GRAD_NORM.of("actor"), SKIPPED_UPDATES.of("actor"), LEARNING_RATE.of("actor")
PROBS = PROBS_DIFF.of("mean")
OLDEST = STALENESS.of("trajectory_staleness_worst", "max")
OK, ERROR, TIMEOUT, SERVICES = (OUTCOMES.of(kind) for kind in ("ok", "error", "timeout", "infrastructure"))
HELD_OUT = {
    "accuracy": VALIDATION.of("val-core", "*", "acc", "mean@*"),
    "reward": VALIDATION.of("val-core", "*", "reward", "mean@*"),
}
"""With any data source, and any number of samples per prompt; the reward where nothing decides which answers pass."""
NO_ADVANTAGE = 1e-6
"""An advantage below this is 0 but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One rule that applies."""

    name: str
    """Of the rule."""
    message: str
    """The observation, and the advice."""


def no_signal(history: History) -> str:
    """Every advantage of the first step, or of three steps in a row, is 0."""
    num_steps = 1 if history.count(ADVANTAGE_MAX) == 1 else IN_A_ROW
    if (
        not _all_without_advantage(history, num_steps)
        or history.count(DISTILLATION_LOSS)
        or policy_lost(history)
    ):
        return ""
    solved = history.mean(ALL_MAX, num_steps) or 0.0
    failed = history.mean(ALL_MIN, num_steps) or 0.0
    cut = history.mean(CUT, num_steps) or 0.0
    equal = history.mean(ALL_EQUAL, num_steps) or 0.0
    when = "in the first step" if num_steps == 1 else f"for {num_steps} steps"
    symptom = (
        f"no learning signal {when}: {100 * cut:.0f} % of the answers are cut at "
        f"data.max_response_tokens; of the groups {_kinds(solved, failed, equal)}"
    )
    if cut > LONG_CUT_SHARE:
        return f"{symptom} - raise data.max_response_tokens, or teach the model to stop (strop sft)"
    if solved > failed:
        return f"{symptom} - there is nothing left to learn from these prompts: use harder ones"
    if equal > failed:
        return (
            f"{symptom} - the reward does not tell the samples of a prompt apart: look at the answers, use more "
            f"rollout.samples_per_prompt, or a reward with more steps"
        )
    return f"{symptom} - look at the answers; warm the model up (strop sft), or use easier prompts"


def few_groups_teach(history: History) -> str:
    """Less than a fifth of the groups had different rewards over the last ten steps."""
    share = history.mean(MIXED, 10)
    single = history.mean(SINGLE, 10) or 0.0
    if share is None or not 0 < share < FEW_GROUPS or single > 0 or history.count(DISTILLATION_LOSS):
        return ""
    solved, failed = history.mean(ALL_MAX, 10) or 0.0, history.mean(ALL_MIN, 10) or 0.0
    equal = history.mean(ALL_EQUAL, 10) or 0.0
    kind = "other" if equal > max(solved, failed) else "harder" if solved > failed else "easier"
    return (
        f"only {100 * share:.0f} % of the groups can teach ({_kinds(solved, failed, equal)}) - use {kind} prompts, or "
        f"algorithm.filter_groups"
    )


def _kinds(solved: float, failed: float, equal: float) -> str:
    """The shares of groups with one reward."""
    text = f"{100 * solved:.0f} % are solved by every sample, {100 * failed:.0f} % by none"
    return f"{text}, {100 * equal:.0f} % have one reward that says neither" if equal else text


def entropy_collapse(history: History) -> str:
    """Entropy below 0.05 nats for five steps, while rewards neither rise nor are at their end."""
    values = history.last(ENTROPY, 5)
    if not values or max(values) >= LOW_ENTROPY or _rises(history):
        return ""
    if (history.mean(ALL_MAX, 5) or 0.0) >= 0.5:  # little is left to explore
        return ""
    return (
        f"entropy has fallen to {fmean(values):.3f} nats per token and the reward no longer rises: the model repeats "
        f"itself - use a smaller learning rate, a larger algorithm.clip_ratio_high, or algorithm.entropy_coeff"
    )


def entropy_growth(history: History) -> str:
    """Entropy twice that of the first five steps, while rewards do not rise."""
    start, now = history.first(ENTROPY), history.mean(ENTROPY, 5)
    if start is None or now is None or history.count(ENTROPY) < 10 or _rises(history):
        return ""
    if not now > max(ENTROPY_GROWTH * start, 0.5):
        return ""
    return (
        f"entropy grew from {start:.2f} to {now:.2f} nats per token and the reward does not rise: the policy drifts to "
        f"noise - use a smaller learning rate or algorithm.entropy_coeff"
    )


def policy_lost(history: History) -> str:
    """From one step to the next half of the reward is lost and entropy jumps, and in the step after it is not back.

    The measures of a step (KL, clipped tokens) are those before its update: where a step has one, they are 0 whatever
    the update did. What it did is in the samples of the next step.
    """
    num_steps = min(RECENT, *(history.count(name) for name in (MEAN_SCORE, SCORE_MIN, ENTROPY)))
    scores, least, entropies = (history.last(name, num_steps) for name in (MEAN_SCORE, SCORE_MIN, ENTROPY))
    for step in range(1, num_steps - 1):
        before, old, new = scores[step - 1], entropies[step - 1], entropies[step]
        bound = before - LOST_REWARD * (before - least[step - 1])
        if max(scores[step:]) < bound and max(old, new) >= ENTROPY_JUMP * min(old, new):
            return (
                f"from one step to the next the mean score fell from {before:.3g} to {scores[step]:.3g} and entropy "
                f"went from {old:.2g} to {new:.2g} nats per token, and the score did not come back: one update "
                f"destroyed the policy - go back to a checkpoint before it, or start again, with a smaller "
                f"actor.optim.lr"
            )
    return ""


def truncation(history: History) -> str:
    """Most answers of three steps are cut at the limit, or 20 points more than twenty steps ago."""
    if policy_lost(history):  # noise has no end; that is not about length
        return ""
    values = history.last(CUT, IN_A_ROW)
    if values and min(values) > LONG_CUT_SHARE:
        return (
            f"{100 * fmean(values):.0f} % of the answers are cut at data.max_response_tokens, so most never reach "
            f"their end - raise it, or teach the model to stop (strop sft)"
        )
    now, before = history.mean(CUT, 5), history.mean(CUT, 5, before=20)
    if now is None or before is None or now - before < CUT_GROWTH:
        return ""
    return (
        f"answers cut at data.max_response_tokens rose from {100 * before:.0f} % to {100 * now:.0f} % in 20 steps: the "
        f"model rambles - look at long answers; raise the limit, or punish length (reward.overlong_buffer)"
    )


def policy_jump(history: History) -> str:
    """In three steps, a KL between old and new policy above 0.2, or more than 30 % clipped tokens."""
    kl, clipped = history.last(PPO_KL, IN_A_ROW), history.last(PG_CLIPFRAC, IN_A_ROW)
    if kl and min(map(abs, kl)) > LARGE_KL:
        symptom = f"each step moves the policy by a KL of {fmean(map(abs, kl)):.2f} nats per token"
    elif clipped and min(clipped) > LARGE_CLIP_SHARE:
        symptom = f"{100 * fmean(clipped):.0f} % of the tokens are clipped"
    else:
        return ""
    return f"{symptom}: the steps are too large - lower actor.optim.lr, actor.epochs, or the updates per step"


def kl_explosion(history: History) -> str:
    """The KL to the reference is ten times that of the twenty steps before."""
    for name in (KL_LOSS, REWARD_KL):
        now, before = history.mean(name, IN_A_ROW), history.mean(name, 20, before=IN_A_ROW)
        if now is None or before is None or now < 0.1 or now <= KL_GROWTH * max(before, 0.0):
            continue
        return (
            f"the KL to the reference grew from {before:.3g} to {now:.3g} within {IN_A_ROW} steps - look at the "
            f"answers, go back to an earlier checkpoint, and use a smaller learning rate or a larger KL coefficient"
        )
    return ""


def gradient_not_finite(history: History) -> str:
    """Three of the last ten steps had an update skipped, or a gradient norm that is no finite number."""
    recent = [history.last(name, min(10, history.count(name))) for name in (SKIPPED, GRADIENT)]
    bad = max(sum(value > 0 for value in recent[0]), sum(not math.isfinite(value) for value in recent[1]))
    if bad < IN_A_ROW:
        return ""
    return (
        f"{bad} of the last 10 steps had a gradient that is not finite - lower actor.optim.lr, and look at the samples "
        f"of the skipped updates; model.dtype=float32 shows whether rounding is the reason"
    )


def gradient_zero(history: History) -> str:
    """Three gradient norms of exactly 0, although there are advantages."""
    values = history.last(GRADIENT, IN_A_ROW)
    if not values or any(values) or _all_without_advantage(history):
        return ""
    return (
        f"the gradient was exactly 0 for {IN_A_ROW} steps although there are advantages - no parameter that is "
        f"trained takes part in the loss: look at the loss and at model.lora"
    )


def gradient_spike(history: History) -> str:
    """A gradient norm ten times the median of the twenty steps before, at least five."""
    num_before = min(20, history.count(GRADIENT) - 1)
    now, before = history.last(GRADIENT, 1), history.last(GRADIENT, num_before, before=1)
    if num_before < 5 or not now or not before:
        return ""
    usual = median(before)
    if not (math.isfinite(now[0]) and usual > 0 and now[0] > GRADIENT_GROWTH * usual):
        return ""
    return (
        f"the gradient norm is {now[0]:.3g}, {now[0] / usual:.0f} times its median of {usual:.3g} - look at the "
        f"samples of this step; if it happens again, lower actor.optim.lr"
    )


def scorer_failures(history: History) -> str:
    """More than 2 % of the samples of five steps could not be scored, twice as many as in the first five."""
    now, start = _failed_share(history, is_first=False), _failed_share(history, is_first=True)
    if now is None or start is None or now <= max(SCORER_FAILURES, 2 * start):
        return ""
    text = (
        f"{100 * now:.1f} % of the samples could not be scored, {100 * start:.1f} % at the start - read their errors "
        f"(strop samples)"
    )
    if _rises(history):
        text += "; the reward rises with them, so the model may have learned to escape the scorer"
    return text


def mismatch(history: History) -> str:
    """Engine and trainer differ by more than 0.01 in a token's probability, or twice as much as at the start; not where
    samples are of older policies, which are to differ."""
    if any(history.last(OLDEST, min(IN_A_ROW, history.count(OLDEST)))):
        return ""
    values, start, now = history.last(PROBS, IN_A_ROW), history.first(PROBS), history.mean(PROBS, 5)
    if values and min(values) > MISMATCH:
        symptom = f"the engine's and the trainer's probabilities differ by {fmean(values):.3f} on average"
    elif start is not None and now is not None and now > max(MISMATCH_GROWTH * start, SMALL_MISMATCH):
        symptom = (
            f"the engine's and the trainer's probabilities differ by {now:.2g} on average, "
            f"{start:.2g} at the start"
        )
    else:
        return ""
    return (
        f"{symptom} - train with a correction (algorithm=tis); if it goes on growing, compare in "
        f"model.dtype=float32"
    )


def longer_but_worse(history: History) -> str:
    """Answers half as long again as in the first five steps, and a lower reward, after at least twenty steps."""
    start, now = history.first(MEAN_LENGTH), history.mean(MEAN_LENGTH, 5)
    first_score, score = history.first(MEAN_SCORE), history.mean(MEAN_SCORE, 5)
    if (
        start is None
        or now is None
        or first_score is None
        or score is None
        or history.count(MEAN_LENGTH) < 20
    ):
        return ""
    if now < LONGER * start or score > first_score - WORSE:
        return ""
    return (
        f"answers grew from {start:.0f} to {now:.0f} tokens while their score fell from {first_score:.2f} to "
        f"{score:.2f} - look at 20 answers (strop samples): does something other than being right pay?"
    )


def held_out_falls(history: History) -> str:
    """Three validations in a row are worse than the one before, while the training reward rises."""
    if not _rises(history, over_start=True):
        return ""
    held_out = [(label, name) for label, pattern in HELD_OUT.items() for name in history.names(pattern)]
    for label, name in held_out:
        values = history.last(name, EVALUATIONS + 1)
        if values and all(a > b for a, b in pairwise(values)):
            return (
                f"the training reward rises while held-out {label} fell from {values[0]:.2f} to {values[-1]:.2f} over "
                f"{EVALUATIONS} validations - look at 20 answers with a high score (strop samples): the model may have "
                f"found a hole in the reward, or learned the training prompts by heart"
            )
    return ""


def learning_rate_zero(history: History) -> str:
    """A learning rate of 0 for three steps."""
    values = history.last(RATE, IN_A_ROW)
    if not values or any(values):
        return ""
    return f"the learning rate was 0 for {IN_A_ROW} steps, so nothing is learned - look at actor.optim and its schedule"


Rule = Callable[[History], str]

RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        no_signal,
        few_groups_teach,
        learning_rate_zero,
        gradient_not_finite,
        gradient_zero,
        gradient_spike,
        policy_lost,
        policy_jump,
        kl_explosion,
        mismatch,
        entropy_collapse,
        entropy_growth,
        truncation,
        scorer_failures,
        longer_but_worse,
        held_out_falls,
        useless_critic,
        process_rewards_swamp,
        process_rewards_at_chance,
        tool_fails,
    )
}
"""By name, in the order of their reports."""


class HealthMonitor:
    """Applies the rules step by step; each one speaks once."""

    def __init__(
        self, *, reported: Collection[str] = (), earlier: Iterable[Mapping[str, float]] = ()
    ) -> None:
        """Begin, or go on in a run that is continued.

        Args:
            reported: rules that spoke before.
            earlier: metrics of the steps before, in order.
        """
        self._reported = set(reported)
        self._history = History()
        for metrics in earlier:
            self._history.add(metrics)

    def observe(self, metrics: Mapping[str, float]) -> list[Diagnosis]:
        """Take the metrics of the next step; the rules that apply now for the first time."""
        self._history.add(metrics)
        diagnoses = []
        for name, rule in RULES.items():
            if name not in self._reported and (message := rule(self._history)):
                self._reported.add(name)
                diagnoses.append(Diagnosis(name=name, message=message))
        return diagnoses


def _all_without_advantage(history: History, num_steps: int = IN_A_ROW) -> bool:
    largest = history.last(ADVANTAGE_MAX, num_steps)
    smallest = history.last(ADVANTAGE_MIN, num_steps)
    return bool(largest) and max(map(abs, [*largest, *smallest])) < NO_ADVANTAGE


def _rises(history: History, *, over_start: bool = False) -> bool:
    """The mean score of five steps is higher than ten steps before, or than at the start."""
    now = history.mean(MEAN_SCORE, 5)
    before = history.first(MEAN_SCORE) if over_start else history.mean(MEAN_SCORE, 5, before=10)
    return now is not None and before is not None and now > before + 0.01


def _failed_share(history: History, *, is_first: bool) -> float | None:
    means = [history.first(name) if is_first else history.mean(name, 5) for name in (OK, ERROR, TIMEOUT)]
    if any(mean is None for mean in means):
        return None
    ok, *failed = [mean or 0.0 for mean in means]
    failed.append((history.first(SERVICES) if is_first else history.mean(SERVICES, 5)) or 0.0)
    total = ok + sum(failed)
    return sum(failed) / total if total else None
