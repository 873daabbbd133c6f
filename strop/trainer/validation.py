"""Validation: answers on prompts that are not trained on, and how sure their pass rate is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.algorithms.evaluation import wilson_interval
from strop.rollout.types import Sampling
from strop.trainer.config import EvalConfig
from strop.trainer.rollouts import Episode, Rollouts
from strop.trainer.validation_metrics import validation_metrics
from strop.trajectory import Prompt

PASS_THRESHOLD = 0.5
"""An answer passes when its accuracy (the scorer's `acc`, else its score) is above this."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """The result of one pass over validation prompts."""

    episodes: list[Episode]
    metrics: dict[str, float]
    """val-core/... and val-aux/... by data source."""
    num_answers: int
    num_passed: int
    num_unscored: int
    """Answers whose scorer failed; they count as not passed."""

    @property
    def pass_rate(self) -> float:
        """Share of answers that pass."""
        return self.num_passed / self.num_answers

    def interval(self) -> tuple[float, float]:
        """95 % Wilson interval of the pass rate."""
        return wilson_interval(self.num_passed, self.num_answers)

    def describe(self) -> str:
        """`pass rate 91.0 % (95 % interval 86.2 to 94.2) on 200 answers`."""
        low, high = self.interval()
        line = (
            f"pass rate {100 * self.pass_rate:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f}) "
            f"on {self.num_answers} answers"
        )
        if self.num_unscored:
            line += f"; {self.num_unscored} could not be scored and count as failed"
        return line


async def validate(
    rollouts: Rollouts, prompts: Sequence[Prompt], config: EvalConfig, sampling: Sampling
) -> Validation:
    """Answer every prompt `config.samples_per_prompt` times and score the answers."""
    episodes = await rollouts.play(prompts, samples_per_prompt=config.samples_per_prompt, sampling=sampling)
    return summarize_validation(episodes)


def summarize_validation(episodes: Sequence[Episode]) -> Validation:
    """Pass rate and metrics of scored episodes."""
    names = {"reward", *(name for e in episodes if e.outcome is not None for name in e.outcome.parts)}
    metrics = validation_metrics(
        data_sources=[episode.prompt.data_source for episode in episodes],
        uids=[episode.prompt.uid for episode in episodes],
        variables={name: [_variable(episode, name) for episode in episodes] for name in sorted(names)},
        num_turns=[e.trajectory.num_turns for e in episodes if e.trajectory is not None],
    )
    accuracies = [episode.accuracy for episode in episodes]
    return Validation(
        episodes=list(episodes),
        metrics=metrics,
        num_answers=len(episodes),
        num_passed=sum(a is not None and a > PASS_THRESHOLD for a in accuracies),
        num_unscored=sum(a is None for a in accuracies),
    )


def _variable(episode: Episode, name: str) -> float | str | bool | None:
    if episode.outcome is None:
        return None
    return episode.score if name == "reward" else episode.outcome.parts.get(name)
