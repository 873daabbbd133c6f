"""What scores beside the functions of the reward: services that guests join (strop.base.guests)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from strop.rewards.combining import Part
from strop.rewards.outcome import CallFailed


class ServiceSection(Protocol):
    """The section of a service below reward."""

    @property
    def scores(self) -> bool:
        """Whether the service is asked at all."""
        ...

    @property
    def compares(self) -> bool:
        """Whether it compares the answers to a prompt, and scores none by itself."""
        ...

    @property
    def has_price(self) -> bool:
        """Whether asking it costs something, which the run then counts."""
        ...

    def share(self, rank: int, count: int) -> Self:
        """What process `rank` of `count` may do, so that all of them together keep the limits.

        Raises:
            ValueError: the limits cannot be shared by so many.
        """
        ...


class RewardService(Protocol):
    """One process's way to a service."""

    @property
    def spent(self) -> float:
        """What it has cost in this process."""
        ...

    def tell_spent(self, run_spent: float) -> None:
        """What it has cost the run so far, in all its processes and starts."""
        ...

    def start(self) -> None:
        """Get ready; RewardError where that is impossible."""
        ...

    async def close(self) -> None:
        """End what is under way, which fails with CallFailed."""
        ...

    @property
    def compares(self) -> bool:
        """It scores no answer by itself, but compares those to a prompt (`ComparingService`)."""
        ...

    async def score(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[Part, dict[str, float]]:
        """The score of one answer under the name of the section, and what it used up, by name (`judge/requests`).

        Args:
            item: prompt (as text), messages, response, data_source and ground_truth; plain data.
            fresh: do not take it from a cache.

        Raises:
            CallFailed: there is none.
        """
        ...


class ComparingService(RewardService, Protocol):
    """A service that compares the answers to a prompt."""

    async def compare(
        self, items: Sequence[Mapping[str, Any]], *, fresh: bool
    ) -> list[tuple[Part | CallFailed, dict[str, float]]]:
        """Of each answer the score or why it has none, and its share of what was used up.

        Args:
            items: as of `score`, all answers to one prompt.
            fresh: do not take it from a cache.
        """
        ...
