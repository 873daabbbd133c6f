"""What a reward worker was told of its sandbox, until its first program asks for one (factory.py).

Every reward worker imports this as it starts, and most of them never run a program: nothing is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

told: list[Mapping[str, Any]] = []
"""Settings as plain data (`dataclasses.asdict`), which nobody has asked for yet; at most one."""


def configure_shared(data: Mapping[str, Any]) -> None:
    """Tell a worker process of the reward its configuration, as plain data."""
    told[:] = [data]
