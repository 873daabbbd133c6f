"""Parts of a reward that a run trains with (algorithm.reward_keys): a sample that lacks one could not be scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome
from strop.utils.sanitize import finite


def with_parts(outcome: Outcome, keys: Sequence[str], config: RewardConfig) -> Outcome:
    """The outcome; where it has a score and a part is missing or no finite number, an error that is treated as
    reward.on_failure.error says.

    Args:
        outcome: of a sample that is to be trained on.
        keys: parts that are needed; `score` is the score itself.
        config: of the reward.
    """
    if outcome.score is None:
        return outcome
    numbers = {**outcome.parts, "score": outcome.score}
    lacking = next((key for key in keys if finite(numbers.get(key)) is None), None)
    if lacking is None:
        return outcome
    description = f"{lacking}: {numbers[lacking]}" if lacking in numbers else ", ".join(sorted(numbers))
    return replace(
        outcome,
        kind="error",
        score=None,
        parts={},
        token_rewards=(),
        error=f"algorithm.reward_keys names {lacking!r}, but the reward has no such number for this sample: it has "
        f"{description}; return one for every sample",
        remedy="",
        fallback_score=config.failed_score if config.on_failure.error == "fixed" else None,
    )
