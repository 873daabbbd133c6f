"""A group's processes put together: started on a pool, or found by the name of a detached group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, remove_placement_group

from strop.controller.mesh import Mesh
from strop.controller.ray.cluster import Cluster
from strop.controller.ray.crew import Crew
from strop.controller.ray.members import Member
from strop.controller.ray.messages import GroupCard
from strop.controller.ray.pool import RayResourcePool
from strop.controller.ray.start import StartOptions, make_workers, start_processes
from strop.controller.roles import RoleSpec, meshes_on


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Processes with their workers, ready for calls."""

    crew: Crew
    """How they are called and ended."""
    members: Sequence[Member]
    """The processes, in rank order."""
    meshes: Mapping[str, Mesh]
    """Parallel axes of each role in them."""
    is_detached: bool
    """True where they outlive this controller."""


def assemble(
    pool: RayResourcePool, roles: Mapping[str, RoleSpec[Any]], options: StartOptions, address: str | None
) -> Assembly:
    """Start processes on a pool and make the workers of all roles in each."""
    meshes = meshes_on(pool, roles)
    cluster = Cluster(address, options.namespace)
    name = options.detached_name
    try:
        pool.take(cluster, timeout_s=options.timeout_s, detached_name=_places(name) if name else "")
    except BaseException:
        cluster.close()
        raise

    def give_back() -> None:
        pool.close()
        cluster.close()

    crew = Crew(on_stop=give_back, on_leave=cluster.close)
    try:
        members = start_processes(crew, pool, options)
        make_workers(crew, members, pool, roles, meshes, options.timeout_s)
        card = GroupCard(
            pool=pool.name, log_paths=[str(member.log_path) for member in members], meshes=meshes
        )
        _ask(crew, members[0], lambda handle: handle.remember.remote(card), options.timeout_s)
    except BaseException as error:
        crew.stop(f"the start of the group did not succeed ({type(error).__name__}: {error})")
        raise
    return Assembly(crew=crew, members=members, meshes=meshes, is_detached=bool(name))


def find(name: str, namespace: str, address: str | None, timeout_s: float) -> Assembly:
    """The processes of a detached group.

    Raises:
        ValueError: there is no such group, or a part of it is gone.
    """
    cluster = Cluster(address, namespace)

    def give_back() -> None:
        with contextlib.suppress(ValueError):  # the places are gone already
            remove_placement_group(get_placement_group(_places(name)))
        cluster.close()

    crew = Crew(on_stop=give_back, on_leave=cluster.close)
    try:
        first = _handle(name, 0, namespace)
        try:
            card: GroupCard = ray.get(first.card.remote(), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"group {name!r} has not answered within {timeout_s:g} s") from None
        handles = [_handle(name, rank, namespace) for rank in range(len(card.log_paths))]
        nodes = {node.node_id: node for node in cluster.nodes()}
        presences = ray.get([handle.presence.remote() for handle in handles], timeout=timeout_s)
        for rank, (handle, presence, log_path) in enumerate(
            zip(handles, presences, card.log_paths, strict=True)
        ):
            crew.members.append(
                Member(
                    handle=handle,
                    pool=card.pool,
                    rank=rank,
                    node=nodes[presence.node_id],
                    log_path=Path(log_path),
                    presence=presence,
                    roles=list(card.meshes),
                )
            )
    except BaseException:
        crew.leave()
        raise
    return Assembly(crew=crew, members=crew.members, meshes=card.meshes, is_detached=True)


def _handle(name: str, rank: int, namespace: str) -> Any:
    try:
        return ray.get_actor(f"{name}/{rank}", namespace=namespace)
    except ValueError:
        raise ValueError(
            f"there is no detached group {name!r} in namespace {namespace!r} (no process {rank} of it); it has "
            f"ended, or was made on another cluster"
        ) from None


def _ask(crew: Crew, member: Member, give: Callable[[Any], Any], timeout_s: float) -> Any:
    return crew.wait(crew.give(member, give, method="start", timeout_s=timeout_s))


def _places(name: str) -> str:
    return f"{name}/places"
