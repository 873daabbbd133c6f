"""Variables of the environment: those that `resources.env` gives to the processes of a run, and those of launchers.

The former are set in this process, whose own processes (engines, reward functions, agents) inherit them; workers on a
Ray cluster are started with them, and hand them on alike.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from strop.trainer.sections import ResourcesConfig

_LAUNCHERS = {"TORCHELASTIC_RUN_ID": "torchrun or accelerate", "CROSS_SIZE": "deepspeed"}
"""A variable of the environment that each sets."""


def variables_of(resources: ResourcesConfig) -> dict[str, str]:
    """The variables as text; those that are null have the value that they have here.

    Raises:
        ValueError: there is no value here.
    """
    variables = {}
    for name, value in resources.env.items():
        if value is None and name not in os.environ:
            raise ValueError(
                f"resources.env.{name} is null, which passes on the variable {name}, but it is not set here: export it "
                f"before the command, or give it a value"
            )
        variables[name] = os.environ[name] if value is None else str(value)
    return variables


@contextlib.contextmanager
def environment_of(resources: ResourcesConfig) -> Iterator[None]:
    """The variables in this process, while this lasts."""
    variables = variables_of(resources)
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
