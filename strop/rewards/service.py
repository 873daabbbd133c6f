"""What scores beside the functions of the reward: services that a guest asks (strop.base.guests)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self

from strop.rewards.outcome import Outcome
from strop.trajectory import Prompt, Trajectory


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


class Services(Protocol):
    """All services of a pool, which ask its functions too."""

    def start(self) -> None:
        """Get ready; RewardError where that is impossible."""
        ...

    async def close(self) -> None:
        """End what is under way, which fails."""
        ...

    def spent(self) -> dict[str, float]:
        """What each of them that has a price has cost in this process."""
        ...

    def tell_spent(self, run_spent: Mapping[str, float]) -> None:
        """What they have cost the run so far, in all its processes and starts."""
        ...

    async def score(self, prompt: Prompt, trajectory: Trajectory, text: str, *, fresh: bool) -> Outcome:
        """What they and the functions say of one answer; `fresh`: nothing is taken from a cache."""
        ...

    async def compare(self, prompt: Prompt, answers: Sequence[tuple[str, Outcome]]) -> list[Outcome]:
        """As RewardPool.compare."""
        ...
