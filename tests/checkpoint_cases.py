"""Checkpoints that are saved in one go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from strop.run import Checkpoint, CheckpointStore


def save(
    store: CheckpointStore,
    step: int,
    write: Callable[[Path], object],
    *,
    score: float | None = None,
    facts: Mapping[str, Any],
) -> Checkpoint:
    """Begin a checkpoint, write its files and seal it."""
    pending = store.begin(step, score=score, facts=facts)
    with pending.writing():
        write(pending.folder)
    return pending.seal()
