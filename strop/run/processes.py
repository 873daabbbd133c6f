"""Number of processes of a run, from its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def num_processes(config: Mapping[str, Any]) -> int:
    """Number of processes of a run with these settings; 0 where they do not say."""
    resources = config.get("resources")
    if not isinstance(resources, Mapping):
        return 0
    apart = resources.get("apart")
    counts = [resources.get("ranks", 1), *(apart.values() if isinstance(apart, Mapping) else ())]
    return sum(count for count in counts if type(count) is int)
