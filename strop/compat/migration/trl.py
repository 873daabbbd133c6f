"""TRL: the table of a trainer's arguments, and what becomes of those of a script.

What becomes of each argument stands in trl.toml; what follows from several stands in trl_loop.py, trl_loss.py,
trl_ppo.py, trl_preferences.py and trl_sources.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

from strop.compat.migration import trl_loop, trl_loss, trl_ppo, trl_preferences, trl_sources
from strop.compat.migration.found import Found
from strop.compat.migration.outcomes import Facts, Outcome, Rule, many, skip
from strop.compat.migration.rules import functions_of
from strop.compat.migration.tables import Migration, Table, apply_table, read_table
from strop.compat.migration.trl_loop import COMMANDS, KINDS

__all__ = ["COMMANDS", "KINDS", "migrate_trl", "trl_table"]

_PARTS = (trl_loop, trl_loss, trl_ppo, trl_preferences, trl_sources)


def trainer(key: str, value: Any, facts: Facts) -> Outcome:
    """What a trainer is, whatever its arguments say."""
    if value == "PPO":
        note = "one answer to each prompt, values from a critic, no dual clip, gradients never clipped"
        return many(trl_ppo.SETTINGS, note)
    if value == "Reward":
        return many({"prefer.loss": "reward"}, "a classifier with one label")
    return skip("its arguments say it all")


@cache
def trl_table(kind: str) -> Table:
    """The arguments of a trainer and its configuration, of one of KINDS."""
    table = read_table("trl", functions_of(globals(), *map(vars, _PARTS)), kind=kind)
    if kind != "PPO":
        return table
    return dataclasses.replace(table, rules={key: _for_both(rule) for key, rule in table.rules.items()})


def migrate_trl(found: Sequence[Found], kind: str, *, processes: int = 1) -> Migration:
    """What becomes of every argument of a TRL script.

    Args:
        found: its arguments.
        kind: of KINDS.
        processes: with how many the script was started.
    """
    table = trl_table(kind)
    defaults = {**table.defaults, f"{kind}Config.delta": None, "processes": processes}
    write_out = list(table.written_out)
    given = {one.key: one.value for one in found if not one.unresolved}
    if kind in ("GRPO", "RLOO") and given.get(f"{kind}Config.use_vllm") is True:
        write_out.append(f"{kind}Config.vllm_importance_sampling_correction")
    start = Found(key="processes", value=processes, place="--processes")
    return apply_table([start, *found], table, defaults=defaults, write_out=write_out)


def _for_both(rule: Rule) -> Rule:
    """The rule for a trainer with one optimizer for policy and values: what the actor gets, the critic gets too."""

    def asked(key: str, value: Any, facts: Facts) -> Outcome:
        outcome = rule(key, value, facts)
        twins = {
            f"critic.{name.removeprefix('actor.')}": given
            for name, given in outcome.ours.items()
            if name.startswith("actor.")
        }
        return dataclasses.replace(outcome, ours={**outcome.ours, **twins}) if twins else outcome

    return asked
