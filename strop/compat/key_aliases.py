"""Aliases: our keys for keys of verl, TRL and OpenRLHF that a user types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.compat.migrate.tables import Table

_VALUES: tuple[Any, ...] = (4, "vllm", ["console"], True, "sigmoid")
"""Values of the kinds that rules read, tried in turn to see the keys that a rule gives."""

_ANY_VALUE = {"rollout.name": ("rollout.engine",)}
"""Keys of verl whose rules depend on the installed engines."""


def key_aliases(key: str, section: str = "") -> tuple[Sequence[str], str]:
    """Our keys for one of verl's, TRL's or OpenRLHF's, and the sentence that says so; no keys for any other.

    A key is verl's as a whole (data.train_batch_size), also without actor_rollout_ref (rollout.n), TRL's and OpenRLHF's
    by its last name (actor.optim.learning_rate).

    Args:
        key: that was typed.
        section: of the command that it was typed for, where it has one of its own.
    """
    # The tables take a while to read, and only an unknown key needs them.
    from strop.compat.migrate.openrlhf import openrlhf_table
    from strop.compat.migrate.trl import trl_table
    from strop.compat.migrate.verl import verl_sft_table, verl_table

    tables = {
        "": (verl_table, "GRPO", "train_ppo_ray"),
        "sft": (verl_sft_table, "SFT", "train_sft"),
        "prefer": (None, "DPO", "train_dpo"),
    }  # by the section of a command: verl's table, and TRL's and OpenRLHF's names for such a training
    of_verl, of_trl, of_openrlhf = tables.get(section, tables[""])
    ours: tuple[str, ...] = () if section else _ANY_VALUE.get(key.removeprefix("actor_rollout_ref."), ())
    if of_verl is not None:
        ours = ours or _ours(of_verl(), key) or _ours(of_verl(), f"actor_rollout_ref.{key}")
    if ours:
        return ours, f"it is verl's, here {', '.join(ours)} (`strop migrate verl` translates a whole script)"
    name = key.rpartition(".")[2]
    if ours := _ours(trl_table(of_trl), f"{of_trl}Config.{name}"):
        return (
            ours,
            f"{name} is TRL's, here {', '.join(ours)} (`strop migrate trl` translates a whole script)",
        )
    ours = _ours(openrlhf_table(of_openrlhf), name)
    return (
        ours,
        f"{name} is OpenRLHF's, here {', '.join(ours)} (`strop migrate openrlhf` translates a whole script)",
    )


def _ours(table: Table, key: str) -> tuple[str, ...]:
    """Our keys; none where the table has no row, or the row sets nothing here."""
    from strop.compat.migrate.result import Facts, UnreadableError

    if key not in table.rules:
        return ()
    for value in _VALUES:
        try:
            ours = tuple(table.rules[key](key, value, Facts({key: value}, table.defaults)).ours)
        except (
            UnreadableError,
            TypeError,
            ValueError,
            AttributeError,
        ):  # the rule wants a value of another kind
            continue
        if ours:
            return ours
    return ()
