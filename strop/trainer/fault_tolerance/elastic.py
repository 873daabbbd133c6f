"""Elastic runs: fewer machines than asked for while some are lost, and more again once there are.

The number of processes per machine stays; the number of data-parallel ranks follows the machines. Losses and order of
the data do not depend on it, and a checkpoint is read by any number of ranks, so each change is a continuation.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from strop.controller import Runtime
from strop.trainer.callbacks import Reporter
from strop.trainer.fault_tolerance.node_counts import possible_nodes, with_nodes
from strop.trainer.worker_groups import rollout_devices, start_runtime

if TYPE_CHECKING:
    from strop.trainer.config import Config


SETTLE_S = 30.0
"""Time in which processes that ended give their places back, and a cluster hears of a machine that is gone."""


class MoreMachines(Exception):
    """The cluster has machines for more processes than the run uses; raised behind a checkpoint."""


def start_elastic_runtime(config: Config, *, log_dir: Path | None, say: Reporter) -> tuple[Config, Runtime]:
    """The runtime on as many machines as there are, up to those asked for; the configuration with their number.

    Args:
        config: as of the run.
        log_dir: as of `start_runtime`.
        say: takes a line where it is fewer.

    Raises:
        ValueError: as `start_runtime`.
    """
    numbers = possible_nodes(config)
    if numbers == [config.resources.nodes]:
        return config, start_runtime(config, log_dir=log_dir)
    nodes = _free_nodes(config, numbers)
    smaller = with_nodes(config, nodes)
    if nodes < config.resources.nodes:
        say(
            f"{nodes} of {config.resources.nodes} machines: {smaller.resources.ranks} ranks; the run takes more at a "
            f"checkpoint once there are"
        )
    return smaller, start_runtime(smaller, log_dir=log_dir)


def _free_nodes(config: Config, numbers: Sequence[int]) -> int:
    """The most of these numbers of machines that are free, after some time for all of them; else the smallest."""
    from strop.trainer.ray_runtime import has_free_places  # ray: seconds

    end = time.monotonic() + SETTLE_S
    while True:
        for nodes in numbers:
            if has_free_places(with_nodes(config, nodes).resources, devices=rollout_devices(config)):
                break
        if nodes == numbers[0] or time.monotonic() > end:
            return nodes
        time.sleep(1.0)


def check_for_more(config: Config, current: Config, runtime: Runtime) -> None:
    """Compare the cluster with what a run uses.

    Args:
        config: as of the run.
        current: on the machines that it uses.
        runtime: on them.

    Raises:
        MoreMachines: there are places for more.
    """
    now, resources = current.resources.nodes, config.resources
    for nodes in possible_nodes(config):
        if nodes <= now:
            return
        from strop.trainer.ray_runtime import has_free_places  # ray: seconds

        wanted = with_nodes(config, nodes).resources
        more = dataclasses.replace(
            resources,
            nodes=nodes - now,
            ranks=resources.ranks // resources.nodes * (nodes - now),
            apart={
                role: size - current.resources.apart[role]
                for role, size in wanted.apart.items()
                if size > current.resources.apart[role]
            },
        )
        if has_free_places(more, devices=rollout_devices(config), beside=runtime):
            raise MoreMachines(f"{nodes} machines are there, and the run uses {now}")
