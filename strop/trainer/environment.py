"""Variables of the environment that `resources.env` gives to the processes of a run.

They are set in this process, whose own processes (engines, reward functions, agents) inherit them; workers on a Ray
cluster are started with them, and hand them on alike.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from strop.trainer.sections import ResourcesConfig


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
