"""Specification of a role for every runtime: worker class, its arguments and its mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, ParamSpec, TypeVar, cast

from strop.controller.mesh import Mesh
from strop.controller.worker import Placement, Worker, placed

W = TypeVar("W", bound=Worker)
P = ParamSpec("P")


@dataclass(frozen=True, kw_only=True)
class RankDevices:
    """Devices of each process of a pool."""

    count: int = 1
    over_nodes: bool = False
    """A rank that needs more than a node has takes whole nodes, with a process on each."""


@dataclass(frozen=True)
class RoleSpec(Generic[W]):
    """The workers of a role before they are made; one is made in each process of the pool."""

    worker_class: type[W]
    """Their class."""
    args: tuple[Any, ...] = ()
    """Positional arguments of each."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of each."""
    mesh: Mesh | None = None
    """Parallel axes; None: all processes of the pool are data parallel."""
    follower: RoleSpec[Any] | None = None
    """The `Follower` on each further node of a rank that spans several; None: a rank is on one node."""

    def __post_init__(self) -> None:
        kind: object = self.worker_class
        if not isinstance(kind, type) or not issubclass(kind, Worker):
            raise TypeError(f"a role is made of a subclass of strop.controller.Worker, got {kind!r}")

    def on(self, mesh: Mesh | None) -> RoleSpec[W]:
        """The same role with these parallel axes."""
        return dataclasses.replace(self, mesh=mesh)

    def followed_by(self, follower: RoleSpec[Any]) -> RoleSpec[W]:
        """The same role, whose ranks may span nodes."""
        return dataclasses.replace(self, follower=follower)

    def make(self, placement: Placement, colocated: dict[str, Worker]) -> W:
        """One worker, which is then entered into the workers of its process under its role's name.

        Args:
            placement: where the worker stands, with the name of its role.
            colocated: the workers made in this process before, by role; each sees it as `Worker.colocated`.

        Raises:
            ValueError: the process has a worker of that role already.
        """
        if placement.role in colocated:
            raise ValueError(
                f"this process has a worker of role {placement.role!r} already; name roles apart"
            )
        with placed(placement, colocated):
            worker = self.worker_class(*self.args, **self.kwargs)
        colocated[placement.role] = worker
        return worker


def role(worker_class: Callable[P, W], *args: P.args, **kwargs: P.kwargs) -> RoleSpec[W]:
    """A role made of this class with these constructor arguments, which the type checker checks."""
    return RoleSpec(cast(type[W], worker_class), args, kwargs)


def meshes_on(pool: str, num_processes: int, roles: Mapping[str, RoleSpec[Any]]) -> dict[str, Mesh]:
    """The mesh of each role on a pool of so many processes.

    Raises:
        ValueError: there is no role, or a mesh has not as many workers as the pool has processes.
    """
    if not roles:
        raise ValueError(f"no role was given for pool {pool!r}; name at least one")
    meshes = {name: spec.mesh or Mesh(dp=num_processes) for name, spec in roles.items()}
    for name, mesh in meshes.items():
        if mesh.world_size != num_processes:
            raise ValueError(
                f"role {name!r} has a mesh of {mesh.world_size} workers, but pool {pool!r} has {num_processes} "
                f"processes; change the mesh or the pool"
            )
    return meshes
