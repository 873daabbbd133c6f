"""What scores beside the functions of the reward: services that a guest asks (strop.base.guests)."""

from __future__ import annotations

from typing import Protocol


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
