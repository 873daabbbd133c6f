"""What a key of another library is called here, for those who type it from habit."""

from __future__ import annotations

from collections.abc import Sequence

from strop.compat.migration.outcomes import Facts, UnreadableError
from strop.compat.migration.tables import Table
from strop.compat.migration.trl import trl_table
from strop.compat.migration.verl import verl_table

_VALUE = 4
"""A value that most rules read: which keys they answer is asked here, not what they make of it."""


def name_here(key: str) -> tuple[Sequence[str], str]:
    """Our keys for one of verl's or TRL's, and the sentence that says so; no keys for any other.

    A key is verl's as a whole (data.train_batch_size), TRL's by its last name (actor.optim.learning_rate).
    """
    if ours := _ours(verl_table(), key):
        return ours, f"it is verl's, here {', '.join(ours)} (`strop migrate verl` translates a whole script)"
    name = key.rpartition(".")[2]
    ours = _ours(trl_table("GRPO"), f"GRPOConfig.{name}")
    return ours, f"{name} is TRL's, here {', '.join(ours)} (`strop migrate trl` translates a whole script)"


def _ours(table: Table, key: str) -> tuple[str, ...]:
    """Our keys; none where the table has no row, or the row sets nothing here."""
    if key not in table.rules:
        return ()
    try:
        return tuple(table.rules[key](key, _VALUE, Facts({key: _VALUE}, table.defaults)).ours)
    except (UnreadableError, TypeError, ValueError):  # the rule wants a value of another kind
        return ()
