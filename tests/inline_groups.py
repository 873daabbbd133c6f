"""Worker groups in this process, around workers that a test makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from strop.controller import InlineWorkerGroup, Mesh, Placement, Worker, placed

W = TypeVar("W", bound=Worker)


def inline_group(
    make_worker: Callable[[], W], *, world_size: int = 1, mesh: Mesh | None = None
) -> InlineWorkerGroup[W]:
    """A group of so many workers, all data parallel, or as many as the mesh has."""
    mesh = mesh or Mesh(dp=world_size)
    workers = []
    for rank in range(mesh.world_size):
        with placed(Placement(rank=rank, mesh=mesh, local_rank=rank, local_world_size=mesh.world_size)):
            workers.append(make_worker())
    return InlineWorkerGroup(workers, mesh)
