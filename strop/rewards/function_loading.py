"""Loads reward functions in the worker process: from a file, a manager of verl, or the built-in scorers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from strop.rewards.functions import SINGLE, LoadError, RewardFunction, check_supplied, load_module, shown
from strop.rewards.listed_functions import of_batches, of_trl
from strop.rewards.query_functions import of_queries


def load_functions(setups: Sequence[Mapping[str, Any]]) -> list[RewardFunction]:
    """The functions of a pool, in order; a file that several of them are in is imported once.

    Raises:
        LoadError: as in `load_function`.
    """
    modules: dict[str, ModuleType] = {}
    return [load_function(setup, modules) for setup in setups]


def load_function(setup: Mapping[str, Any], modules: dict[str, ModuleType]) -> RewardFunction:
    """The reward function of a file, or a manager or built-in scorer in its place.

    Args:
        setup: path, source, name, kwargs, manager, tokenizer, key and weight.
        modules: files that are imported already, by path; gains this one.

    Raises:
        LoadError: the file cannot be imported, has no such function, or the function cannot be called.
    """
    path, name, kwargs = setup["path"], setup["name"], setup["kwargs"]
    if setup["manager"]:
        from strop.rewards.verl_managers import load_manager  # torch: seconds

        return load_manager(setup)
    if not path:
        from strop.rewards.scorers.loading import load_built_in

        return load_built_in(setup)
    if path not in modules:
        modules[path] = load_module(path, setup["source"], len(modules))
    module = modules[path]
    defined = [
        key for key, value in vars(module).items() if callable(value) and _is_of(module.__name__, value)
    ]
    function = getattr(module, name, None)
    if function is None:
        names = (
            f"it defines {', '.join(sorted(defined))}; set reward.name"
            if defined
            else "it defines no function"
        )
        raise LoadError(f"reward file {path} has no function {name!r}: {names}")
    if not callable(function):
        raise LoadError(
            f"{name!r} in reward file {path} is {shown(function)}, not a function; set reward.name"
        )
    form = _form_of(inspect.signature(function).parameters)
    label = f"{name} in {Path(path).name}"
    loaded = replace(
        _with_parameters(function, label, kwargs),
        path=path,
        key=setup["key"],
        weight=setup["weight"],
    )
    if form is not None:
        return form(loaded, setup)
    check_supplied(loaded, SINGLE)
    return loaded


def _form_of(
    parameters: Collection[str],
) -> Callable[[RewardFunction, Mapping[str, Any]], RewardFunction] | None:
    """The form of a function that takes lists, by its parameters; None for one of single answers."""
    forms = {"completions": of_trl, "solution_strs": of_batches, "queries": of_queries}
    if "solution_str" not in parameters:
        forms |= {"completion_ids": of_trl, "prompts": of_trl}
    return next((form for name, form in forms.items() if name in parameters), None)


def _is_of(module_name: str, value: object) -> bool:
    return inspect.isfunction(value) and value.__module__ == module_name


def _with_parameters(function: Callable[..., Any], label: str, kwargs: Mapping[str, Any]) -> RewardFunction:
    parameters = inspect.signature(function).parameters.values()
    by_name = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    required = {
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    if unknown := set() if takes_any else kwargs.keys() - by_name.keys():
        raise LoadError(
            f"reward.kwargs has {', '.join(sorted(unknown))}, but {label} accepts only "
            f"{', '.join(sorted(by_name))}"
        )
    return RewardFunction(
        function=function, label=label, kwargs=kwargs, parameters=frozenset(by_name),
        takes_any=takes_any, required=frozenset(required),
    )  # fmt: skip
