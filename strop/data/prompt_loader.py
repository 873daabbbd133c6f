"""The prompts of a step: visits of rows, without those that cannot be played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from strop.data.sampler import PromptSampler
from strop.data.visit_ids import visit_uid
from strop.protocol.trajectory import Prompt


class TrainingPrompts(Protocol):
    """What a run asks for its training prompts: a `PromptDataset`, or rows that are streamed."""

    @property
    def row_numbers(self) -> Sequence[int]:
        """Rows that are kept; what a sampler visits."""

    @property
    def has_media(self) -> bool:
        """A row has images or videos, as far as it is known."""

    def prompt(self, row: int, uid: str) -> Prompt:
        """The prompt of a row number, as the visit `uid`."""

    def refusal(self, prompt: Prompt) -> str:
        """Why a visited prompt is not played; empty when it is."""

    def report(self) -> str:
        """One line: how many there are."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The visits of a step, or of a round of one."""

    prompts: list[Prompt]
    """Those that are played, in the order of the visits."""
    refused: dict[str, str]
    """The others: why, by uid."""


def draw(prompts: TrainingPrompts, sampler: PromptSampler, count: int) -> Drawn:
    """`count` prompts of the next visits, fewer only when the last epoch is over.

    Raises:
        ValueError: no row of all has a prompt that can be played.
    """
    drawn = Drawn(prompts=[], refused={})
    while len(drawn.prompts) < count:
        visits = sampler.next(count - len(drawn.prompts))
        if not visits:
            break
        for epoch, row in visits:
            prompt = prompts.prompt(row, visit_uid(epoch, row))
            reason = prompts.refusal(prompt)
            if reason:
                drawn.refused[prompt.uid] = reason
            else:
                drawn.prompts.append(prompt)
        if not drawn.prompts and len(drawn.refused) >= len(prompts.row_numbers):
            raise ValueError(
                f"none of {len(drawn.refused)} visited prompts can be used ({next(iter(drawn.refused.values()))}); "
                f"raise the limit, or check the data with `strop data check`"
            )
    return drawn
