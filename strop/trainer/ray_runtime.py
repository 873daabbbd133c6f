"""The Ray runtime as `resources` asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from strop.controller import Runtime
from strop.controller.ray.runtime import RayRuntime, free_places
from strop.controller.roles import RankDevices
from strop.trainer.environment import variables_of
from strop.trainer.sections import ResourcesConfig
from strop.utils.device import device_name


def make_runtime(
    resources: ResourcesConfig, *, log_dir: Path | None, devices: Mapping[str, RankDevices] | None = None
) -> RayRuntime:
    """Connect to the cluster, or start one, and check that it has what is asked for.

    Args:
        resources: say where, and how many processes.
        log_dir: where worker processes write what they print.
        devices: devices of each process of a role apart, by role; 1 of others.

    Raises:
        NotEnoughDevices: the cluster does not have so many nodes, cores or devices.
    """
    threads = {"OMP_NUM_THREADS": str(resources.num_threads)} if resources.num_threads else {}
    return RayRuntime(
        ranks=resources.ranks,
        nodes=resources.nodes,
        device=device_name(resources.device),
        address=resources.address or None,
        cpus_per_rank=resources.cpus_per_rank,
        apart=resources.apart,
        devices=devices,
        call_timeout_s=resources.call_timeout_s,
        start_timeout_s=resources.start_timeout_s,
        log_dir=log_dir,
        env={**threads, **variables_of(resources)},
    )


def has_free_places(
    resources: ResourcesConfig, *, devices: Mapping[str, RankDevices], beside: Runtime | None = None
) -> bool:
    """True where the cluster has free places for these processes, on machines that a runtime does not use."""
    return free_places(
        ranks=resources.ranks,
        nodes=resources.nodes,
        device=device_name(resources.device),
        cpus_per_rank=resources.cpus_per_rank,
        apart=resources.apart,
        devices=devices,
        address=resources.address or None,
        beside=beside.node_ids if isinstance(beside, RayRuntime) else (),
    )
