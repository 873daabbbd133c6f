"""Samples that were played before, in place of generation: the same tokens, log-probs and rewards.

For work on the trainer and for comparing losses on equal data. A sample is found by the id of its prompt's visit and
its number, so the run that reads must visit the same rows (data, seed) as the one that wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from strop.agents.config import AGENTS_IN_A_WORLD
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome
from strop.run import RunError
from strop.run.samples import SampleStore
from strop.workers.episodes import Episode

_HELD_STEPS = 2
"""Steps of the recording whose samples are in memory."""


class Recording:
    """The training samples of a run's folder `samples/`.

    Args:
        folder: of the run.
        reward: says what a sample without a score is trained with.
    """

    def __init__(self, folder: Path, reward: RewardConfig) -> None:
        self.folder, self._reward = folder, reward
        self._store = SampleStore(folder / "samples")
        self.steps = self._store.steps()
        """Steps that have samples."""
        self._at = 0
        self._read = lru_cache(maxsize=_HELD_STEPS)(self._rows)

    def episode(self, prompt: Prompt, sample_index: int) -> Episode:
        """The sample of this prompt with this number; a failed one where it cannot be had, which says why."""
        try:
            return self.read_episode(prompt, sample_index)
        except (RunError, KeyError, TypeError, ValueError) as error:
            message = (
                str(error) if isinstance(error, RunError) else f"damaged: {type(error).__name__}: {error}"
            )
            failure = f"its recording in {self.folder} cannot be used: {message}"
            return Episode(prompt=prompt, sample_index=sample_index, trajectory=None, failure=failure)

    def read_episode(self, prompt: Prompt, sample_index: int) -> Episode:
        """As `episode`.

        Raises:
            RunError: the recording has none, or has it of another prompt.
            KeyError, TypeError, ValueError: the record is damaged.
        """
        row = self._find(prompt.uid, sample_index)
        first = (row.get("earlier_sequences") or [row])[0]
        if prompt.media:
            raise RunError(
                f"{prompt.uid} has images, which a recording does not hold: trainer.skip_rollout is for text"
            )
        if row.get("response_ids") is None:
            return Episode(
                prompt=prompt,
                sample_index=sample_index,
                trajectory=None,
                failure=str(row.get("error") or "it failed"),
            )
        prompt_ids = row.get("row_prompt_ids") or first["prompt_ids"]
        is_known = row.get("row_prompt_ids") is not None or prompt.agent_name not in AGENTS_IN_A_WORLD
        if (
            is_known and tuple(prompt_ids) != prompt.token_ids
        ):  # older recordings of worlds have what those showed alone
            raise RunError(
                f"{prompt.uid} has {len(prompt.token_ids)} prompt tokens, and others in {self.folder}: it was recorded "
                f"with another tokenizer, chat template or data; use those of that run"
            )
        turns = int(row.get("num_turns") or 2)
        return Episode(
            prompt=prompt,
            sample_index=sample_index,
            trajectory=_trajectory(
                prompt.uid, sample_index, row, num_turns=turns, timings=row.get("timings")
            ),
            earlier=tuple(
                _trajectory(prompt.uid, sample_index, earlier, num_turns=turns)
                for earlier in row.get("earlier_sequences") or ()
            ),
            text=str(row.get("response") or ""),
            outcome=self._outcome(row),
        )

    def _outcome(self, row: Mapping[str, Any]) -> Outcome | None:
        kind = row.get("outcome")
        if not kind:
            return None
        if kind == "score":
            return Outcome(kind="score", score=float(row["score"]), parts=row.get("reward_parts") or {})
        is_fixed = getattr(self._reward.on_failure, kind) == "fixed"
        return Outcome(
            kind=kind,
            parts=row.get("reward_parts") or {},
            error=str(row.get("error") or "not scored"),
            remedy=f"it is so in the recording {self.folder}: use another (trainer.skip_rollout)",
            fallback_score=self._reward.failed_score if is_fixed else None,
        )

    def _find(self, uid: str, index: int) -> Mapping[str, Any]:
        """The row of a sample: usually of the step after the last one that was found, or of the same."""
        for number in range(len(self.steps)):
            at = (self._at + number) % len(self.steps)
            row = self._read(self.steps[at]).get((uid, index))
            if row is not None:
                self._at = at
                return row
        raise RunError(
            f"{self.folder} has no sample {uid}/{index}: it holds steps {self.steps[0]} to {self.steps[-1]}, and this "
            f"run visits other rows, or more of them; use its data, trainer.seed, data.prompts_per_step and "
            f"rollout.samples_per_prompt, and no more than trainer.max_steps={len(self.steps)}"
        )

    def _rows(self, step: int) -> dict[tuple[str, int], dict[str, Any]]:
        return {(row["uid"], int(row["sample_index"])): row for row in self._store.read(step)}


def open_recording(folder: str | Path, reward: RewardConfig) -> Recording:
    """The recording of a run.

    Raises:
        RunError: the folder holds no samples.
    """
    recording = Recording(Path(folder), reward)
    if not recording.steps:
        raise RunError(
            f"trainer.skip_rollout={folder} holds no training samples: give the folder of a run that was trained with "
            f"run.save_samples=true"
        )
    return recording


def _trajectory(
    uid: str,
    index: int,
    row: Mapping[str, Any],
    *,
    num_turns: int,
    timings: Mapping[str, float] | None = None,
) -> Trajectory:
    """A training sequence, as `strop.workers.sample_rows` wrote it."""
    return Trajectory(
        uid=uid,
        sample_index=index,
        prompt_ids=tuple(row["prompt_ids"]),
        response_ids=tuple(row["response_ids"]),
        sampled=tuple(row["response_mask"]),
        log_probs=tuple(row["rollout_log_probs"]),
        versions=tuple(row["versions"]),
        num_turns=num_turns,
        stop_reason=str(row.get("stop_reason") or "stop"),
        timings=dict(timings or {}),
        turn_rewards=tuple((int(turn), float(value)) for turn, value in row.get("turn_rewards") or ()),
        stands_alone=bool(row.get("stands_alone")),
        anchor=str(row.get("anchor") or ""),
    )
