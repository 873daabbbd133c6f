"""A reward tried without a model: a certificate with a verdict, and a finding for each thing that is wrong.

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
class RewardFinding:
    """One thing that is wrong, at the first row where it was seen."""

    level: Literal["doubtful", "broken"]
    rule: str
    row: int
    answer: str
    """At most 200 characters of it."""
    sentence: str
    """What happened, how often, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What a reward did with the answers it was tried with."""

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
    findings: tuple[RewardFinding, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst level among the findings."""
        levels = {finding.level for finding in self.findings}
        return "broken" if "broken" in levels else "doubtful" if levels else "ok"

    def as_json(self) -> dict[str, Any]:
        """Plain data, the verdict first."""
        return {"verdict": self.verdict, **asdict(self)}


@dataclass(frozen=True, kw_only=True)
class _Tried:
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
) -> Certificate:
    """Try a reward with answers to these rows.

    Args:
        name: what the certificate calls it.
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
    known = _scored(first, prompts, reward, tokenizer)
    best = [_best_right(row, first, known) for row in range(len(prompts))]
    second = second_probes(prompts, best)
    probes = [*first, *second]
    if in_groups:  # a score may depend on what else is in the group
        outcomes = _scored(probes, prompts, reward, tokenizer)
    else:
        outcomes = [*known, *_scored(second, prompts, reward, tokenizer)]
    again = _scored(probes[::-1], prompts, reward, tokenizer)[::-1]
    tried = [
        _Tried(probe=probe, first=first, again=second)
        for probe, first, second in zip(probes, outcomes, again, strict=True)
    ]
    scores = [one.score for one in outcomes if one.score is not None]
    seconds = [one.seconds for one in outcomes]
    right = [score for row in range(len(prompts)) if (score := _best(row, tried)) is not None]
    return Certificate(
        reward=name, num_rows=len(prompts), num_calls=2 * len(probes), lowest=min(scores, default=None),
        highest=max(scores, default=None), right_example=_example(tried), right_mean=_mean(right),
        junk_mean=_mean([t.first.score for t in tried if t.probe.kind == "junk" and t.first.score is not None]),
        mean_s=math.fsum(seconds) / len(seconds), max_s=max(seconds),
        peak_memory_mib=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / _KIB_PER_MIB,
        findings=tuple(_findings(tried, len(prompts))),
    )  # fmt: skip


def _scored(
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
    return [one.outcome for one in rescore(samples, reward, tokenizer=tokenizer)] if samples else []


def _best_right(row: int, probes: Sequence[Probe], outcomes: Sequence[Outcome]) -> Probe | None:
    found = [
        (outcome.score, probe)
        for probe, outcome in zip(probes, outcomes, strict=True)
        if probe.row == row and probe.kind == "right" and outcome.score is not None
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


def _best(row: int, tried: Sequence[_Tried]) -> float | None:
    scores = [t.first.score for t in tried if t.probe.row == row and t.probe.kind == "right"]
    return max((score for score in scores if score is not None), default=None)


def _example(tried: Sequence[_Tried]) -> str:
    """How a right answer looks to the reward, of the first row in which one scores above empty and senseless ones."""
    for row in dict.fromkeys(one.probe.row for one in tried):
        of_row = [one for one in tried if one.probe.row == row and one.first.score is not None]
        right = [one for one in of_row if one.probe.kind == "right"]
        floor = max((one.first.score or 0.0 for one in of_row if one.probe.kind == "junk"), default=0.0)
        best = max(right, key=lambda one: one.first.score or 0.0, default=None)
        if best is not None and (best.first.score or 0.0) > floor:
            where = f" ({best.probe.place})" if best.probe.place else ""
            return f"{best.probe.text[:_SHOWN_CHARS]!r}{where} scores {best.first.score:g}"
    return ""


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _findings(tried: Sequence[_Tried], num_rows: int) -> Iterator[RewardFinding]:
    yield from _of_calls(tried)
    best = {row: _best(row, tried) for row in range(num_rows)}
    junk = [t for t in tried if t.probe.kind == "junk" and t.first.score is not None]
    floor = {
        row: max((t.first.score or 0.0 for t in junk if t.probe.row == row), default=0.0) for row in best
    }
    unknown = [row for row in best if not any(t.probe.row == row and t.probe.kind == "right" for t in tried)]
    if unknown:
        yield RewardFinding(
            level="doubtful", rule="ground truth", row=unknown[0], answer="",
            sentence=f"{len(unknown)} of {num_rows} rows have no ground truth with a text or number in it, so no right "
            f"answer could be tried: name its column with data.ground_truth_key, or look at saved answers with "
            f"`strop score`",
        )  # fmt: skip
    low = [row for row, score in best.items() if score is not None and score <= floor[row]]
    if low:
        known = num_rows - len(unknown)
        right = next(t for t in tried if t.probe.row == low[0] and t.probe.kind == "right")
        tries = sorted({t.probe.place for t in tried if t.probe.row == low[0] and t.probe.place})
        nested = f"; of its ground truth were tried {', '.join(tries)}" if tries else ""
        yield RewardFinding(
            level="broken" if 2 * len(low) > known else "doubtful", rule="right answers", row=low[0],
            answer=right.probe.text[:_SHOWN_CHARS],
            sentence=f"in {len(low)} of {known} rows no form of the right answer scores above empty and senseless ones "
            f"({floor[low[0]]:g}){nested}: compare the ground truth's format with what the function looks for in an "
            f"answer",
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
    tried: Sequence[_Tried], best: dict[int, float], floor: dict[int, float]
) -> Iterator[RewardFinding]:
    """Wrong answers that score like right ones, and right ones that score more for being repeated."""
    seen: dict[str, list[_Tried]] = {}
    for one in tried:
        score, row = one.first.score, one.probe.row
        if score is None or one.probe.kind not in ("other", "exploit"):
            continue
        if one.probe.name == "the right answer repeated":
            is_won = score > best[row] + 1e-9
        elif one.probe.name == "several answers, the right one last":
            continue  # as good as right for every reward that reads the last answer; told with the one before
        else:
            is_won = score > (best[row] + floor[row]) / 2
        if is_won:
            name = "another row's answer" if one.probe.kind == "other" else one.probe.name
            seen.setdefault(name, []).append(one)
    for name, won in seen.items():
        one, of_kind = won[0], len(best)
        is_broken = name in ("another row's answer", "a wrong answer repeated") and 2 * len(won) > of_kind
        remedy = _REMEDIES.get(name, "compare with the whole ground truth, not with a part of it")
        yield RewardFinding(
            level="broken" if is_broken else "doubtful", rule=name, row=one.probe.row,
            answer=one.probe.text[:_SHOWN_CHARS],
            sentence=f"{name} scores {one.first.score:g} where the right answer scores {best[one.probe.row]:g}, in "
            f"{len(won)} of {of_kind} rows: {remedy}",
        )  # fmt: skip


def _of_calls(tried: Sequence[_Tried]) -> Iterator[RewardFinding]:
    """What the calls themselves show: failures, other scores the second time, sizes, time."""

    def found(
        level: Literal["doubtful", "broken"], rule: str, of: Sequence[_Tried], sentence: str
    ) -> Iterator[RewardFinding]:
        if of:
            one = of[0].probe
            yield RewardFinding(
                level=level, rule=rule, row=one.row, answer=one.text[:_SHOWN_CHARS], sentence=sentence
            )

    failed = [t for t in tried if t.first.kind != "score" or t.again.kind != "score"]
    why = next((o.error for t in failed for o in (t.first, t.again) if o.error), "")
    yield from found(
        "broken", "failures", failed,
        f"{len(failed)} of {len(tried)} answers have no score ({why}): whatever a model writes must get a number",
    )  # fmt: skip
    scored = [t for t in tried if t not in failed]
    other = [t for t in scored if not math.isclose(t.first.score or 0.0, t.again.score or 0.0, abs_tol=1e-9)]
    if other:
        first, again = other[0].first.score, other[0].again.score
        yield from found(
            "broken", "deterministic", other,
            f"{len(other)} of {len(scored)} answers score differently the second time, in another order and process "
            f"(first {first:g}, then {again:g}): take out randomness, time and what is kept between calls",
        )  # fmt: skip
    big = [t for t in scored if abs(t.first.score or 0.0) > MAX_SIZE]
    if big:
        yield from found(
            "doubtful", "range", big,
            f"{len(big)} scores are beyond {MAX_SIZE:g} in size ({big[0].first.score:g}): divide them, or use an "
            f"estimator that normalises",
        )  # fmt: skip
    values = {t.first.score for t in scored}
    if len(values) == 1:
        yield from found(
            "broken", "constant", scored[:1],
            f"every answer scores {values.pop():g}, so nothing can be learnt: look at what the function is given",
        )  # fmt: skip
    slow = [t for t in scored if t.first.seconds > SLOW_S]
    longest = max((t.first.seconds for t in slow), default=0.0)
    yield from found(
        "doubtful", "time", slow,
        f"{len(slow)} calls took more than {SLOW_S:g} s (the longest {longest:.1f} s): shorten the work on "
        f"long answers, and cut an answer before expressions search it",
    )  # fmt: skip
