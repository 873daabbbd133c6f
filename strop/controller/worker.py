"""The base class of a role's workers: an ordinary object that knows its place in the group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

from strop.controller.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a worker stands in its group; by default, alone."""

    rank: int = 0
    """Number of the worker in its group."""
    mesh: Mesh = field(default_factory=Mesh)
    """The parallel axes of the group."""


_PLACEMENT: ContextVar[Placement | None] = ContextVar("strop_worker_placement", default=None)


@contextmanager
def placed(placement: Placement) -> Iterator[None]:
    """Workers made inside this context have this placement; for the runtimes."""
    token = _PLACEMENT.set(placement)
    try:
        yield
    finally:
        _PLACEMENT.reset(token)


class Worker:
    """One process of a role. Made outside a group it is rank 0 of 1, so it also runs in a plain test.

    The placement is known from the start of `__init__`, with or without a call of `super().__init__`.
    """

    placement: Placement
    """Rank and mesh; set before `__init__` runs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An object that has its placement already."""
        worker = super().__new__(cls)
        worker.placement = _PLACEMENT.get() or Placement()
        return worker

    @property
    def rank(self) -> int:
        """Number of this worker in its group."""
        return self.placement.rank

    @property
    def world_size(self) -> int:
        """Number of workers in the group."""
        return self.placement.mesh.world_size

    @property
    def dp_rank(self) -> int:
        """Number of this worker's part of a batch."""
        return self.placement.mesh.dp_rank(self.rank)

    @property
    def dp_size(self) -> int:
        """Number of parts a batch is cut into."""
        return self.placement.mesh.dp
