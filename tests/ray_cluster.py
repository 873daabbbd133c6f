"""The private Ray cluster that the tests of a process share."""

from __future__ import annotations

from functools import cache

from strop.controller.ray import Cluster


@cache
def shared_cluster() -> Cluster:
    """Start it at the first call; it ends with the test process."""
    return Cluster()
