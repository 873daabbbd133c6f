"""What a key of another library is called here, for those who type it from habit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from strop.config.migration.outcomes import Facts, Rule, UnreadableError
from strop.config.migration.trl import tables
from strop.config.migration.trl.batches import DEFAULTS as TRL_DEFAULTS
from strop.config.migration.verl import TABLE
from strop.config.migration.verl.facts import DEFAULTS as VERL_DEFAULTS

_VALUE = 4
"""A value that most rules read: which keys they answer is asked here, not what they make of it."""
_TRL = "GRPOConfig"


def name_here(key: str) -> tuple[Sequence[str], str]:
    """Our keys for one of verl's or TRL's, and the sentence that says so; no keys for any other.

    A key is verl's as a whole (data.train_batch_size), TRL's by its last name (actor.optim.learning_rate).
    """
    if ours := _ours(TABLE, key, VERL_DEFAULTS):
        return ours, f"it is verl's, here {', '.join(ours)} (`strop migrate verl` translates a whole script)"
    name = key.rpartition(".")[2]
    defaults = {"processes": 1, **{f"{_TRL}.{one}": value for one, value in TRL_DEFAULTS["GRPO"].items()}}
    if ours := _ours(tables("GRPO"), f"{_TRL}.{name}", defaults):
        return (
            ours,
            f"{name} is TRL's, here {', '.join(ours)} (`strop migrate trl` translates a whole script)",
        )
    return (), ""


def _ours(table: Mapping[str, Rule], key: str, defaults: Mapping[str, object]) -> tuple[str, ...]:
    """Our keys; none where the table has no row, or the row sets nothing here."""
    if key not in table:
        return ()
    try:
        outcome = table[key](key, _VALUE, Facts({key: _VALUE}, defaults))
    except (UnreadableError, TypeError, ValueError):  # the rule wants a value of another kind
        return ()
    return tuple(outcome.ours)
