"""Small state of a collector in a checkpoint, a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.run import CheckpointError


def restore_state(file: Path, take: Callable[[Any], None]) -> None:
    """Hand the content of a file of a checkpoint to a function; nothing where there is no such file.

    Raises:
        CheckpointError: it is damaged.
    """
    if not file.is_file():
        return
    try:
        take(json.loads(file.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file} is damaged ({type(error).__name__}: {error}); remove the checkpoint, and the run "
            f"continues from an earlier one"
        ) from error
