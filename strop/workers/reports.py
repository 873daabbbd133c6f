"""Reports of episodes for the controller: everything but the tokens, so a step costs it O(samples)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from strop.protocol.trajectory import Trajectory
from strop.rewards.outcome import Outcome
from strop.rewards.passing import passes
from strop.rollout.client import NoEngine
from strop.utils.sanitize import finite
from strop.workers.episodes import UNTIMED, Episode, EpisodeTimes, row_id

MAX_FAILED_SHARE = 0.2
"""Share of a step's episodes that may fail before scoring; above it the run stops."""


class EpisodesFailed(RuntimeError):
    """Too many episodes failed; the message holds the first failure."""


class StaleSamples(RuntimeError):
    """Samples of an older policy than the one that is trained, in a run that does not correct for it."""


class SequenceSize(NamedTuple):
    """Tokens of one training sequence of an episode."""

    num_prompt_tokens: int
    num_response_tokens: int
    num_sampled_tokens: int
    num_shared_tokens: int
    """First tokens that the sequence before it begins with as well: those of earlier turns."""


class SampleDecision(NamedTuple):
    """Decision of the controller about one sample: fate and advantage."""

    advantage: float | None
    """Mean over its trained tokens; None when it was not trained on."""
    fate: str
    """Empty for samples of a validation, which no step could train on."""
    reason: str
    """Reason of the fate; see `strop.run.Fate`."""


@dataclass(frozen=True, kw_only=True)
class EpisodeReport:
    """Report of one sample, without its tokens."""

    uid: str
    """Id of the prompt's visit; the group of the sample."""
    sample_index: int
    data_source: str
    """Data source of the prompt."""
    num_prompt_tokens: int
    num_added_tokens: int = 0
    """Of its prompt behind that of the row, such as a first observation: they take room from the response."""
    num_response_tokens: int = 0
    """Tokens after the prompt, sampled or given, of all training sequences."""
    num_sampled_tokens: int = 0
    """Response tokens that the policy chose."""
    num_shared_tokens: int = 0
    """First tokens that the training sequence before it begins with as well, where this is the report of one of
    several."""
    num_turns: int = 0
    versions: tuple[int, int] = (0, 0)
    """Oldest and newest policy version that sampled a token."""
    stop_reason: str = ""
    """Reason of its end; empty when the agent failed."""
    outcome: Outcome | None = None
    """None when there was nothing to score."""
    failure: str = ""
    """Reason for a missing trajectory; empty when there is one."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds per activity of the agent."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the agent counted."""
    times: EpisodeTimes = UNTIMED
    sequences: tuple[SequenceSize, ...] = ()
    """Its training sequences, where there are several."""
    row: str = ""
    """Name of a training sequence, where this is the report of one of several."""
    row_before: str = ""
    """Name of the training sequence before it."""

    @property
    def id(self) -> str:
        """Name of the row; of the only or last one of an episode, that of the sample in the ledger."""
        return self.row or self.episode_id

    @property
    def episode_id(self) -> str:
        """Name of the sample in the ledger: `<uid>/<sample_index>`."""
        return f"{self.uid}/{self.sample_index}"

    @property
    def is_last_row(self) -> bool:
        """No other training sequence of the episode comes after this one."""
        return self.row in ("", self.episode_id)

    def rows(self) -> tuple[EpisodeReport, ...]:
        """One report per training sequence, in order."""
        if not self.sequences:
            return (self,)
        names = [
            row_id(self.episode_id, number, len(self.sequences)) for number in range(len(self.sequences))
        ]
        return tuple(
            replace(self, sequences=(), row=name, row_before=before, **size._asdict())
            for before, name, size in zip(["", *names], names, self.sequences, strict=False)
        )

    @property
    def is_finished(self) -> bool:
        """True when the agent finished a trajectory."""
        return not self.failure

    @property
    def engine_was_lost(self) -> bool:
        """It failed because no engine was left to generate."""
        return self.failure.startswith(f"{NoEngine.__name__}:")

    @property
    def num_tokens(self) -> int:
        """Prompt and response; 0 where the agent failed."""
        if self.sequences:
            return sum(size.num_prompt_tokens + size.num_response_tokens for size in self.sequences)
        return self.num_prompt_tokens + self.num_response_tokens if self.is_finished else 0

    @property
    def score(self) -> float | None:
        """Score of the scorer; None when it gave nothing."""
        return None if self.outcome is None else self.outcome.score

    @property
    def accuracy(self) -> float | None:
        """The scorer's `acc` where it gave a number, else its score; None when not scored."""
        if self.outcome is None or self.outcome.score is None:
            return None
        acc = finite(self.outcome.parts.get("acc"))
        return self.outcome.score if acc is None else acc

    @property
    def passes(self) -> bool | None:
        """True when the sample passes, by its `acc`; False where it could not be scored, None where nothing decides
        whether it passes."""
        if self.outcome is None or self.outcome.score is None:
            return False
        return passes(self.outcome.score, self.outcome.parts)

    def reward(self) -> float | None:
        """Reward that the sample is trained with; None when it is left out of training.

        That is its score, or what the policy for samples that could not be scored has put in its place.
        """
        if not self.is_finished or self.outcome is None or self.num_sampled_tokens == 0:
            return None
        return self.outcome.fallback_score if self.score is None else self.score


def is_decided(reports: Iterable[EpisodeReport]) -> bool:
    """True when these samples have a pass rate: something decides of each that is scored if it passes."""
    return all(report.passes is not None for report in reports)


def episode_report(episode: Episode) -> EpisodeReport:
    """The report of an episode."""
    prompt, trajectory = episode.prompt, episode.trajectory
    if trajectory is None:
        return EpisodeReport(
            uid=prompt.uid,
            sample_index=episode.sample_index,
            data_source=prompt.data_source,
            num_prompt_tokens=len(prompt.token_ids),
            failure=episode.failure or "the agent failed",
            times=episode.times,
        )
    every = (*episode.earlier, trajectory)
    versions = [
        version
        for sequence in every
        for version, is_sampled in zip(sequence.versions, sequence.sampled, strict=True)
        if is_sampled
    ]
    sequences = tuple(
        SequenceSize(
            len(sequence.prompt_ids),
            len(sequence.response_ids),
            sum(sequence.sampled),
            0 if before is None else _num_common(before, sequence),
        )
        for before, sequence in zip((None, *episode.sequences), episode.sequences, strict=False)
    )
    return EpisodeReport(
        uid=prompt.uid,
        sample_index=episode.sample_index,
        data_source=prompt.data_source,
        num_prompt_tokens=len(every[0].prompt_ids),
        num_added_tokens=max(0, len(every[0].prompt_ids) - len(prompt.token_ids)),
        num_response_tokens=sum(len(sequence.response_ids) for sequence in every),
        num_sampled_tokens=len(versions),
        num_turns=trajectory.num_turns,
        versions=(min(versions, default=0), max(versions, default=0)),
        stop_reason=trajectory.stop_reason,
        outcome=episode.outcome,
        timings=trajectory.timings,
        numbers=trajectory.numbers,
        times=episode.times,
        sequences=sequences if len(sequences) > 1 else (),
    )


def _num_common(one: Trajectory, other: Trajectory) -> int:
    """Tokens that two sequences have in common from their beginning."""
    ids, others = one.prompt_ids + one.response_ids, other.prompt_ids + other.response_ids
    known, limit = 0, min(len(ids), len(others))
    size = limit
    while size:  # tuples are compared faster than their tokens one by one
        if known + size <= limit and ids[known : known + size] == others[known : known + size]:
            known += size
        else:
            size //= 2
    return known


def training_rewards(reports: Sequence[EpisodeReport], *, weight: float) -> dict[str, float]:
    """Reward of each sample before shaping, by its id: its weighted score.

    Samples that are left out of training are not in it.
    """
    return {report.id: weight * score for report in reports if (score := report.reward()) is not None}


def check_failed_episodes(reports: Sequence[EpisodeReport]) -> None:
    """Refuse to go on when the agents of many samples failed.

    Raises:
        EpisodesFailed: more than MAX_FAILED_SHARE of them.
    """
    failures = [report for report in reports if not report.is_finished]
    if len(failures) > MAX_FAILED_SHARE * len(reports):
        raise EpisodesFailed(
            f"{len(failures)} of {len(reports)} episodes failed; the first one, {failures[0].id}: "
            f"{failures[0].failure}"
        )


def check_versions(reports: Sequence[EpisodeReport], version: int, *, is_corrected: bool) -> None:
    """Refuse to train on samples of an older policy, unless the algorithm corrects for the difference.

    A loss that takes the ratio to the log-probs that the trainer computes anew does not see who sampled.

    Args:
        reports: of the samples.
        version: of the policy that is to be trained.
        is_corrected: the loss takes the ratio to the rollout's log-probs, or algorithm.correction weighs or rejects
            what trainer and rollout disagree about.

    Raises:
        StaleSamples: a token was sampled by an older version, and nothing corrects for it.
    """
    if is_corrected:
        return
    stale = [report for report in reports if report.num_sampled_tokens and report.versions[0] < version]
    if stale:
        raise StaleSamples(
            f"{len(stale)} of {len(reports)} samples are older than the policy: {stale[0].id} was sampled by version "
            f"{stale[0].versions[0]}, and version {version} is trained. The loss would take them for its own: set "
            f"algorithm.correction.weights (token, sequence or geometric), algorithm.correction.reject or "
            f"algorithm.old_log_probs=rollout"
        )
