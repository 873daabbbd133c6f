"""The Ray runtime: pools of worker processes on a cluster, and the worker groups in them."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from strop.controller.errors import CallTimeout, WorkerFailed
from strop.controller.group import WorkerGroup
from strop.controller.mesh import Mesh
from strop.controller.ray.cluster import Cluster, this_address
from strop.controller.ray.detached import DetachedName, store_group_info
from strop.controller.ray.elastic import ElasticGroup, check_replaceable
from strop.controller.ray.group import role_groups
from strop.controller.ray.manager import WorkerManager
from strop.controller.ray.members import WorkerHandle
from strop.controller.ray.node_choice import choose_nodes, has_free_nodes, nodes_of_pools, nodes_per_rank
from strop.controller.ray.pending import Traffic
from strop.controller.ray.pool import RayResourcePool
from strop.controller.ray.start import StartOptions, make_workers, start_processes, threads_per_process
from strop.controller.roles import RankDevices, RoleSpec, meshes_on
from strop.controller.runtime import Runtime
from strop.utils.device import OF_EACH_PROCESS

CLOSE_S = 60.0
"""Timeout of the workers' close."""
MAIN = "main"
"""The pool of all roles that are not placed apart."""


class RuntimeOptions(TypedDict, total=False):
    """Options of a runtime: its cluster and the start of its processes; as of PoolsRuntime."""

    address: str | None
    call_timeout_s: float
    start_timeout_s: float
    log_dir: Path | None
    env: Mapping[str, str] | None


class PoolsRuntime(Runtime):
    """Makes worker groups in processes on these pools of a Ray cluster.

    Roles that are made on one pool share its processes. The first failure of a process ends all of them.
    """

    def __init__(
        self,
        pools: Mapping[str, RayResourcePool],
        *,
        address: str | None = None,
        call_timeout_s: float = 1800.0,
        start_timeout_s: float = 300.0,
        log_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        detached: DetachedName | None = None,
    ) -> None:
        """Connect to the cluster and check that it has what is asked for; processes start with their roles.

        Args:
            pools: places for the processes, all over the same nodes, but for those whose ranks span nodes of their own;
                by the name that logs have.
            address: of an existing cluster; None: what this process is connected to, or a private one on this machine.
            call_timeout_s: deadline of a call, unless a group sets its own `call_timeout_s`.
            start_timeout_s: deadline of each phase of the start: places, processes, constructors.
            log_dir: folder for the output of the processes, `<pool>-<rank>.log`, made on each node; None: a
                temporary one, kept only after a failure, and by detached processes that go on.
            env: environment variables of these processes alone.
            detached: by which the processes of the one pool are found again, after `leave` or the end of this
                process; None: they end with it.

        Raises:
            NotEnoughDevices: the cluster does not have so many nodes, cores or devices.
            ValueError: `env` names what is set in each process.
        """
        super().__init__()
        self.traffic = Traffic()
        """Traffic through the controller for all groups of this runtime."""
        self._log_dir = log_dir
        self._temporary = log_dir is None
        if reserved := sorted({*(env or {})} & {*OF_EACH_PROCESS}):
            raise ValueError(
                f"env names {', '.join(reserved)}, which the group sets in each of its processes, to another value in "
                f"each: leave it out"
            )
        self._env = dict(env or {})
        self._detached = detached
        self.call_timeout_s = call_timeout_s
        self._start_timeout_s = start_timeout_s
        self._members: dict[str, list[WorkerHandle]] = {}
        self._pools = pools
        self._taken: list[RayResourcePool] = []
        self._manager = WorkerManager(on_stop=self._give_back)
        self._cluster = Cluster(address)
        try:
            to_place = {name: places for name, places in pools.items() if not places.is_taken}
            self._nodes = choose_nodes(self._cluster, list(to_place.values())) if to_place else []
            self._nodes_of = nodes_of_pools(to_place, self._nodes)
        except BaseException:
            self._cluster.close()
            raise

    def groups(
        self, roles: Mapping[str, RoleSpec[Any]], *, pool: str = MAIN, is_elastic: bool = False
    ) -> dict[str, WorkerGroup[Any]]:
        """The worker groups of these roles, all in the same processes of one pool.

        The first call for a pool starts its processes. In each process the workers are made in the order of
        `roles`; a worker finds those made before it, and later the others, in `Worker.colocated`.

        Args:
            roles: by name.
            pool: their processes.
            is_elastic: the group of the only role of this pool goes on without processes that are lost, and replaces
                them: an ElasticGroup.

        Raises:
            ValueError: there is no such pool, a role's mesh does not fit it, its ranks span nodes and a role has no
                followers, or an elastic group would share rows; no process has started.
            WorkerFailed: a process died, or a constructor raised an error.
            CallTimeout: processes or constructors took too long; names them.
        """
        if pool not in self._pools:
            raise ValueError(
                f"there is no pool {pool!r}; pools: {', '.join(self._pools)}. Name it in `apart` to add it"
            )
        self._manager.check_works()
        places = self._pools[pool]
        meshes = meshes_on(places.name, places.world_size, roles)
        _check_followers(places, roles)
        if is_elastic:
            for role, mesh in meshes.items():
                check_replaceable(role, mesh)
        try:
            members = self._started(pool, places)
            make_workers(self._manager, members, places, roles, meshes, self._start_timeout_s)
            if self._detached:
                store_group_info(
                    self._manager, members, meshes, places.placement_group, self._start_timeout_s
                )
        except (WorkerFailed, CallTimeout):
            raise
        except BaseException as error:
            self._manager.stop(
                f"the start of pool {pool!r} did not succeed ({type(error).__name__}: {error})"
            )
            raise
        if is_elastic:
            return self._elastic_group(pool, roles, meshes, members)
        groups = role_groups(
            {name: spec.worker_class for name, spec in roles.items()},
            meshes,
            manager=self._manager,
            members=members,
            call_timeout_s=self.call_timeout_s,
            traffic=self.traffic,
        )
        return dict(groups)

    def _elastic_group(
        self,
        pool: str,
        roles: Mapping[str, RoleSpec[Any]],
        meshes: Mapping[str, Mesh],
        members: Sequence[WorkerHandle],
    ) -> dict[str, WorkerGroup[Any]]:
        places = self._pools[pool]
        ((name, spec),) = roles.items()
        group = ElasticGroup(
            spec,
            meshes[name],
            role=name,
            manager=self._manager,
            members=members,
            call_timeout_s=self.call_timeout_s,
            traffic=self.traffic,
            pool=places,
            options=self._start_options(pool, places),
        )
        return {name: group}

    @property
    def address(self) -> str:
        """Address of this process within the cluster."""
        return this_address()

    @property
    def node_ids(self) -> tuple[str, ...]:
        """Ray's names of the nodes that the processes are on."""
        return tuple(node.node_id for node in self._nodes)

    def leave(self) -> None:
        """Let detached processes go on without this controller; more than once does no harm."""
        self._manager.leave()
        self._temporary = False  # the processes go on writing their logs
        self._cluster.close()

    def close(self) -> None:
        """Close all workers, last made first, and end their processes; more than once does no harm."""
        with self._ending:
            self._manager.close(CLOSE_S)
        if self._temporary and self._log_dir is not None and not self._manager.has_failed:
            shutil.rmtree(self._log_dir, ignore_errors=True)

    def _started(self, pool: str, places: RayResourcePool) -> list[WorkerHandle]:
        if pool not in self._members:
            if self._log_dir is None:
                self._log_dir = Path(tempfile.mkdtemp(prefix="strop-workers-"))
            places.take(
                self._cluster,
                self._nodes_of.get(pool, ()),
                timeout_s=self._start_timeout_s,
                is_detached=self._detached is not None,
            )
            self._taken.append(places)
            self._members[pool] = start_processes(self._manager, places, self._start_options(pool, places))
        return self._members[pool]

    def _start_options(self, pool: str, places: RayResourcePool) -> StartOptions:
        assert self._log_dir is not None, "processes start after it was made"
        return StartOptions(
            name=pool,
            timeout_s=self._start_timeout_s,
            log_dir=self._log_dir,
            env=self._env,
            num_threads=threads_per_process(places.machines, self._processes_beside(places)),
            detached=self._detached,
        )

    def _processes_beside(self, places: RayResourcePool) -> Sequence[int]:
        """Processes of all pools on each node of this one."""
        if places.nodes_per_rank > 1:
            return places.process_on_nodes
        counts = [other.process_on_nodes for other in self._pools.values() if other.nodes_per_rank == 1]
        return [sum(on_node) for on_node in zip(*counts, strict=True)]

    def _give_back(self) -> None:
        for places in self._taken:
            places.close()
        self._cluster.close()


class RayRuntime(PoolsRuntime):
    """Makes worker groups in processes of a Ray cluster.

    Roles that are made on one pool share its processes. The first failure of a process ends all of them.
    """

    def __init__(
        self,
        *,
        ranks: int,
        nodes: int = 1,
        device: str = "cpu",
        cpus_per_rank: float = 1.0,
        apart: Mapping[str, int] | None = None,
        devices: Mapping[str, RankDevices] | None = None,
        **options: Unpack[RuntimeOptions],
    ) -> None:
        """Connect to the cluster and check that it has what is asked for; processes start with their roles.

        Args:
            ranks: processes of the pool "main", over all nodes; with an accelerator, one device each.
            nodes: machines to spread every pool over, as evenly as possible.
            device: kind of device of each process.
            cpus_per_rank: processor cores that each process holds; a fraction lets processes share a core.
            apart: further pools by name, with their number of processes.
            devices: devices of each process of a pool, by its name; 1 of others.
            options: address, call_timeout_s, start_timeout_s, log_dir and env, as of PoolsRuntime.

        Raises:
            NotEnoughDevices: the cluster does not have so many nodes, cores or devices.
            ValueError: a number of processes or nodes is below 1, or a pool has fewer processes than nodes.
        """
        # Nodes are counted on the connection that the runtime then holds too.
        with _counted(devices or {}, options.get("address")) as cluster:
            pools = _pools(
                cluster,
                ranks=ranks,
                nodes=nodes,
                device=device,
                cpus_per_rank=cpus_per_rank,
                apart=apart or {},
                devices=devices or {},
            )
            super().__init__(pools, **options)


def free_places(
    *,
    ranks: int,
    nodes: int,
    device: str,
    cpus_per_rank: float,
    apart: Mapping[str, int],
    devices: Mapping[str, RankDevices],
    address: str | None,
    beside: Collection[str],
) -> bool:
    """True where the cluster has free places for the processes of a runtime with these arguments (`RayRuntime`) on
    nodes other than those named."""
    with contextlib.closing(Cluster(address)) as cluster:
        pools = _pools(
            cluster,
            ranks=ranks,
            nodes=nodes,
            device=device,
            cpus_per_rank=cpus_per_rank,
            apart=apart,
            devices=devices,
        )
        return has_free_nodes(cluster, list(pools.values()), beside=beside)


def _check_followers(places: RayResourcePool, roles: Mapping[str, RoleSpec[Any]]) -> None:
    for name, spec in roles.items():
        if places.nodes_per_rank > 1 and spec.follower is None:
            raise ValueError(
                f"a rank of pool {places.name!r} spans {places.nodes_per_rank} nodes, and role {name!r} has no "
                f"followers"
            )


def _counted(
    devices: Mapping[str, RankDevices], address: str | None
) -> contextlib.AbstractContextManager[Cluster | None]:
    """The cluster, where the nodes of a rank follow from the devices that its nodes have; else None."""
    if any(of_rank.over_nodes and of_rank.count > 1 for of_rank in devices.values()):
        return contextlib.closing(Cluster(address))
    return contextlib.nullcontext()


def _pools(
    cluster: Cluster | None,
    *,
    ranks: int,
    nodes: int,
    device: str,
    cpus_per_rank: float,
    apart: Mapping[str, int],
    devices: Mapping[str, RankDevices],
) -> dict[str, RayResourcePool]:
    pools: dict[str, RayResourcePool] = {}
    for name, size in {MAIN: ranks, **apart}.items():
        of_rank, spanned = devices.get(name, RankDevices()), 1
        if cluster is not None and of_rank.over_nodes:
            spanned = nodes_per_rank(
                cluster, name, of_rank.count, device=device, cpus_per_process=cpus_per_rank
            )
        pools[name] = RayResourcePool(
            [1] * size * spanned if spanned > 1 else _processes_per_node(name, size, nodes),
            name_prefix=name,
            max_colocate_count=1,
            device=device,
            cpus_per_process=cpus_per_rank,
            devices_per_process=of_rank.count // spanned,
            nodes_per_rank=spanned,
        )
    return pools


def _processes_per_node(pool: str, size: int, nodes: int) -> list[int]:
    """Processes on each node, the first nodes having one more where they do not divide."""
    if nodes < 1:
        raise ValueError(f"resources.nodes is {nodes}; the smallest number is 1")
    if size < nodes:
        raise ValueError(
            f"pool {pool!r} has {size} processes for {nodes} nodes; every node needs at least one: lower "
            f"resources.nodes to {max(size, 1)} or raise the number of processes"
        )
    return [size // nodes + (number < size % nodes) for number in range(nodes)]
