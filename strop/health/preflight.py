"""Can this run learn? Checks on a few dozen samples of its own first prompts, before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strop.algorithms.evaluation import pass_at_k, wilson_interval
from strop.workers.reports import PASS_THRESHOLD, EpisodeReport

MAX_CUT_SHARE = 0.5
"""Share of answers that may end at the length limit."""
MAX_LOG_PROB_DIFFERENCE = 0.05
"""Largest difference between the engine's and the trainer's log-prob of a token, in nats."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What was tried."""

    reports: Sequence[EpisodeReport]
    """Every sample, those of a prompt with one uid."""
    max_response_tokens: int
    """Limit of a response."""
    max_failed_share: float
    """Share of samples that a run lets its scorer fail on (reward.max_failed_share)."""
    is_group_relative: bool
    """The advantage compares the samples of a prompt, so equal rewards teach nothing."""
    log_prob_difference: float | None
    """Largest |trainer - engine| over sampled tokens, in nats; None when no sample could be compared."""
    num_changed_prompts: int
    """Prompts whose tokens are others after decoding and encoding again."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    text: str
    """What was found."""
    is_fine: bool = True
    advice: str = ""
    """What to do; empty where it is fine."""


def examine(probe: Probe) -> list[Check]:
    """Every check, in the order in which a sample comes about."""
    return [
        _prompts(probe),
        _lengths(probe),
        _scores(probe),
        *_rewards(probe),
        _tokens(probe),
        _agreement(probe),
    ]


def _prompts(probe: Probe) -> Check:
    count, changed = len({report.uid for report in probe.reports}), probe.num_changed_prompts
    text = f"{count} prompts, {len(probe.reports)} samples"
    if not changed:
        return Check(name="prompts", text=f"{text}; decoding and encoding gives the same tokens")
    return Check(
        name="prompts",
        text=f"{text}; {changed} prompts have other tokens after decoding and encoding, which is no fault: strop never "
        f"does that with what is trained",
    )


def _lengths(probe: Probe) -> Check:
    played = [report for report in probe.reports if report.is_played]
    cut = sum(report.stop_reason == "length" for report in played)
    share = cut / max(len(played), 1)
    mean = sum(report.num_response_tokens for report in played) / max(len(played), 1)
    text = (
        f"{mean:.0f} tokens on average, {100 * share:.0f} % cut at "
        f"data.max_response_tokens={probe.max_response_tokens}"
    )
    return Check(
        name="length",
        text=text,
        is_fine=share <= MAX_CUT_SHARE,
        advice=""
        if share <= MAX_CUT_SHARE
        else "most answers do not end: raise data.max_response_tokens, or warm the model up with `strop sft`",
    )


def _scores(probe: Probe) -> Check:
    failed = [report for report in probe.reports if not report.is_played]
    unscored = [r for r in probe.reports if r.is_played and r.outcome is not None and r.score is None]
    share = (len(failed) + len(unscored)) / len(probe.reports)
    reasons = Counter(
        [report.failure for report in failed] + [r.outcome.error for r in unscored if r.outcome is not None]
    )
    text = f"{100 * share:.0f} % of the samples failed or could not be scored"
    if reasons:
        reason, count = reasons.most_common(1)[0]
        text += f"; most often ({count}): {reason}"
    is_fine = share <= probe.max_failed_share
    advice = "" if is_fine else "mend the reward function or the agent, or raise reward.max_failed_share"
    return Check(name="scoring", text=text, is_fine=is_fine, advice=advice)


def _rewards(probe: Probe) -> list[Check]:
    groups: dict[str, list[float]] = {}
    accuracies: dict[str, list[float]] = {}
    for report in probe.reports:
        if report.score is not None and report.accuracy is not None:
            groups.setdefault(report.uid, []).append(report.score)
            accuracies.setdefault(report.uid, []).append(report.accuracy)
    scores = [score for group in groups.values() for score in group]
    if not scores:
        return [
            Check(
                name="signal", text="no sample has a score", is_fine=False, advice="look at the errors above"
            )
        ]
    spread = f"rewards from {min(scores):g} to {max(scores):g}, mean {sum(scores) / len(scores):.3g}"
    return [_pass_rates(list(accuracies.values())), _signal(probe, list(groups.values()), spread)]


def _pass_rates(accuracies: list[list[float]]) -> Check:
    """Of prompts, not of samples: those of one prompt are not independent."""
    right = [(len(group), sum(accuracy > PASS_THRESHOLD for accuracy in group)) for group in accuracies]
    num_prompts, most = len(right), min(n for n, _ in right)
    parts = []
    for k in sorted({1, most}):
        rate = sum(pass_at_k(n, c, k) for n, c in right)
        low, high = wilson_interval(min(rate, num_prompts), num_prompts)
        parts.append(
            f"pass@{k} {100 * rate / num_prompts:.0f} % (95 % interval {100 * low:.0f} to {100 * high:.0f})"
        )
    return Check(name="difficulty", text=", ".join(parts))


def _signal(probe: Probe, groups: list[list[float]], spread: str) -> Check:
    """Groups with different rewards are the ones that teach."""
    mixed = sum(len(set(group)) > 1 for group in groups)
    if not probe.is_group_relative:
        values = {score for group in groups for score in group}
        is_fine = len(values) > 1
        text = f"{spread}; {len(values)} different rewards"
    else:
        solved = sum(len(set(group)) == 1 and group[0] >= 1 for group in groups)
        none = sum(len(set(group)) == 1 and group[0] <= 0 for group in groups)
        is_fine = mixed > 0
        text = (
            f"{spread}; of {len(groups)} groups {mixed} can teach, {solved} are solved by every sample, {none} by "
            f"none"
        )
    if is_fine:
        return Check(name="signal", text=text)
    lowest = min(score for group in groups for score in group)
    if lowest >= 1:
        advice = "there is nothing left to learn: use harder prompts"
    else:
        advice = (
            "every advantage would be 0: look at the answers; warm the model up with `strop sft`, use easier prompts, "
            "more rollout.samples_per_prompt, or a reward with steps between wrong and right"
        )
    return Check(name="signal", text=text, is_fine=False, advice=advice)


def _tokens(probe: Probe) -> Check:
    played = [report for report in probe.reports if report.is_played]
    given = sum(report.num_response_tokens for report in played)
    trained = sum(report.num_sampled_tokens for report in played)
    empty = sum(report.num_sampled_tokens == 0 for report in played)
    text = f"{trained} of {given} response tokens were sampled by the model and are trained"
    if not empty:
        return Check(name="loss mask", text=text)
    return Check(
        name="loss mask",
        text=f"{text}; {empty} samples have none",
        is_fine=empty < len(played),
        advice="" if empty < len(played) else "nothing could be trained: look at the agent",
    )


def _agreement(probe: Probe) -> Check:
    difference = probe.log_prob_difference
    if difference is None:
        return Check(name="engine", text="no sample could be compared with the trainer's log-probs")
    is_fine = difference <= MAX_LOG_PROB_DIFFERENCE
    return Check(
        name="engine",
        text=f"the engine's and the trainer's log-probs differ by at most {difference:.2g}",
        is_fine=is_fine,
        advice=""
        if is_fine
        else "train with a correction, algorithm=tis, or with model.dtype=float32; a large difference means that "
        "the two do not hold the same weights",
    )
