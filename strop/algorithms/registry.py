"""Names that arrive from a config, the functions they stand for, and what each function declares."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, TypeVar

from strop.algorithms.names import AGGREGATION_MODES
from strop.utils.registry import Registry, name_of
from strop.utils.setting_text import setting_text
from strop.utils.user_files import load_user_file

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """Columns and settings that a registered function asks for; the trainer computes those, and nothing else."""

    needs: frozenset[str] = frozenset()
    """Columns passed by keyword, e.g. `group_ids` or `values`. Empty: the function declared nothing and
    follows verl's own calling convention."""
    follows_verl: bool = False
    """True if the function follows verl's calling convention and takes the columns that it needs beside it."""
    settings: frozenset[str] = frozenset()
    """Numbers and switches passed by keyword that have a key of their own in the config, e.g. `norm_by_std`."""
    options: Mapping[str, object] = field(default_factory=dict)
    """All other settings, each with its default: the keyword defaults of the function; see `own_settings`."""
    is_group_relative: bool = False
    """True if the result compares the samples of one prompt, so that one sample teaches nothing."""
    aggregation: str | None = None
    """The aggregation mode of the paper, in force where the user sets none; see `aggregation_mode`."""
    prepare: Callable[..., Any] | None = None
    """Statistics of a whole optimizer batch: called once per optimizer batch with the flat columns [N] of all
    its tokens over all ranks, by keyword; returns the columns `prepared`, [N] each, by name."""
    prepared: frozenset[str] = frozenset()
    """Columns among `needs` that come from `prepare`, not from the batch."""
    measure: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, float]] | None = None
    """Metrics of a step that an estimator is judged by, from its columns and its settings by name."""
    moves_without_advantage: bool = False
    """True if a token of advantage 0 can have a gradient, for example from a penalty of the loss itself."""

    @property
    def is_user_convention(self) -> bool:
        """True if the function follows verl's calling convention, not ours."""
        return self.follows_verl or not self.needs

    def aggregation_mode(self, asked: str | None) -> str:
        """The mode in force for a policy loss, and for the value loss beside it: what was asked for, else the mode
        of the loss's paper, else token-mean."""
        return asked or self.aggregation or "token-mean"


STEP_COLUMNS = frozenset({"sample_index", "turn_index", "turn_rewards", "anchor_ids"})
"""Columns about single answers of episodes, which are made where an estimator needs one of them."""


def load_extensions(files: Iterable[str]) -> None:
    """Import Python files that register estimators, losses, samplers, filters or shaping; each only the first time.

    Args:
        files: relative ones start at the current directory.

    Raises:
        ValueError: there is no such file, or importing it failed.
    """
    for name in files:
        load_user_file(name, setting="algorithm.extensions")


class FunctionRegistry(Registry[F]):
    """Functions by name, and what each declared.

    Args:
        kind: what the functions are, for messages.
        replaceable: a name may be given to another function later.
        verl_parameters: a function with one of these parameters follows verl's calling convention, also where
            it declares columns that it needs.
        optional_columns: what a function gets if it has a parameter of that name and the batch has the column; such
            a parameter is no setting.
        declarations: what the built-in functions declare, before any of them is imported; their group is that of
            the functions.
        group: of entry points, where there are no such declarations.
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str = "",
        replaceable: bool = False,
        verl_parameters: frozenset[str] = frozenset(),
        optional_columns: frozenset[str] = frozenset(),
        declarations: Registry[Declaration] | None = None,
    ) -> None:
        super().__init__(
            kind, group=group if declarations is None else declarations.group, replaceable=replaceable
        )
        self.verl_parameters = verl_parameters
        self.optional_columns = optional_columns
        self.declarations = Registry[Declaration](kind) if declarations is None else declarations
        """By name, those that are built in and those that were registered since."""

    def register(
        self,
        name: str | Enum,
        *,
        needs: Iterable[str] = (),
        settings: Iterable[str] = (),
        group_relative: bool = False,
        aggregation: str | None = None,
        prepare: Callable[..., Any] | None = None,
        prepared: Iterable[str] = (),
        moves_without_advantage: bool = False,
        aliases: Iterable[str] = (),
    ) -> Callable[[F], F]:
        """A decorator that stores the function under `name`, and under each alias, and returns it unchanged.

        The other arguments are the fields of `Declaration`.

        Raises:
            ValueError: the name belongs to another function and this registry does not replace; a column or
                setting that the function has no parameter for; an unknown aggregation mode.
        """
        keys = [name_of(name), *aliases]
        declaration = Declaration(
            needs=frozenset(needs),
            settings=frozenset(settings),
            is_group_relative=group_relative,
            aggregation=aggregation,
            prepare=prepare,
            prepared=frozenset(prepared),
            moves_without_advantage=moves_without_advantage,
        )

        def add(function: F) -> F:
            _check_declaration(self.kind, keys[0], function, declaration)
            parameters = inspect.signature(function).parameters
            declared = replace(
                declaration,
                follows_verl=not self.verl_parameters.isdisjoint(parameters),
                options=self._own(function, declaration),
            )
            self.check_free(function, *keys)
            for key in keys:
                self[key] = function
                self.declarations[key] = declared
            return function

        return add

    def implements(
        self,
        *names: str,
        prepare: Callable[..., Any] | None = None,
        measure: Callable[..., Mapping[str, float]] | None = None,
    ) -> Callable[[F], F]:
        """A decorator for the built-in function of names that `declarations` describes already.

        Args:
            names: a name and its aliases.
            prepare, measure: as of `Declaration`; they are part of no table, because they compute.
        """

        def add(function: F) -> F:
            for name in names:
                declared = replace(self.declarations[name], prepare=prepare, measure=measure)
                _check_declaration(self.kind, name, function, declared)
                options = self._own(function, declared)
                assert options == declared.options, (
                    f"{self.kind} {name!r} declares {declared.options}, but has {options}"
                )
                self[name] = function
                self.declarations[name] = declared
            return function

        return add

    def __setitem__(self, name: str, function: F) -> None:
        """A function that is put in without `register` declares nothing."""
        super().__setitem__(name, function)
        self.declarations.setdefault(name, Declaration())

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.declarations.pop(name, None)

    def _own(self, function: F, declaration: Declaration) -> dict[str, object]:
        options = own_settings(function, declaration)
        return {name: default for name, default in options.items() if name not in self.optional_columns}

    def declaration(self, name: str | Enum) -> Declaration:
        """The declaration of the function under `name`."""
        key = name_of(name)
        self[key]  # an unknown name fails here, with the known ones in the message
        return self.declarations.get(key, Declaration())


FILTERS = FunctionRegistry[Callable[..., object]]("filter", group="strop.filters")
REWARD_SHAPINGS = FunctionRegistry[Callable[..., object]]("reward shaping", group="strop.reward_shapings")
"""Functions of a user's own on the samples of a prompt (group_functions/)."""


def own_settings(function: Callable[..., object], declaration: Declaration) -> dict[str, object]:
    """Settings of the function's own by name, each with its default: the keyword defaults of the function and
    of its `prepare`, without columns and without settings that have a key of their own in the config."""
    options: dict[str, object] = {}
    for source in (function, declaration.prepare):
        if source is not None:
            options.update(
                (parameter.name, parameter.default)
                for parameter in inspect.signature(source).parameters.values()
                if parameter.default is not inspect.Parameter.empty
            )
    shared = declaration.needs | declaration.settings
    return {name: default for name, default in options.items() if name not in shared}


def with_own_settings(function: Callable[..., object], declaration: Declaration) -> Declaration:
    """The declaration with the settings that the function's signature has."""
    return replace(declaration, options=own_settings(function, declaration))


def settings_for(
    function: Callable[..., object], declaration: Declaration, settings: Mapping[str, object]
) -> dict[str, object]:
    """The settings that the function takes: declared ones, and its own keyword defaults."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    options = {
        parameter.name
        for parameter in parameters.values()
        if parameter.default is not inspect.Parameter.empty
    }
    accepted = (declaration.settings if takes_any else declaration.settings & parameters.keys()) | options
    return {name: value for name, value in settings.items() if name in accepted - declaration.needs}


def check_settings(
    kind: str,
    name: str,
    declaration: Declaration,
    settings: Mapping[str, object],
    *,
    key: str = "",
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Refuse settings that the function under `name` does not have, or values of another type than its own.

    A function in verl's calling convention takes any: it reads them from its config object.

    Args:
        kind: what the function is, for the message: "policy loss".
        declaration: with the function's own settings.
        settings: what the user wrote, by name.
        key: of the config, that has them.
        elsewhere: settings that have a key of their own in the config: name to key.

    Raises:
        ValueError: names the setting, the nearest valid one and all valid ones.
    """
    if declaration.is_user_convention:
        return
    options = declaration.options
    # A declared setting without a key of its own can be set nowhere else.
    accepted = options.keys() | declaration.settings
    valid = sorted(accepted - (elsewhere or {}).keys())
    for setting, value in settings.items():
        if elsewhere is not None and setting in elsewhere and setting in accepted:
            raise ValueError(
                f"the setting {setting!r} of {kind} {name!r} has a key of its own: set {elsewhere[setting]}"
            )
        if setting not in valid:
            nearest = difflib.get_close_matches(setting, valid, n=1, cutoff=0.0)
            hint = f"did you mean {nearest[0]!r}? It has {', '.join(valid)}" if nearest else "it has none"
            home = f" ({key})" if key else ""
            raise ValueError(f"{kind} {name!r} has no setting {setting!r}; {hint}{home}")
        _check_type(f"the setting {setting!r} of {kind} {name!r}", value, options.get(setting))


def _check_type(label: str, value: object, default: object) -> None:
    """A value must be of the kind of its default; a default of None says nothing."""
    if default is None:
        return
    if isinstance(default, bool):
        fits, expected = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, expected = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif isinstance(default, float):
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
        fits, expected = is_number, "a number"
    elif isinstance(default, str):
        fits, expected = isinstance(value, str), "a word"
    elif isinstance(default, tuple | list):
        fits, expected = isinstance(value, tuple | list), "a list"
    else:
        return
    if not fits:
        given, usual = setting_text(value, quotes=True), setting_text(default, quotes=True)
        raise ValueError(f"{label} is {given}; it must be {expected}, and its default is {usual}")


def _check_declaration(
    kind: str, name: str, function: Callable[..., object], declaration: Declaration
) -> None:
    if declaration.aggregation is not None and declaration.aggregation not in AGGREGATION_MODES:
        raise ValueError(
            f"{kind} {name!r} declares the aggregation {declaration.aggregation!r}; known: "
            f"{', '.join(AGGREGATION_MODES)}"
        )
    lost = sorted(declaration.prepared - declaration.needs)
    if lost:
        raise ValueError(f"{kind} {name!r} prepares {', '.join(lost)} but does not list it in needs")
    declared = declaration.needs | declaration.settings
    if not declared:
        return
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    accepted = {parameter.name for parameter in parameters}
    if declaration.prepare is not None:
        accepted |= set(inspect.signature(declaration.prepare).parameters)
    missing = sorted(declared - accepted)
    if missing:
        raise ValueError(
            f"{kind} {name!r} declares {', '.join(missing)}, but {function.__qualname__} has no parameter of "
            f"that name: it is called by keyword"
        )
