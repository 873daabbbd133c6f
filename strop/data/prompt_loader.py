"""The prompts of a step: visits of rows, without those that are skipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from strop.data.sampler import PromptSampler
from strop.data.visit_ids import visit_uid
from strop.protocol.trajectory import Prompt


class TrainingPrompts(Protocol):
    """Training prompts of a run: a `PromptDataset`, or rows that are streamed."""

    @property
    def row_numbers(self) -> Sequence[int]:
        """Rows that are kept, which a sampler visits."""

    @property
    def has_media(self) -> bool:
        """A row has images or videos, as far as it is known."""

    def prompt(self, row: int, uid: str) -> Prompt:
        """The prompt of a row number, as the visit `uid`."""

    def skip_reason(self, prompt: Prompt) -> str:
        """Reason why a visited prompt is skipped; empty when it is not."""

    def report(self) -> str:
        """One line: how many there are."""


@dataclass(frozen=True, kw_only=True)
class PromptBatch:
    """The visits of a step, or of a round of one."""

    prompts: list[Prompt]
    """Prompts to sample answers to, in the order of the visits."""
    skipped: dict[str, str]
    """Reason of each skipped visit, by uid."""


def next_prompts(prompts: TrainingPrompts, sampler: PromptSampler, count: int) -> PromptBatch:
    """`count` prompts of the next visits, fewer only when the last epoch is over or every row is retired, as those are
    that are skipped.

    Raises:
        ValueError: no row of all has a prompt that can be played.
    """
    result = PromptBatch(prompts=[], skipped={})
    while len(result.prompts) < count:
        visits = sampler.next(count - len(result.prompts))
        if not visits:
            break
        for epoch, row in visits:
            prompt = prompts.prompt(row, visit_uid(epoch, row))
            reason = prompts.skip_reason(prompt)
            if reason:
                result.skipped[prompt.uid] = reason
                sampler.retire(row, epoch)  # no later epoch finds it shorter
            else:
                result.prompts.append(prompt)
        if not result.prompts and len(result.skipped) >= len(prompts.row_numbers):
            raise ValueError(
                f"none of {len(result.skipped)} visited prompts can be used ({next(iter(result.skipped.values()))}); "
                f"raise the limit, or check the data with `strop data check`"
            )
    return result
