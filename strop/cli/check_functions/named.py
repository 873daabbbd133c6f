"""The functions that `strop check loss` and `strop check estimator` name: found, given their settings, checked."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.algorithms.advantages import ADV_ESTIMATOR_REGISTRY
from strop.algorithms.losses import POLICY_LOSS_REGISTRY
from strop.algorithms.specs import check_adv_settings
from strop.cli.check_functions.estimators import SHARED_DEFAULTS, check_adv_estimator
from strop.cli.check_functions.findings import RuleBreach
from strop.cli.check_functions.policy_losses import check_policy_loss
from strop.config.overrides import parse_override
from strop.utils.registry import Registry
from strop.utils.terminal import UsageError
from strop.utils.user_files import load_user_file


@dataclass(frozen=True, kw_only=True)
class CheckedFunction:
    """Function under check."""

    shown: str
    """As it was written."""
    target: str | Callable[..., Any]
    """A registered name, or a function."""
    file: Path | None
    """File that defines it; None for one that comes with strop."""


def check_loss(name: str, words: Sequence[str]) -> list[RuleBreach]:
    """`strop check loss NAME key=value ...`."""
    checked = find_subject(name, POLICY_LOSS_REGISTRY)
    settings = settings_in(words)
    return _findings(checked, lambda: check_policy_loss(checked.target, settings=settings))


def check_estimator(name: str, words: Sequence[str]) -> list[RuleBreach]:
    """`strop check estimator NAME key=value ...`."""
    checked = find_subject(name, ADV_ESTIMATOR_REGISTRY)
    settings = settings_in(words)
    target = checked.target
    if isinstance(target, str):
        own_settings = {key: value for key, value in settings.items() if key not in SHARED_DEFAULTS}
        check_adv_settings(target, own_settings)
    else:
        _check_parameters(target, checked.shown, settings)
    return _findings(checked, lambda: check_adv_estimator(checked.target, settings=settings))


def _check_parameters(function: Callable[..., Any], shown: str, settings: Mapping[str, object]) -> None:
    """Refuse settings that a function would never see."""
    parameters = inspect.signature(function).parameters
    if parameters.keys() & {"config", "kwargs"}:
        return
    lost = sorted(settings.keys() - parameters.keys())
    if lost:
        raise ValueError(f"{shown} has no setting {lost[0]!r}; its parameters are {', '.join(parameters)}")


def _findings(checked: CheckedFunction, check: Callable[[], list[RuleBreach]]) -> list[RuleBreach]:
    """Findings of a check; an error that the user's own file raised is one of the findings."""
    try:
        return check()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if checked.file and Path(frame.filename) == checked.file]
        if not user_frames:
            raise
        location = f"{user_frames[-1].filename}, line {user_frames[-1].lineno}"
        return [RuleBreach("it runs", f"{checked.shown} raised {type(error).__name__}: {error} ({location})")]


def settings_in(words: Sequence[str]) -> dict[str, object]:
    """Settings that are written as key=value.

    Raises:
        UsageError: a word is none.
    """
    settings = {}
    for word in words:
        override = parse_override(word)
        if override.kind != "set" or "." in override.key:
            raise UsageError(f"{word!r} is no setting of a function; write its name alone, as in delta=0.3")
        settings[override.key] = override.value
    return settings


def find_subject(name: str, registry: Registry[Callable[..., Any]]) -> CheckedFunction:
    """The function that FILE.py:NAME or a name that comes with strop stands for.

    Raises:
        ValueError: there is no such name, the file cannot be imported, or has no such function.
    """
    file, colon, inside = name.rpartition(":")
    if not colon:
        if name.endswith(".py"):
            raise UsageError(f"{name!r} names no function; write {name}:NAME")
        return CheckedFunction(shown=name, target=name, file=None)
    module = load_user_file(file, setting="algorithm.extensions")
    path = Path(file).expanduser().resolve()
    registered = [key for key, function in registry.items() if function.__module__ == module.__name__]
    if inside in registered:
        return CheckedFunction(shown=name, target=inside, file=path)
    functions = {
        key: value
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    }
    if inside not in functions:
        names = sorted({*registered, *functions})
        raise ValueError(f"{file} has no function {inside!r}; it has {', '.join(names) or 'none'}")
    return CheckedFunction(shown=name, target=functions[inside], file=path)
