"""Sandbox configuration of a reward worker, until its first program starts the sandbox (factory.py).

Every reward worker imports this as it starts, and most of them never run a program: nothing is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

pending: list[Mapping[str, Any]] = []
"""Settings as plain data (`dataclasses.asdict`), not used yet; at most one."""


def configure_shared(data: Mapping[str, Any]) -> None:
    """Set the sandbox configuration of this worker process, as plain data."""
    pending[:] = [data]
