"""The next prompts of a run, entered in its ledger."""

from __future__ import annotations

from collections.abc import Sequence

from strop.data.prompt_loader import PromptBatch, next_prompts
from strop.protocol.trajectory import Prompt
from strop.run import Fate, RunFolder
from strop.trainer.collectors.lengths import Lengths
from strop.trainer.config import Config
from strop.trainer.setup import TrainingData
from strop.utils.metrics import Metric

OVERLONG_PROMPTS = Metric("training/overlong_prompts", "prompts", "passed over with `data.streaming`")


class NextPrompts:
    """Draws prompts, and says in which order they are started."""

    def __init__(
        self, config: Config, run: RunFolder, data: TrainingData, lengths: Lengths | None, num_ranks: int
    ) -> None:
        """Args:
        config, run, data: of the run.
        lengths: of earlier answers, by which long prompts are started first; None: prompts keep their order.
        num_ranks: of the rollout role.
        """
        self._config, self._run, self._data = config, run, data
        self._lengths, self._num_ranks = lengths, num_ranks

    @property
    def are_over(self) -> bool:
        """No prompt is left to draw."""
        return self._data.sampler.is_finished

    def draw(self, step: int, num_prompts: int) -> PromptBatch:
        """The next visits, in the ledger; those that are passed over have their fate."""
        drawn = next_prompts(self._data.train, self._data.sampler, num_prompts)
        samples = range(self._config.rollout.samples_per_prompt)
        uids = [*(prompt.uid for prompt in drawn.prompts), *drawn.skipped]
        self._run.ledger.issue(step, [f"{uid}/{i}" for uid in uids for i in samples])
        self._run.ledger.settle(
            step,
            {
                f"{uid}/{i}": Fate("filtered", reason)
                for uid, reason in drawn.skipped.items()
                for i in samples
            },
        )
        return drawn

    def order(self, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
        """The prompts in the order in which they are started."""
        if self._lengths is None:
            return prompts
        return self._lengths.longest_first(prompts, ranks=self._num_ranks)

    def metrics(self, num_skipped: int) -> dict[str, float]:
        """OVERLONG_PROMPTS, where prompts may be passed over."""
        return {OVERLONG_PROMPTS: float(num_skipped)} if self._config.data.streaming else {}
