"""Test of a reward without a model: a certificate with a verdict, and a finding for each thing that is wrong.

Every answer is scored twice, the second time in the opposite order and in other processes.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome, RewardConfig
from strop.rewards.certify.probes import Probe, first_probes, second_probes
from strop.rewards.rescoring import SavedSample, rescore

Verdict = Literal["ok", "doubtful", "broken"]
SLOW_S = 1.0
"""Mean seconds of a call above which scoring holds up a training."""
MAX_SIZE = 100.0
"""Of a score: beyond it, losses without normalisation leave their range."""
_SHOWN_CHARS = 200
_KIB_PER_MIB = 1024


@dataclass(frozen=True, kw_only=True)
class RewardIssue:
    """One thing that is wrong, at the first row where it was seen."""

    level: Literal["doubtful", "broken"]
    rule: str
    row: int
    answer: str
    """At most 200 characters of it."""
    sentence: str
    """Error sentence: the event, its frequency, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class RewardReport:
    """Result of testing a reward with probe answers."""

    reward: str
    num_rows: int
    num_calls: int
    lowest: float | None
    highest: float | None
    """Of all scores; None where nothing was scored."""
    right_example: str
    """The right answer of a row as the reward likes it best, with its score; empty where none scored above others."""
    right_mean: float | None
    """Of the right answers, each in the form that the reward likes best."""
    junk_mean: float | None
    mean_s: float
    max_s: float
    """Of one call, wall-clock seconds."""
    peak_memory_mib: float
    """Largest resident size of a process that scored, Python and its packages included."""
    findings: tuple[RewardIssue, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst level among the findings."""
        levels = {finding.level for finding in self.findings}
        return "broken" if "broken" in levels else "doubtful" if levels else "ok"

    def as_json(self) -> dict[str, Any]:
        """Plain data, the verdict first."""
        return {"verdict": self.verdict, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class _Trial:
    probe: Probe
    first: Outcome
    again: Outcome


def inspect_reward(
    name: str,
    reward: RewardConfig,
    prompts: Sequence[Prompt],
    *,
    tokenizer: str = "",
    in_groups: bool = False,
) -> RewardReport:
    """Try a reward with answers to these rows.

    Args:
        name: of the reward in the certificate.
        reward: its settings.
        prompts: at least one row.
        tokenizer: as in `RewardPool`.
        in_groups: a function takes all answers to a prompt at once.

    Raises:
        RewardError: the reward cannot be loaded.
    """
    if not prompts:
        raise ValueError(
            "the data has no rows, so there is nothing to try the reward with: name another file"
        )
    first = first_probes(prompts)
    first_outcomes = _score(first, prompts, reward, tokenizer)
    best = [_best_right(row, first, first_outcomes) for row in range(len(prompts))]
    second = second_probes(prompts, best)
    probes = [*first, *second]
    if in_groups:  # a score may depend on what else is in the group
        outcomes = _score(probes, prompts, reward, tokenizer)
    else:
        outcomes = [*first_outcomes, *_score(second, prompts, reward, tokenizer)]
    again = _score(probes[::-1], prompts, reward, tokenizer)[::-1]
    tried = [
        _Trial(probe=probe, first=outcome, again=repeat)
        for probe, outcome, repeat in zip(probes, outcomes, again, strict=True)
    ]
    scores = [outcome.score for outcome in outcomes if outcome.score is not None]
    seconds = [outcome.seconds for outcome in outcomes]
    right = [score for row in range(len(prompts)) if (score := _best(row, tried)) is not None]
    return RewardReport(
        reward=name, num_rows=len(prompts), num_calls=2 * len(probes), lowest=min(scores, default=None),
        highest=max(scores, default=None), right_example=_example(tried), right_mean=_mean(right),
        junk_mean=_mean([t.first.score for t in tried if t.probe.kind == "junk" and t.first.score is not None]),
        mean_s=math.fsum(seconds) / len(seconds), max_s=max(seconds),
        peak_memory_mib=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / _KIB_PER_MIB,
        findings=tuple(_findings(tried, len(prompts))),
    )  # fmt: skip


def _score(
    probes: Sequence[Probe], prompts: Sequence[Prompt], reward: RewardConfig, tokenizer: str
) -> list[Outcome]:
    samples = [
        SavedSample(
            id=f"row {probe.row}", prompt=(prompt := prompts[probe.row]), response=probe.text, score=None,
            is_scored=False, trajectory=Trajectory(uid=prompt.uid, sample_index=0, prompt_ids=prompt.token_ids),
            group=probe.row,
        )
        for probe in probes
    ]  # fmt: skip
    return [row.outcome for row in rescore(samples, reward, tokenizer=tokenizer)] if samples else []


def _best_right(row: int, probes: Sequence[Probe], outcomes: Sequence[Outcome]) -> Probe | None:
    candidates = [
        (outcome.score, probe)
        for probe, outcome in zip(probes, outcomes, strict=True)
        if probe.row == row and probe.kind == "right" and outcome.score is not None
    ]
    return max(candidates, key=lambda candidate: candidate[0])[1] if candidates else None


def _best(row: int, tried: Sequence[_Trial]) -> float | None:
    scores = [t.first.score for t in tried if t.probe.row == row and t.probe.kind == "right"]
    return max((score for score in scores if score is not None), default=None)


def _example(tried: Sequence[_Trial]) -> str:
    """The right answer that scores best, of the first row in which one scores above empty and senseless ones."""
    for row in dict.fromkeys(t.probe.row for t in tried):
        of_row = [t for t in tried if t.probe.row == row and t.first.score is not None]
        right = [t for t in of_row if t.probe.kind == "right"]
        floor = max((t.first.score or 0.0 for t in of_row if t.probe.kind == "junk"), default=0.0)
        best = max(right, key=lambda t: t.first.score or 0.0, default=None)
        if best is not None and (best.first.score or 0.0) > floor:
            source = f" ({best.probe.place})" if best.probe.place else ""
            return f"{best.probe.text[:_SHOWN_CHARS]!r}{source} scores {best.first.score:g}"
    return ""


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _findings(tried: Sequence[_Trial], num_rows: int) -> Iterator[RewardIssue]:
    yield from _of_calls(tried)
    best = {row: _best(row, tried) for row in range(num_rows)}
    junk = [t for t in tried if t.probe.kind == "junk" and t.first.score is not None]
    floor = {
        row: max((t.first.score or 0.0 for t in junk if t.probe.row == row), default=0.0) for row in best
    }
    unknown = [row for row in best if not any(t.probe.row == row and t.probe.kind == "right" for t in tried)]
    if unknown:
        yield RewardIssue(
            level="doubtful", rule="ground truth", row=unknown[0], answer="",
            sentence=f"{len(unknown)} of {num_rows} rows have no ground truth with a text or number in it, so no right "
            f"answer could be tried: name its column with data.ground_truth_key, or look at saved answers with "
            f"`strop score`",
        )  # fmt: skip
    low = [row for row, score in best.items() if score is not None and score <= floor[row]]
    if low:
        num_known = num_rows - len(unknown)
        right = next(t for t in tried if t.probe.row == low[0] and t.probe.kind == "right")
        tries = sorted({t.probe.place for t in tried if t.probe.row == low[0] and t.probe.place})
        nested = f"; of its ground truth were tried {', '.join(tries)}" if tries else ""
        yield RewardIssue(
            level="broken" if 2 * len(low) > num_known else "doubtful", rule="right answers", row=low[0],
            answer=right.probe.text[:_SHOWN_CHARS],
            sentence=f"in {len(low)} of {num_known} rows no form of the right answer scores above empty and senseless "
            f"ones ({floor[low[0]]:g}){nested}: compare the ground truth's format with what the function looks for "
            f"in an answer",
        )  # fmt: skip
    good = {row: score for row, score in best.items() if score is not None and row not in low}
    yield from _of_exploits([t for t in tried if t.probe.row in good], good, floor)


_REMEDIES = {
    "the prompt echoed": "read the answer after a marker that the prompt has not",
    "several answers, the right one first": "read one place alone, the last, and give nothing for several answers",
    "several answers, the right one last": "a reward that reads the last answer does this; give nothing where several "
    "different ones stand, if a model may guess",
    "the right answer hidden in a comment": "read one place alone, the last",
    "a wrong answer repeated": "count an answer once",
    "the right answer repeated": "count an answer once; a bonus for length invites repetition",
}


def _of_exploits(
    tried: Sequence[_Trial], best: dict[int, float], floor: dict[int, float]
) -> Iterator[RewardIssue]:
    """Wrong answers that score like right ones, and right ones that score more for being repeated."""
    exploits: dict[str, list[_Trial]] = {}
    for trial in tried:
        score, row = trial.first.score, trial.probe.row
        if score is None or trial.probe.kind not in ("other", "exploit"):
            continue
        if trial.probe.name == "the right answer repeated":
            is_won = score > best[row] + 1e-9
        elif trial.probe.name == "several answers, the right one last":
            continue  # as good as right for every reward that reads the last answer; told with the one before
        else:
            is_won = score > (best[row] + floor[row]) / 2
        if is_won:
            name = "another row's answer" if trial.probe.kind == "other" else trial.probe.name
            exploits.setdefault(name, []).append(trial)
    for name, won in exploits.items():
        first, num_rows = won[0], len(best)
        is_broken = name in ("another row's answer", "a wrong answer repeated") and 2 * len(won) > num_rows
        remedy = _REMEDIES.get(name, "compare with the whole ground truth, not with a part of it")
        yield RewardIssue(
            level="broken" if is_broken else "doubtful", rule=name, row=first.probe.row,
            answer=first.probe.text[:_SHOWN_CHARS],
            sentence=f"such answers score {first.first.score:g} where the right answer scores "
            f"{best[first.probe.row]:g}, in {len(won)} of {num_rows} rows: {remedy}",
        )  # fmt: skip


def _of_calls(tried: Sequence[_Trial]) -> Iterator[RewardIssue]:
    """Findings about the calls: failures, other scores the second time, sizes, time."""

    def finding(
        level: Literal["doubtful", "broken"], rule: str, of: Sequence[_Trial], sentence: str
    ) -> Iterator[RewardIssue]:
        if of:
            probe = of[0].probe
            yield RewardIssue(
                level=level, rule=rule, row=probe.row, answer=probe.text[:_SHOWN_CHARS], sentence=sentence
            )

    failed = [t for t in tried if t.first.kind != "score" or t.again.kind != "score"]
    reason = next((o.error for t in failed for o in (t.first, t.again) if o.error), "")
    yield from finding(
        "broken", "failures", failed,
        f"{len(failed)} of {len(tried)} answers have no score ({reason}): whatever a model writes must get a number",
    )  # fmt: skip
    scored = [t for t in tried if t not in failed]
    other = [t for t in scored if not math.isclose(t.first.score or 0.0, t.again.score or 0.0, abs_tol=1e-9)]
    if other:
        first, again = other[0].first.score, other[0].again.score
        yield from finding(
            "broken", "deterministic", other,
            f"{len(other)} of {len(scored)} answers score differently the second time, in another order and process "
            f"(first {first:g}, then {again:g}): take out randomness, time and what is kept between calls",
        )  # fmt: skip
    big = [t for t in scored if abs(t.first.score or 0.0) > MAX_SIZE]
    if big:
        yield from finding(
            "doubtful", "range", big,
            f"{len(big)} scores are beyond {MAX_SIZE:g} in size ({big[0].first.score:g}): divide them, or use an "
            f"estimator that normalises",
        )  # fmt: skip
    values = {t.first.score for t in scored}
    if len(values) == 1:
        yield from finding(
            "broken", "constant", scored[:1],
            f"every answer scores {values.pop():g}, so nothing can be learnt: look at what the function is given",
        )  # fmt: skip
    slow = [t for t in scored if t.first.seconds > SLOW_S]
    longest = max((t.first.seconds for t in slow), default=0.0)
    yield from finding(
        "doubtful", "time", slow,
        f"{len(slow)} calls took more than {SLOW_S:g} s (the longest {longest:.1f} s): shorten the work on "
        f"long answers, and cut an answer before expressions search it",
    )  # fmt: skip
