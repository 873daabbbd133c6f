"""The tables for verl: each key of its configuration reference, and what becomes of it.

    facts.py       what verl assumes where a script says nothing, and what follows from several keys
    batches.py     its batch sizes in ours
    data.py, model.py, roles.py, losses.py, rollout.py, reward.py, algorithm.py, correction.py, distillation.py,
    trainer.py     reinforcement learning, a module for each group of its configuration
    engine.py      what every trained role has: optimizer and FSDP
    sft.py         supervised fine-tuning

verl counts batches in prompts, except for micro-batches, which are samples of one device; strop counts prompts per
step, samples per optimizer step and tokens per device. Its learning-rate schedule advances once per step, ours once
per optimizer step. Defaults that differ from ours are written out, so that a short script means the same here.
"""

from __future__ import annotations

from collections.abc import Sequence

from strop.config.migration.found import Found
from strop.config.migration.outcomes import Facts
from strop.config.migration.tables import Migration, apply_table, make_table
from strop.config.migration.verl import (
    algorithm,
    correction,
    data,
    distillation,
    losses,
    model,
    reward,
    roles,
    rollout,
    trainer,
)
from strop.config.migration.verl.facts import DEFAULTS, WRITTEN_OUT, M, inherited
from strop.config.migration.verl.sft import migrate_verl_sft

__all__ = ["TABLE", "migrate_verl", "migrate_verl_sft"]

TABLE = make_table(
    data.ENTRIES,
    model.model_entries(M, "model", engine="actor.engine"),
    roles.ACTOR,
    losses.ENTRIES,
    roles.REFERENCE,
    rollout.ENTRIES,
    roles.CRITIC,
    reward.ENTRIES,
    algorithm.ENTRIES,
    correction.ENTRIES,
    distillation.ENTRIES,
    trainer.ENTRIES,
    trainer.REST,
    trainer.ROOT,
)
"""verl's keys of reinforcement learning and what becomes of each."""


def migrate_verl(found: Sequence[Found]) -> Migration:
    """What becomes of every setting of a verl script or YAML."""
    facts = Facts({one.key: one.value for one in found if one.kind == "set" and not one.unresolved}, DEFAULTS)
    follows = inherited(facts)
    return apply_table(found, TABLE, {**DEFAULTS, **follows}, write_out=(*WRITTEN_OUT, *follows))
