"""Start of the processes of a pool, and construction of the workers in them.

Each process is started with its environment (rank, devices, threads, the user's variables), so that it holds
before anything is imported there.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from strop.controller.mesh import Mesh
from strop.controller.ray import launcher
from strop.controller.ray.cluster import Node, run_on, visibility_variables
from strop.controller.ray.detached import DetachedName
from strop.controller.ray.manager import WorkerManager
from strop.controller.ray.members import PendingCall, WorkerHandle
from strop.controller.ray.pool import RayResourcePool
from strop.controller.ray.process import WorkerProcess
from strop.controller.roles import RoleSpec
from strop.controller.store_server import Rendezvous
from strop.controller.worker import Placement
from strop.utils.allocator import allocator_variables
from strop.utils.machine_limits import usable_cores


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Options of the start of processes."""

    name: str
    """Name of the processes: their logs are `<name>-<rank>.log`."""
    timeout_s: float
    """Deadline of each phase of the start."""
    log_dir: Path
    """Folder for the output of the processes, on each node."""
    env: Mapping[str, str]
    """Environment variables of the user; they win over ours."""
    num_threads: int
    """OMP_NUM_THREADS of each process, where neither `env` nor the environment of this process sets it."""
    detached: DetachedName | None
    """Name under which they are found again where they outlive this process; None: they end with it."""


def start_processes(
    manager: WorkerManager, pool: RayResourcePool, options: StartOptions
) -> list[WorkerHandle]:
    """The processes of a pool in rank order, with their followers; waits until all have started.

    Raises:
        WorkerFailed: a process died.
        CallTimeout: not all have started in time; names those that have not.
    """
    pool.launch_commands = _launch_commands(pool.machines, options.timeout_s)
    members = [start_rank(manager, pool, rank, options) for rank in range(pool.world_size)]
    processes = [process for member in members for process in (member, *member.followers)]
    call = manager.next_call()
    pending_calls = [
        manager.give(
            member,
            lambda handle: handle.process_info.remote(),
            method="start of the worker process",
            call=call,
            timeout_s=options.timeout_s,
        )
        for member in processes
    ]
    for member, pending in zip(processes, pending_calls, strict=True):
        member.process_info = manager.wait(pending)  # at once: whoever ends the processes has to know it
    return members


def make_worker(
    manager: WorkerManager,
    member: WorkerHandle,
    spec: Any,
    placement: Placement,
    *,
    follower: Any = None,
    call: int | None = None,
    timeout_s: float,
) -> PendingCall:
    """Make the worker of a role in a process, and its followers before it; nobody waits for them.

    Args:
        manager, member, call, timeout_s: as of `WorkerManager.give`.
        spec: reference to the role.
        placement: of the worker.
        follower: reference to the role of its followers.
    """
    member.roles.append(placement.role)
    addresses: list[Any] = []
    for process in member.followers:
        process.roles.append(placement.role)
        where = dataclasses.replace(placement, node=process.node.address)
        addresses.append(process.handle.make_follower.remote(follower, where))
    return manager.give(
        member,
        lambda handle: handle.make.remote(spec, placement, *addresses),
        role=placement.role,
        method="__init__",
        call=call,
        timeout_s=timeout_s,
    )


def placement_of(
    member: WorkerHandle, pool: RayResourcePool, *, mesh: Mesh, role: str, first: WorkerHandle
) -> Placement:
    """Placement of a worker that replaces another one: where `first` of its pool was, nobody meets it.

    Args:
        member: the process.
        pool: all places of the role.
        mesh: axes of the role.
        role: its name.
        first: a process of the pool that lives.
    """
    assert first.process_info is not None, "it has started"
    return Placement(
        rank=member.rank,
        mesh=mesh,
        local_rank=pool.local_rank(member.rank),
        local_world_size=pool.local_world_size(member.rank),
        rendezvous=None,
        master_addr=first.node.address,
        master_port=first.process_info.free_port,
        node=member.node.address,
        role=role,
    )


def make_workers(
    manager: WorkerManager,
    members: Sequence[WorkerHandle],
    pool: RayResourcePool,
    roles: Mapping[str, RoleSpec[Any]],
    meshes: Mapping[str, Mesh],
    timeout_s: float,
) -> None:
    """The workers of these roles in the processes of a pool; role by role, all ranks at once.

    Raises:
        WorkerFailed: a constructor raised an error, or its process died.
        CallTimeout: constructors did not end in time.
    """
    first = members[0].process_info
    assert first is not None, "workers are made after the start of their processes"
    rendezvous = _rendezvous_of(manager, members, timeout_s)
    pending_calls = []
    for name, spec in roles.items():
        reference = ray.put(dataclasses.replace(spec, mesh=meshes[name]))
        follower = ray.put(spec.follower)
        call = manager.next_call()
        for member in members:
            placement = Placement(
                rank=member.rank,
                mesh=meshes[name],
                local_rank=pool.local_rank(member.rank),
                local_world_size=pool.local_world_size(member.rank),
                rendezvous=rendezvous,
                master_addr=members[0].node.address,
                master_port=first.free_port,
                node=member.node.address,
                role=name,
            )
            pending_calls.append(
                make_worker(
                    manager,
                    member,
                    reference,
                    placement,
                    follower=follower,
                    call=call,
                    timeout_s=timeout_s,
                )
            )
    for pending in pending_calls:
        manager.wait(pending)


def _rendezvous_of(
    manager: WorkerManager, members: Sequence[WorkerHandle], timeout_s: float
) -> Rendezvous | None:
    """Rendezvous of a pool's processes, started by rank 0 at the first request; None for one process."""
    first = members[0]
    if len(members) > 1 and first.rendezvous is None:
        (first.rendezvous,) = manager.ask(
            [first],
            lambda handle: handle.start_rendezvous.remote(),
            method="start of the rendezvous",
            timeout_s=timeout_s,
        )
    return first.rendezvous


def start_rank(
    manager: WorkerManager, pool: RayResourcePool, rank: int, options: StartOptions
) -> WorkerHandle:
    """Start the process of a rank and its followers; nobody waits for them. The manager has them at once, and ends them
    whatever happens next."""
    leader: WorkerHandle | None = None
    for number, node in enumerate(pool.nodes_of(rank)):
        process = _start_one(pool, rank, number, node, options)
        process.leader = leader
        if leader is None:
            leader = process
        else:
            leader.followers.append(process)
        manager.members.append(process)
    assert leader is not None, "a rank has a node"
    return leader


def _start_one(
    pool: RayResourcePool, rank: int, number: int, node: Node, options: StartOptions
) -> WorkerHandle:
    """The process of a rank on one of the nodes that it spans, by the number of the node."""
    log_path = options.log_dir / f"{options.name}-{rank}{f'-node{number}' if number else ''}.log"
    share = 1 / pool.max_colocate_count
    resources = {name: amount * share for name, amount in pool.place.items()}
    actor: Any = ray.remote(WorkerProcess).options(
        num_cpus=resources.pop("CPU"),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            pool.placement_group, placement_group_bundle_index=pool.bundle_of(rank, number)
        ),
        runtime_env={
            "env_vars": _environment(pool, rank, options),
            "py_executable": f"{pool.launch_commands[node.node_id]} {shlex.quote(str(log_path))}",
        },
        max_restarts=0,
        max_task_retries=0,
        **(options.detached.of_process(rank) if options.detached else {}),
    )
    return WorkerHandle(
        handle=actor.remote(str(log_path), str(Path.cwd())),
        pool=pool.name,
        rank=rank,
        node=node,
        log_path=log_path,
    )


def _environment(pool: RayResourcePool, rank: int, options: StartOptions) -> dict[str, str]:
    """Environment variables of a process; the address of rank 0 follows when that has started."""
    local = pool.local_world_size(rank)
    # A process sees its own devices alone, also where a setting of other libraries keeps Ray from it.
    devices = {f"RAY_EXPERIMENTAL_NOSET_{name}": "0" for name in visibility_variables()}
    if pool.device == "cpu":
        devices = dict.fromkeys(visibility_variables(), "")
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(options.num_threads)),
        **devices,
        **allocator_variables({**os.environ, **options.env}),
        "WORLD_SIZE": str(pool.world_size),
        "RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(local),
        "LOCAL_RANK": str(pool.local_rank(rank)),
        "WG_PREFIX": options.name,
        "WG_BACKEND": "ray",
        **options.env,
        "PYTHONPATH": os.pathsep.join([*_folders(options.env.get("PYTHONPATH", "")), *_own_import_folders()]),
    }


def _folders(variable: str) -> list[str]:
    return [folder for folder in variable.split(os.pathsep) if folder]


def _own_import_folders() -> list[str]:
    """Import folders of this process besides those of its Python; worker classes may live there."""
    folders = [Path(entry).resolve() for entry in sys.path if not entry or Path(entry).is_dir()]
    paths = sysconfig.get_paths()
    installed = [Path(paths[name]).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    user_folders = [
        str(folder) for folder in folders if not any(folder.is_relative_to(root) for root in installed)
    ]
    return list(dict.fromkeys(user_folders))


def threads_per_process(nodes: Sequence[Node], processes: Sequence[int]) -> int:
    """Cores over processes of the node where that is least, at least 1.

    Args:
        nodes: the nodes in use.
        processes: how many processes share each.
    """
    cores = [usable_cores() if node.is_here else int(node.total.get("CPU", 1)) for node in nodes]
    return max(min(num_cores // count for num_cores, count in zip(cores, processes, strict=True)), 1)


def launch_command() -> str:
    """Command that starts a worker process on this machine: its Python, below the launcher."""
    return f"{shlex.quote(sys.executable)} -I -S {shlex.quote(launcher.__file__)}"


def _launch_commands(nodes: Sequence[Node], timeout_s: float) -> dict[str, str]:
    """The command by node; another machine is asked, as Python may be installed elsewhere there."""
    commands: dict[str, str] = {}
    for node in nodes:
        if node.node_id in commands:
            continue
        if node.is_here:
            commands[node.node_id] = launch_command()
            continue
        try:
            commands[node.node_id] = ray.get(run_on(node.node_id, launch_command), timeout=timeout_s)
        except GetTimeoutError:
            raise TimeoutError(
                f"node {node.address} has not started a process within {timeout_s:g} s; look at Ray's logs there"
            ) from None
    return commands
