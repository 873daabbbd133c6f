"""verl's batch sizes in strop's terms: mini-batches of prompts as samples, micro-batches of samples as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.config.migration.outcomes import Facts, Outcome, Rule, many, skip
from strop.config.migration.values import integer
from strop.config.migration.verl.facts import R, is_dynamic, longest, num_ranks


def samples_per_update(ours: str) -> Rule:
    """A mini-batch of prompts as samples."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        prompts, n = integer(value, facts), integer(facts.get(f"{R}.n"), facts)
        return many({ours: prompts * n}, f"{prompts} prompts x {n} samples")

    return rule


def token_budget(ours: str, dynamic: Sequence[str]) -> Rule:
    """A token budget, which verl reads with dynamic batch sizes alone."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if not is_dynamic(facts, dynamic):
            return skip("verl reads it with use_dynamic_bsz=true alone")
        return many({ours: integer(value, facts)})

    return rule


def micro_batch(ours: str, dynamic: Sequence[str], *, over_all_devices: bool = False) -> Rule:
    """A micro-batch of samples as the tokens it may have."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None or is_dynamic(facts, dynamic):
            return skip("not set" if value is None else "use_dynamic_bsz=true bounds tokens instead")
        samples = integer(value, facts)
        if over_all_devices:
            samples = max(1, samples // num_ranks(facts))
        return many(
            {ours: samples * longest(facts)},
            f"{samples} samples of at most {longest(facts)} tokens; strop bounds tokens, not samples",
        )

    return rule


def updates_per_step(facts: Facts, mini_batch: str, epochs: str) -> int:
    """Optimizer steps of one step of training."""
    prompts = integer(facts.get("data.train_batch_size"), facts)
    size = min(integer(facts.get(mini_batch), facts), prompts)
    return -(-prompts // size) * integer(facts.get(epochs), facts)
