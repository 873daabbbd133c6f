"""Can this run learn? Checks on a few dozen samples of its own first prompts, before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from strop.algorithms.best_of_k import pass_at_k
from strop.algorithms.intervals import wilson_interval
from strop.engines.config import OptimizerConfig
from strop.engines.learning_rates import too_large
from strop.rewards.outcome import remedies
from strop.trainer.preflight.tokens import TokenFacts, examine_tokens
from strop.utils.verdict import Check
from strop.workers.reports import EpisodeReport, is_decided

MAX_CUT_SHARE = 0.5
"""Share of answers that may end at the length limit."""
MIN_TEACHING_SHARE = 0.2
"""Share of groups that should have different rewards."""
MAX_PROB_DIFFERENCE = 0.01
"""Mean difference between the engine's and the trainer's probability of a token; 0.005 is usual in bfloat16."""
MAX_LOG_PROB_DIFFERENCE = 0.05
"""Largest difference of one token's log-probs in float32, in nats."""
OTHER_WEIGHTS = 0.5
"""Mean difference of log-probs, in nats, that rounding does not explain: the two hold different weights."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences between the trainer's log-probs of the sampled tokens and the recorded ones of the engine."""

    num_tokens: int
    max_log_prob: float
    """Largest |trainer - engine|, in nats."""
    mean_log_prob: float
    """Mean |trainer - engine|, in nats."""
    mean_prob: float
    """Mean |difference| of the probabilities."""
    is_float32: bool
    """Both compute in float32 or better, where rounding explains less."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Samples and settings that a preflight examines."""

    tokens: TokenFacts | None
    """Prompts, template and vocabulary; None where somebody else's model answered, so that prompts, rewards and agents
    are tried alone."""
    reports: Sequence[EpisodeReport]
    """Every sample, those of a prompt with one uid."""
    rewards: Mapping[str, tuple[float, ...]]
    """By sample id what the algorithm would see: the reward, with penalties and a reward model's score, and its
    parts where the estimator takes them one by one. Without the samples that would be left out."""
    max_response_tokens: int
    """Limit of a response."""
    max_failed_share: float
    """Share of samples that a run lets its scorer fail on (reward.max_failed_share)."""
    is_group_relative: bool
    """The advantage compares the samples of a prompt, so equal rewards teach nothing."""
    agreement: Agreement | None
    """None when no sample could be compared."""
    optim: OptimizerConfig
    """Of the policy (actor.optim)."""
    has_adapter: bool = False
    """The policy learns through LoRA."""
    has_teacher: bool = False
    """The policy learns from a teacher too, on every sample."""


def examine(probe: Probe) -> list[Check]:
    """Every check, in the order in which a sample comes about."""
    if probe.tokens is None:
        return [_samples(probe), _cuts(probe), _scores(probe), *_rewards(probe)]
    return [
        *examine_tokens(probe.tokens),
        _samples(probe),
        _lengths(probe),
        _scores(probe),
        *_rewards(probe),
        _loss_mask(probe),
        *_learning_rate(probe),
        _agreement(probe),
    ]


def can_teach(probe: Probe) -> bool:
    """Some sample would get an advantage that is not 0, or there is a teacher."""
    if probe.has_teacher:
        return bool(probe.rewards)
    if not probe.is_group_relative:
        return len(set(probe.rewards.values())) > 1
    return any(len(set(group)) > 1 for group in _groups(probe).values())


def _groups(probe: Probe) -> dict[str, list[tuple[float, ...]]]:
    """The rewards of each prompt's samples."""
    groups: dict[str, list[tuple[float, ...]]] = {}
    for report in probe.reports:
        if report.id in probe.rewards:
            groups.setdefault(report.uid, []).append(probe.rewards[report.id])
    return groups


def _samples(probe: Probe) -> Check:
    count = len({report.uid for report in probe.reports})
    return Check(name="prompts", text=f"{count} prompts, {len(probe.reports)} samples")


def _cut_share(probe: Probe) -> float:
    played = [report for report in probe.reports if report.is_finished]
    return sum(report.stop_reason == "length" for report in played) / max(len(played), 1)


def _lengths(probe: Probe) -> Check:
    played = [report for report in probe.reports if report.is_finished]
    share = _cut_share(probe)
    mean = sum(report.num_response_tokens for report in played) / max(len(played), 1)
    text = (
        f"{mean:.0f} tokens on average, {100 * share:.0f} % cut at "
        f"data.max_response_tokens={probe.max_response_tokens}"
    )
    if share <= MAX_CUT_SHARE:
        return Check(name="length", text=text)
    advice = "most answers do not end: raise data.max_response_tokens, or warm the model up with `strop sft`"
    return Check(name="length", text=text, level="warn", advice=advice)


def _cuts(probe: Probe) -> Check:
    """Of answers whose tokens nobody here can count."""
    return Check(name="length", text=f"{100 * _cut_share(probe):.0f} % of the answers were cut")


def _scores(probe: Probe) -> Check:
    """Check of failed and unscored samples: a run would stop in its first step where more fail than it allows."""
    failed = [report for report in probe.reports if not report.is_finished]
    unscored = [r for r in probe.reports if r.is_finished and r.outcome is not None and r.score is None]
    num_bad, num_samples = len(failed) + len(unscored), len(probe.reports)
    reasons = Counter(
        [report.failure for report in failed] + [r.outcome.error for r in unscored if r.outcome is not None]
    )
    text = f"{100 * num_bad / num_samples:.0f} % of the samples failed or could not be scored"
    if reasons:
        reason, count = reasons.most_common(1)[0]
        text += f"; most often ({count}): {reason}"
    if num_bad <= probe.max_failed_share * num_samples:
        return Check(name="scoring", text=text)
    is_certain = wilson_interval(num_bad, num_samples)[0] > probe.max_failed_share
    outcomes = [report.outcome for report in unscored if report.outcome is not None]
    ways = [remedies(outcomes, repair="mend the reward function")] if outcomes else []
    ways += ["mend the agent"] if failed else []
    return Check(
        name="scoring",
        text=text,
        level="stop" if is_certain or num_bad == num_samples else "warn",
        advice=f"more than reward.max_failed_share={probe.max_failed_share:g} allows: {'; '.join(ways)}; or raise that",
    )


def _rewards(probe: Probe) -> list[Check]:
    passed: dict[str, list[bool]] = {}
    scored = [report for report in probe.reports if report.score is not None]
    has_rate = is_decided(scored)
    for report in scored if has_rate else ():
        passed.setdefault(report.uid, []).append(bool(report.passes))
    checks = [_pass_rates(list(passed.values()))] if passed else [] if has_rate else [_mean_reward(scored)]
    if not probe.rewards:
        advice = "no reward, no advantage: look at the errors above"
        return [*checks, Check(name="signal", text="no sample has a reward", level="stop", advice=advice)]
    return [*checks, _signal(probe, passed, has_rate=has_rate)]


def _mean_reward(scored: Sequence[EpisodeReport]) -> Check:
    """Check of mean rewards, where nothing decides which samples pass."""
    mean = sum(report.score or 0.0 for report in scored) / len(scored)
    return Check(
        name="difficulty",
        text=f"mean reward {mean:.3g}; no pass rate: nothing says which answers pass (give `acc`, or set "
        f"reward.pass_by)",
    )


def _pass_rates(passed: list[list[bool]]) -> Check:
    """Of prompts, not of samples: those of one prompt are not independent."""
    right = [(len(group), sum(group)) for group in passed]
    num_prompts, most = len(right), min(n for n, _ in right)
    parts = []
    for k in sorted({1, most}):
        rate = sum(pass_at_k(n, c, k) for n, c in right)
        low, high = wilson_interval(min(rate, num_prompts), num_prompts)
        parts.append(
            f"pass@{k} {100 * rate / num_prompts:.0f} % (95 % interval {100 * low:.0f} to {100 * high:.0f})"
        )
    return Check(name="difficulty", text=", ".join(parts))


def _signal(probe: Probe, passed: Mapping[str, Sequence[bool]], *, has_rate: bool) -> Check:
    """Groups with different rewards are the ones that teach."""
    totals = [values[0] for values in probe.rewards.values()]
    text = f"rewards from {min(totals):g} to {max(totals):g}, mean {sum(totals) / len(totals):.3g}"
    solved, unsolved = _outcomes(probe, passed)
    share = 1.0
    if not probe.is_group_relative:
        text += f"; {len(set(probe.rewards.values()))} different rewards"
    else:
        groups = _groups(probe)
        mixed = sum(len(set(group)) > 1 for group in groups.values())
        share = mixed / len(groups)
        text += f"; of {len(groups)} groups {_counted(mixed, len(groups))} can teach"
        if has_rate:
            text += f", {_counted(solved, len(groups))} are solved by every sample, "
            text += f"{_counted(unsolved, len(groups))} by none"
    if can_teach(probe):
        if probe.has_teacher:
            return Check(name="signal", text=f"{text}; the teacher teaches on every sample")
        if share >= MIN_TEACHING_SHARE:
            return Check(name="signal", text=text)
        advice = (
            "few groups can teach, so most of the sampling is wasted: use prompts of another difficulty, or "
            "algorithm.filter_groups"
        )
        return Check(name="signal", text=text, level="warn", advice=advice)
    if len(set(totals)) == 1 and len(totals) > 1:
        text += f"; every sample has the same reward, {totals[0]:g}"
    advice = _no_signal_advice(probe, solved, unsolved, is_constant=len(set(totals)) == 1 and not has_rate)
    return Check(name="signal", text=text, level="stop", advice=advice)


def _outcomes(probe: Probe, passed: Mapping[str, Sequence[bool]]) -> tuple[int, int]:
    """Groups that every sample solves, and those that none solves."""
    verdicts = [passed[uid] for uid in _groups(probe) if uid in passed]
    return sum(all(group) for group in verdicts), sum(not any(group) for group in verdicts)


def _counted(count: int, total: int) -> str:
    low, high = wilson_interval(count, total)
    return f"{count} ({100 * low:.0f} to {100 * high:.0f} %)"


def _no_signal_advice(probe: Probe, solved: int, unsolved: int, *, is_constant: bool) -> str:
    """Advice for samples that teach nothing.

    Args:
        probe: the samples.
        solved, unsolved: groups that every sample solves, and those that none solves.
        is_constant: every sample has the same reward, and nothing says which pass.
    """
    num_groups = len(_groups(probe))
    if solved == num_groups:
        return "every advantage would be 0, there is nothing left to learn: use harder prompts"
    if is_constant:
        return (
            "every advantage would be 0: the reward does not tell any answers apart; look at them and at the function "
            "(`strop reward check`), or use a reward with steps between wrong and right"
        )
    cut = _cut_share(probe)
    if cut > MAX_CUT_SHARE:
        return (
            f"every advantage would be 0, and {100 * cut:.0f} % of the answers are cut before their end: raise "
            f"data.max_response_tokens, or teach the model to stop with `strop sft`"
        )
    if unsolved == num_groups:
        return (
            "every advantage would be 0: look at the answers; if they are right, mend the reward function; if not, "
            "warm the model up with `strop sft`, use easier prompts, more rollout.samples_per_prompt, or a reward "
            "with steps between wrong and right"
        )
    return (
        "every advantage would be 0: the reward does not tell the samples of a prompt apart; look at the answers, "
        "use more rollout.samples_per_prompt, or a reward with steps between wrong and right"
    )


def _loss_mask(probe: Probe) -> Check:
    played = [report for report in probe.reports if report.is_finished]
    num_response_tokens = sum(report.num_response_tokens for report in played)
    trained = sum(report.num_sampled_tokens for report in played)
    empty = sum(report.num_sampled_tokens == 0 for report in played)
    text = f"{trained} of {num_response_tokens} response tokens were sampled by the model and are trained"
    if not empty:
        return Check(name="loss mask", text=text)
    level: Literal["warn", "stop"] = "warn" if empty < len(played) else "stop"
    advice = "they would be left out: " if level == "warn" else "nothing could be trained: "
    return Check(
        name="loss mask",
        text=f"{text}; {empty} samples have none",
        level=level,
        advice=advice + "look at the agent, which must take its tokens from the model",
    )


def _learning_rate(probe: Probe) -> list[Check]:
    """Said only where it is too large: every optimizer here moves a weight by about the learning rate in a step."""
    rate = too_large("actor", probe.optim, has_adapter=probe.has_adapter)
    if rate is None:
        return []
    level: Literal["warn", "stop"] = "stop" if rate.is_destroying else "warn"
    return [Check(name="learning rate", text=rate.text, level=level, advice=rate.advice)]


def _agreement(probe: Probe) -> Check:
    agreement = probe.agreement
    if agreement is None:
        return Check(name="engine", text="no sample could be compared with the trainer's log-probs")
    text = (
        f"the engine's and the trainer's log-probs differ by at most {agreement.max_log_prob:.2g}, on average "
        f"{agreement.mean_log_prob:.2g}, over {agreement.num_tokens} tokens"
    )
    if not agreement.mean_log_prob <= OTHER_WEIGHTS:  # also where it is no number
        advice = (
            "rounding does not explain that: the two hold other weights, or one of them is broken; compare with "
            "model.dtype=float32"
        )
        return Check(name="engine", text=text, level="stop", advice=advice)
    is_large = agreement.mean_prob > MAX_PROB_DIFFERENCE
    is_large |= agreement.is_float32 and agreement.max_log_prob > MAX_LOG_PROB_DIFFERENCE
    if not is_large:
        return Check(name="engine", text=text)
    advice = "train with a correction, algorithm=tis, or with model.dtype=float32"
    return Check(name="engine", text=text, level="warn", advice=advice)
