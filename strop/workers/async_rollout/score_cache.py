"""Scores of samples that have not been trained: with them, a run that was interrupted does not ask for them again.

It stands between the episode runner and the scorers, as the cache of answers stands between agents and engines. A
sample that comes out as it was has the outcome that it had; one that was still being scored, or came out otherwise, is
scored.

Concurrency: one asyncio loop.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome
from strop.rewards.pool import RewardPool


@dataclass(frozen=True, kw_only=True)
class SavedScore:
    """Cached score of a sample."""

    scored: str
    """Digest of what was scored."""
    outcome: Outcome


SavedScores = Mapping[str, SavedScore]
"""Saved scores of one prompt, by the number of the sample, as text."""


class ScoreCache:
    """Scores samples, with a pool or from earlier scores."""

    def __init__(self, pool: RewardPool) -> None:
        self._pool = pool
        self._scores: dict[str, dict[str, SavedScore]] = {}
        self._restored: dict[str, SavedScores] = {}

    @property
    def config(self) -> RewardConfig:
        """Settings of the reward."""
        return self._pool.config

    @property
    def compares(self) -> bool:
        """True when the pool compares answers."""
        return self._pool.compares

    def restore(self, uid: str, scores: SavedScores) -> None:
        """Keep the outcomes of this prompt from now on; `scores` are those of an earlier process."""
        self._scores[uid] = {}
        self._restored[uid] = scores

    def forget(self, uids: Collection[str]) -> None:
        """Drop the scores of prompts that were trained or given up."""
        for uid in uids:
            self._scores.pop(uid, None)
            self._restored.pop(uid, None)

    def saved(self) -> dict[str, SavedScores]:
        """Scores of every prompt that is kept, by uid, with restored ones that were not asked for again yet."""
        return {uid: {**self._restored[uid], **scores} for uid, scores in self._scores.items()}

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, solution_str: str, *, in_group: bool = False
    ) -> Outcome:
        """As the pool does; what the cache has is not scored again."""
        scores, number = self._scores.get(prompt.uid), str(trajectory.sample_index)
        if scores is None:
            return await self._pool.score(prompt, trajectory, solution_str, in_group=in_group)
        scored = _digest(trajectory, solution_str)
        saved = self._restored[prompt.uid].get(number)
        if saved is not None and saved.scored == scored:
            outcome = saved.outcome
        else:
            outcome = await self._pool.score(prompt, trajectory, solution_str, in_group=in_group)
        scores[number] = SavedScore(scored=scored, outcome=outcome)
        return outcome

    async def compare(
        self,
        prompt: Prompt,
        answers: Sequence[tuple[str, Outcome]],
        trajectories: Sequence[Trajectory] = (),
    ) -> list[Outcome]:
        """As the pool does. No note is kept of it: a run that goes on compares again what has not been trained."""
        return await self._pool.compare(prompt, answers, trajectories)


def _digest(trajectory: Trajectory, solution_str: str) -> str:
    content = [solution_str, list(trajectory.response_ids), trajectory.num_turns, dict(trajectory.extra)]
    return hashlib.blake2b(
        json.dumps(content, sort_keys=True, default=repr).encode(), digest_size=8
    ).hexdigest()
