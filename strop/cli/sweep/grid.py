"""From the words of a command line to the runs that they ask for: every combination of the values of `key=a,b`.

The grammar is Hydra's: `key=a,b`, `key=choice(a,b)` and `key=range(1,4)`; a value
with a comma of its own goes in quotes.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override as Parsed
from hydra.errors import HydraException

from strop.utils.terminal import UsageError

MAX_RUNS = 1000
"""More are a mistake of typing rather than a plan."""
_MAX_NAME = 80


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run of a sweep."""

    name: str
    """Name of its folder, made of the settings that are its own."""
    chosen: tuple[str, ...]
    """Overrides that are its own, such as `actor.optim.lr=1e-5`."""
    overrides: tuple[str, ...]
    """All overrides, in the order of the command line."""


def plan(words: Sequence[str]) -> list[Planned]:
    """The runs of a sweep: the last `key=a,b` changes fastest.

    Raises:
        UsageError: no word names several values, one cannot be taken apart, or two runs would be the same.
    """
    options = [_values(word) for word in words]
    if all(len(values) == 1 for values in options):
        raise UsageError(
            "nothing to sweep over: give at least one setting several values, as in trainer.seed=1,2,3"
        )
    count = 1
    for values in options:
        count *= len(values)
    if count > MAX_RUNS:
        raise UsageError(f"these are {count} runs, more than {MAX_RUNS}: sweep over fewer values at once")
    runs: dict[str, Planned] = {}
    for overrides in itertools.product(*options):
        chosen = tuple(
            override for override, values in zip(overrides, options, strict=True) if len(values) > 1
        )
        name = _name(chosen)
        if name in runs:
            raise UsageError(f"{', '.join(chosen)} is asked for twice: name each value once")
        runs[name] = Planned(name=name, chosen=chosen, overrides=overrides)
    return list(runs.values())


def _values(word: str) -> list[str]:
    """The overrides that a word stands for: one, or one per value of a sweep."""
    parsed = _parsed(word)
    if parsed is None or not parsed.is_sweep_override():
        return [word]
    if not (parsed.is_choice_sweep() or parsed.is_range_sweep()):
        raise UsageError(f"{word!r}: a sweep takes lists (a,b), choice(a,b) and range(1,4), nothing else")
    key = parsed.get_key_element()
    try:
        return [f"{key}={value}" for value in parsed.sweep_string_iterator()]
    except (HydraException, ValueError) as error:
        raise UsageError(f"{word!r} cannot be taken apart: {error}") from error


def _parsed(word: str) -> Parsed | None:
    """None for a word that is no override, which the reader of settings explains."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _name(chosen: Sequence[str]) -> str:
    """A folder's name that needs no quotes anywhere: last parts of the keys with their values; where that does not tell
    all, with a digest."""
    pairs = [override.partition("=") for override in chosen]
    short = [(key.rpartition(".")[2].lstrip("+"), value) for key, _, value in pairs]
    name = "__".join(f"{key}_{value}" for key, value in short)
    plain = re.sub(r"[^\w.+-]+", "_", name)
    if plain == name and len(name) <= _MAX_NAME and len(dict(short)) == len(short):
        return name
    return f"{plain[:_MAX_NAME]}-{hashlib.sha256(','.join(chosen).encode()).hexdigest()[:6]}"
