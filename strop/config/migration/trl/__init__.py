"""The tables for TRL: arguments of GRPOConfig, RLOOConfig and SFTConfig, of their trainers and of LoraConfig.

    batches.py              what TRL assumes where a script says nothing, and its batch sizes in ours
    training_arguments.py   what every configuration takes over from transformers
    rl.py, sft.py           the configurations' own arguments
    trainers.py             arguments of the trainers, and of an adapter

How many processes a script was started with does not stand in it, so that is an argument here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.config.migration.found import Found
from strop.config.migration.outcomes import Facts, Outcome, Rule, many, skip
from strop.config.migration.tables import Entry, Migration, apply_table, make_table, under
from strop.config.migration.trl import rl, sft, trainers
from strop.config.migration.trl.batches import DEFAULTS, written_out
from strop.config.migration.trl.training_arguments import common_entries

__all__ = ["migrate_trl", "tables"]


def migrate_trl(found: Sequence[Found], kind: str, *, processes: int = 1) -> Migration:
    """What becomes of every argument of a TRL script.

    Args:
        found: its arguments.
        kind: GRPO, RLOO or SFT.
        processes: with how many the script was started.
    """
    defaults = {f"{kind}Config.{name}": value for name, value in DEFAULTS[kind].items()}
    facts = Facts({one.key: one.value for one in found if not one.unresolved}, defaults)
    start = Found(key="processes", value=processes, place="--processes")
    return apply_table(
        [start, *found],
        tables(kind),
        {**defaults, "processes": processes},
        write_out=written_out(kind, facts),
    )


def tables(kind: str) -> dict[str, Rule]:
    """The table of a trainer: its configuration, its own arguments, and an adapter."""
    is_sft = kind == "SFT"
    config = f"{kind}Config"
    common = common_entries(config, *(("sft", "sft") if is_sft else ("actor", "trainer")))
    return make_table(
        (Entry("processes", _processes),),
        under(config, *common, *(sft.ENTRIES if is_sft else rl.rl_entries(kind))),
        under(f"{kind}Trainer", *trainers.trainer_entries(kind)),
        under("LoraConfig", *trainers.LORA),
    )


def _processes(key: str, value: Any, facts: Facts) -> Outcome:
    if value == 1:
        return skip("one; say --processes N if the script was started with N")
    return many({"resources.ranks": value, "resources.runtime": "ray"})
