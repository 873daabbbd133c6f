"""Environments by name, by file, and with the arguments of a row."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.agents.envs.gymnasium_env import GymnasiumEnvironment
from strop.agents.envs.openenv_env import OpenEnvEnvironment
from strop.agents.envs.reasoning_gym_env import ReasoningGymEnvironment
from strop.agents.envs.verifiers_env import VerifiersEnvironment
from strop.agents.tools.class_loading import load_class
from strop.utils.registry import Registry
from strop.utils.trust import ask
from strop.utils.user_files import is_loaded, load_user_file

Maker = Callable[..., Any]
"""A class, or a function that makes an environment from keyword arguments."""

environments: Registry[Maker] = Registry(
    "environment",
    {
        "gymnasium": GymnasiumEnvironment,
        "openenv": OpenEnvEnvironment,
        "reasoning_gym": ReasoningGymEnvironment,
        "verifiers": VerifiersEnvironment,
    },
    group="strop.environments",
)
register_environment = environments.register
"""Decorator: `@register_environment("name")` over an environment class."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentChoice:
    """Environment of an episode, with its arguments."""

    name: str
    """Of the registry, `FILE.py:CLASS`, or the dotted path of a class."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_of_row: bool = False
    """A row named it and not the settings: rows are data, and may not bring code."""

    def make(self) -> Any:
        """An environment for one episode.

        Raises:
            ValueError: there is none of this name, or it does not take these arguments.
        """
        maker = find_environment(self.name, is_of_row=self.is_of_row)
        try:
            inspect.signature(maker).bind(**self.kwargs)
        except TypeError as error:
            raise ValueError(
                f"environment {self.name!r} does not take the arguments {dict(self.kwargs)!r:.200}: {error}"
            ) from None
        environment = maker(**self.kwargs)
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise ValueError(
                    f"environment {self.name!r} has no method {method}; an environment has reset(seed, row) and "
                    f"step(action)"
                )
        return environment


def choose_environment(
    row: Mapping[str, Any], *, name: str, kwargs: Mapping[str, Any], label: str = "the row"
) -> EnvironmentChoice:
    """The environment of a row: that of its extra_info (env_name, env_kwargs), else that of the run.

    Arguments of the row are added to those of the run, unless the row names another environment.

    Args:
        row: with extra_info.
        name, kwargs: of the run.
        label: names the row in messages.

    Raises:
        ValueError: neither names one, or the arguments are no dictionary.
    """
    extra = row.get("extra_info")
    extra = extra if isinstance(extra, Mapping) else {}
    row_name, row_kwargs = extra.get("env_name"), extra.get("env_kwargs")
    if row_kwargs is not None and not isinstance(row_kwargs, Mapping):
        raise ValueError(f"{label}: extra_info.env_kwargs is {row_kwargs!r:.60}, not a dictionary")
    row_arguments = {key: value for key, value in (row_kwargs or {}).items() if value is not None}
    _check_arguments(str(row_name or name), row_arguments, kwargs, label)
    if row_name and row_name != name:
        return EnvironmentChoice(name=str(row_name), kwargs=row_arguments, is_of_row=True)
    if not name:
        raise ValueError(
            f"{label} is played by env_agent, but names no environment: set agent.environment.name, or give it "
            f"extra_info.env_name; known: {', '.join(environments.names())}"
        )
    return EnvironmentChoice(name=name, kwargs={**kwargs, **row_arguments})


_CODE = {"verifiers": "taskset"}
"""Arguments that name code, whatever they look like: the id of one that is installed is the name of its module."""


def _check_arguments(
    name: str, row_kwargs: Mapping[str, Any], run_kwargs: Mapping[str, Any], label: str
) -> None:
    """Refuse arguments of a row that would import code, unless the settings have the same.

    Raises:
        ValueError: the sentence names the argument.
    """
    for key, value in row_kwargs.items():
        names_file = isinstance(value, str) and value.partition(":")[0].endswith(".py")
        names_module = key in ("imports", _CODE.get(name)) or (
            key == "id" and isinstance(value, str) and ":" in value
        )
        if (names_file or names_module) and run_kwargs.get(key) != value:
            raise ValueError(
                f"{label}: extra_info.env_kwargs has {key}={value!r:.80}, which names code, and rows are data: write "
                f"it into agent.environment.kwargs, or register an environment of its own in agent.files"
            )


def find_environment(name: str, *, is_of_row: bool = False) -> Maker:
    """The class or function of an environment's name.

    Args:
        name: of the registry, FILE.py:CLASS, or the dotted path of a class.
        is_of_row: a row names it: only registered ones, and those in files that the settings name, are allowed.

    Raises:
        ValueError: there is none, or a row may not name it.
    """
    ask("agent.environment.name", name)
    if name in environments:
        return environments[name]
    file, colon, class_name = name.rpartition(":")
    if is_of_row and not (colon and is_loaded(file)):
        raise ValueError(
            f"a row names the environment {name!r}, which is not registered: known are "
            f"{', '.join(environments.names())}. Rows are data and bring no code: name its file with agent.files first"
        )
    if colon and file.endswith(".py"):
        module = load_user_file(file, setting="agent.environment.name")
        maker = environments.get(class_name) or getattr(module, class_name, None)
        if not callable(maker):
            raise ValueError(f"environment {name!r}: {file} has no class {class_name!r}")
        return maker
    if "." in name and not name.endswith(".py"):
        return load_class(name, setting="agent.environment.name")
    hint = f"; name the class too: {name}:ClassName" if name.endswith(".py") else ""
    raise ValueError(
        f"unknown environment {name!r}{hint}; known: {', '.join(environments.names())}, FILE.py:CLASS, or the dotted "
        f"path of a class"
    )
