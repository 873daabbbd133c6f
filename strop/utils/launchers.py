"""Programs of others that start a process for each device; strop starts its own."""

from __future__ import annotations

import os

_LAUNCHERS = {"TORCHELASTIC_RUN_ID": "torchrun or accelerate", "CROSS_SIZE": "deepspeed"}
"""A variable of the environment that each sets."""


def refuse_launcher() -> None:
    """Refuse to be one of several processes of a launcher: each would begin a run, on the same devices.

    Raises:
        ValueError: the sentence says how to start one run on as many devices.
    """
    size = os.environ.get("WORLD_SIZE", "")
    launcher = next((name for variable, name in _LAUNCHERS.items() if variable in os.environ), None)
    if launcher is not None and size.isdecimal() and int(size) > 1:
        raise ValueError(
            f"this is one of {size} processes that {launcher} has started, and each would be a run of its own: start "
            f"strop once, without {launcher}; with resources.runtime=ray resources.ranks={size} it makes its processes"
        )
