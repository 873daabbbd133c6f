"""Rules that rows of a table may name: the outcome of a setting, from its value and all facts.

A row is one of these, with the words it takes:

    to = "our.key"        our key; `as` names a conversion, `choice` lists names, `instead` what to use for other ones
    sets = {…}            our keys and values, "<value>" for theirs, converted as for `to`
    not_needed = "why"    nothing to set here, whatever the value
    not_there = "why"     strop has nothing like it yet, and the run goes without
    refused = "why"       strop does something else, whatever the value
    unless = [values]     not needed for these and null, because of `else`; for others `refuse` or `lack` says why
    when_true = {…}       our keys and values where theirs is true; `else` says why not
    cases = {…}           a row for each value by its name, several between blanks; `otherwise` for other values
    below = "our.section" every key below a section of theirs, under its own name
    noted = "where"       translated together with another setting
    by = "name"           a function of the library's module, for what follows from several settings

Every row may have `note` (what to know about it), `optional` (null and empty text are not set), and `only_if`, a
condition and what is said where it does not hold: a function of the module, a key that is set and not false, or
`key=value`; several such pairs, the first one asked first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import isfunction
from pathlib import Path
from typing import Any

from strop.compat.migrate.result import (
    Facts,
    Outcome,
    Rule,
    UnreadableError,
    integer,
    lack,
    many,
    number,
    refuse,
    skip,
)
from strop.compat.migrate.source import MODELSCOPE
from strop.engines.config import EngineConfig
from strop.observability.trackers.group import check_trackers

Functions = Mapping[str, Callable[..., Any]]
"""Functions that `by`, `as` and `only_if` name beside the conversions here: rules, conversions, conditions."""

_VALUE = "<value>"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_KINDS = (
    *("to", "not_needed", "not_there", "refused", "unless", "when_true", "below", "noted", "by"),
    *("sets", "cases"),
)


def functions_of(*modules: Mapping[str, Any]) -> Functions:
    """Functions that rows may name: those of these modules (`vars(module)`), and those here, by their own names."""
    return {
        name: function
        for module in (globals(), *modules)
        for name, function in module.items()
        if isfunction(function) and function.__module__ == module["__name__"]
    }


def rule_of(row: Mapping[str, Any], functions: Functions) -> Rule:
    """The rule that a row stands for.

    Raises:
        ValueError: the row has no kind, or several.
    """
    kinds = [kind for kind in _KINDS if kind in row]
    if len(kinds) != 1:
        raise ValueError(f"the row {dict(row)} must have one of {', '.join(_KINDS)}")
    rest = {name: value for name, value in row.items() if name not in (*kinds, "optional", "only_if")}
    rule = _base_rule(kinds[0], row[kinds[0]], rest, functions)
    if row.get("optional"):
        rule = _if_set(rule)
    if "only_if" in row:
        conditions = row["only_if"]
        for condition, why_not in reversed(list(zip(conditions[::2], conditions[1::2], strict=True))):
            rule = _only_if(condition, why_not, rule, functions)
    return rule


def _base_rule(kind: str, content: Any, rest: Mapping[str, Any], functions: Functions) -> Rule:
    match kind:
        case "to":
            return _sets({content: _VALUE}, rest, functions)
        case "sets":
            return _sets(content, rest, functions)
        case "cases":
            otherwise = rule_of(rest["otherwise"], functions)
            rules = {
                name: rule_of(row, functions) for names, row in content.items() for name in names.split()
            }
            return lambda key, value, facts: rules.get(_name_of(value), otherwise)(key, value, facts)
        case "not_needed":
            return lambda key, value, facts: skip(content)
        case "not_there":
            return lambda key, value, facts: lack(content)
        case "refused":
            return lambda key, value, facts: refuse(content)
        case "noted":
            return lambda key, value, facts: many({}, content)
        case "unless":
            return _unless(content, **rest)
        case "when_true":
            yes, no = many(content, rest.get("note", "")), skip(rest["else"])
            return lambda key, value, facts: yes if value is True else no
        case "below":
            return lambda key, value, facts: many(
                {f"{content}.{key.removeprefix(rest['section'] + '.')}": value}
            )
    function = functions[content]
    return lambda key, value, facts: function(key, value, facts, **rest)


def _sets(ours: Mapping[str, Any], rest: Mapping[str, Any], functions: Functions) -> Rule:
    convert = _choice(rest["choice"], rest["instead"]) if "choice" in rest else None
    if "as" in rest:
        convert = CONVERSIONS.get(rest["as"]) or functions[rest["as"]]

    def rule(key: str, value: object, facts: Facts) -> Outcome:
        converted = value if convert is None else convert(value, facts)
        if isinstance(converted, Outcome):
            return converted
        return many({name: _filled(target, converted) for name, target in ours.items()}, rest.get("note", ""))

    return rule


def _filled(ours: object, value: object) -> Any:
    """A value of ours, with theirs in its place."""
    if isinstance(ours, list):
        return [_filled(entry, value) for entry in ours]
    return value if ours == _VALUE else ours


def _name_of(value: object) -> str:
    """Name of a value in a table; empty for lists and the like."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, int | float) else value if isinstance(value, str) else ""


def _unless(harmless: list[Any], **words: str) -> Rule:
    no = refuse(words["refuse"]) if "refuse" in words else lack(words["lack"])
    yes = skip(words.get("else", "that is how strop works"))

    def rule(key: str, value: object, facts: Facts) -> Outcome:
        return yes if value is None or any(_is_same(value, entry) for entry in harmless) else no

    return rule


def _if_set(rule: Rule) -> Rule:
    def conditional(key: str, value: object, facts: Facts) -> Outcome:
        return skip("not set") if value is None or value == "" else rule(key, value, facts)

    return conditional


def _only_if(condition: str, why_not: str, rule: Rule, functions: Functions) -> Rule:
    def holds(facts: Facts) -> bool:
        if condition in functions:
            return bool(functions[condition](facts))
        key, is_one, value = condition.partition("=")
        return _name_of(facts.get(key)) == value if is_one else facts.get(key) not in (None, False, "")

    return lambda key, value, facts: rule(key, value, facts) if holds(facts) else skip(why_not)


def _choice(ours: Mapping[str, Any] | list[str], instead: str) -> Callable[[Any, Facts], Any]:
    """A value by its name, `true` and `false` too; other names are refused."""
    names = ours if isinstance(ours, Mapping) else {name: name for name in ours}

    def convert(value: object, facts: Facts) -> Any:
        if value is None:
            return skip("not set")
        if isinstance(value, int) and value in (0, 1):
            value = "true" if value else "false"
        choice = names.get(value) if isinstance(value, str) else None
        return refuse(f"strop does not have it; {instead}") if choice is None else choice

    return convert


def _is_same(value: object, expected: object) -> bool:
    """Equal, and True is not 1."""
    return bool(value == expected) and isinstance(value, bool) == isinstance(expected, bool)


def one_or_more(value: object) -> list[Any] | Outcome:
    """A list; a value alone becomes a list of one, nothing is left out."""
    if value is None:
        return skip("empty there too")
    return list(value) if isinstance(value, list | tuple) else [value]


def _pair(value: object) -> list[Any]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise UnreadableError(f"{value!r} would have to be two numbers")
    return list(value)


CONVERSIONS: dict[str, Callable[[Any, Facts], Any]] = {
    "integer": lambda value, facts: integer(value),
    "number": lambda value, facts: number(value),
    "text": lambda value, facts: str(value),
    "never_below_zero": lambda value, facts: max(0, integer(value)),
    "list": lambda value, facts: one_or_more(value),
    "pair": lambda value, facts: _pair(value),
    "unless_empty": lambda value, facts: value or skip("empty there too"),
    "attention": lambda value, facts: attention(value),
}
"""Conversions that every library's rows may name. `never_below_zero` makes their -1 for off our 0."""


def attention(value: object) -> Any:
    """model.attn_implementation for a name of transformers."""
    if value is None:
        return skip("not set")
    if value in ("sdpa", "eager"):
        return value
    if isinstance(value, str) and re.search("flash[-_]att", value):  # kernels-community/flash-attn2, too
        return skip(
            "model.attn_implementation=sdpa computes by FlashAttention's kernel on CUDA, in bfloat16 and float16"
        )
    return refuse("attention on packed tokens is computed by sdpa or eager: model.attn_implementation")


def model_path(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """A model folder, or the name of a model on a hub: the same words here."""
    if not isinstance(value, str) or not value:
        return skip("not set")
    if facts.get(MODELSCOPE) is True and _HUB_NAME.fullmatch(value) and not Path(value).exists():
        return many({ours: f"modelscope:{value}"}, f"by {MODELSCOPE}")
    return many({ours: value}, "")


def longest_conversation(
    key: str, value: object, facts: Facts, *, section: str, bounded_by: str = "", note: str = ""
) -> Outcome:
    """The longest conversation of a fine-tuning, and room for it in a pass where that is more than by default.

    Args:
        section: sft or prefer.
        bounded_by: their settings, between blanks, that say how much a pass takes.
        note: as of a row.
    """
    tokens = integer(value)
    ours: dict[str, Any] = {f"{section}.data.max_tokens": tokens}
    needed = tokens + (section == "prefer")  # a reward model reads one more
    if needed > EngineConfig().max_tokens_per_device and not any(map(facts.get, bounded_by.split())):
        ours[f"{section}.engine.max_tokens_per_device"] = needed
    return many(ours, note)


TRACKERS = {
    **{name: name for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio", "clearml")},
    "comet_ml": "comet",
}
"""Trackers by the names that verl and transformers have for them."""


IN_FOLDER = frozenset({"console", "file", "jsonl", "tensorboard", "none"})
"""Trackers that keep a run by its folder, and not by a project and a name."""


def shown_as(value: Any, trackers: Any, *, ours: str) -> Outcome:
    """A project or a name under which trackers of other people show a run.

    Args:
        value: the name; one that a shell makes, such as with a date, is left to strop.
        trackers: the other library's setting for them, a name or a list of names.
        ours: our key.
    """
    names = {trackers} if isinstance(trackers, str) else set(trackers or [])
    if not names - IN_FOLDER:
        return skip("the run folder is what --out names")
    if not isinstance(value, str) or not value or "$" in value or "`" in value:
        return skip(f"a run has the name of its folder, and another one by {ours}")
    return many({ours: value})


def installed_trackers() -> dict[str, str]:
    """Trackers of TRACKERS that a run on this machine can use."""
    return {name: ours for name, ours in TRACKERS.items() if _is_installed(ours)}


def without_trackers(names: Sequence[str]) -> str:
    """Reason for which these are left out, and the remedy."""
    extras = [TRACKERS[name] for name in names if name in TRACKERS]
    install = f" (pip install 'strop[{','.join(extras)}]', then add to trainer.trackers)" if extras else ""
    return f"no tracker here for {', '.join(names)}{install}"


@cache
def _is_installed(name: str) -> bool:
    try:
        check_trackers([name])
    except ValueError:
        return False
    return True


def tracker_names(value: Any, ours: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(our trackers, names that have none here) of one name or a list of names."""
    names = [value] if isinstance(value, str) else list(value or [])
    return [ours[name] for name in names if name in ours], [name for name in names if name not in ours]
