"""Numbers of machines on which a run can go on (resources.min_nodes)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from strop.engines.parallel.axes import check_axes

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check_elastic(config: Config) -> None:
    """Refuse a smallest number of machines on which the run could not go on.

    Raises:
        ValueError: resources.min_nodes is more than resources.nodes, is set for a run in one process, or the axes of an
            engine do not divide its ranks.
    """
    least, resources = config.resources.min_nodes, config.resources
    if not least:
        return
    if resources.runtime == "inline" or least > resources.nodes:
        raise ValueError(
            f"resources.min_nodes is {least}, but the run is asked for {resources.nodes} nodes with "
            f"resources.runtime={resources.runtime}: use at most resources.nodes, on Ray"
        )
    try:
        _check_axes(with_nodes(config, least))
    except ValueError as error:
        raise ValueError(
            f"resources.min_nodes is {least}, on which the run could not go on: {error}"
        ) from error


def with_nodes(config: Config, nodes: int) -> Config:
    """The configuration on so many of its machines; roles apart shrink with them, to one process at least."""
    resources = config.resources
    apart = {role: max(1, size * nodes // resources.nodes) for role, size in resources.apart.items()}
    ranks = resources.ranks // resources.nodes * nodes
    smaller = dataclasses.replace(resources, nodes=nodes, ranks=ranks, apart=apart, min_nodes=0)
    return dataclasses.replace(config, resources=smaller)


def possible_nodes(config: Config) -> list[int]:
    """Numbers of machines that the run may have, most first: those whose ranks the axes of all engines divide."""
    most, least = config.resources.nodes, config.resources.min_nodes or config.resources.nodes
    possible = []
    for nodes in range(most, least - 1, -1):
        try:
            _check_axes(with_nodes(config, nodes))
        except ValueError:
            continue
        possible.append(nodes)
    return possible or [most]


def _check_axes(config: Config) -> None:
    for role, engine in config.used_engines.items():
        ranks = config.resources.ranks_of(role)
        check_axes(engine, ranks, section=f"{role}.engine")
