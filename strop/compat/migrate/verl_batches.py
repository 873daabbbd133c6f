"""verl's batches: mini-batches of prompts as samples, micro-batches of samples as tokens, steps, and devices."""

from __future__ import annotations

from typing import Any

from strop.compat.migrate import verl_agent
from strop.compat.migrate.result import Facts, Outcome, integer, many, number, refuse, skip

_A, _R, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))

_DYNAMIC = {
    "actor": (f"{_A}.use_dynamic_bsz",),
    "reference": (f"{_REF}.log_prob_use_dynamic_bsz", f"{_A}.use_dynamic_bsz"),
    "critic": ("critic.use_dynamic_bsz", f"{_A}.use_dynamic_bsz"),
}
"""Keys that say whether batches of a role are cut by tokens; the first that is set counts."""
_SECTION = {"actor": _A, "critic": "critic"}


def is_dynamic(facts: Facts, role: str) -> bool:
    """Batches of a role are cut by tokens."""
    return next((facts.get(key) for key in _DYNAMIC[role] if facts.get(key) is not None), False) is True


def samples_per_update(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """A mini-batch of prompts as samples."""
    prompts, n = integer(value), facts.whole(f"{_R}.n")
    return many({ours: prompts * n}, f"{prompts} prompts x {n} samples")


def token_budget(key: str, value: object, facts: Facts, *, role: str) -> Outcome:
    """A token budget, which verl reads with dynamic batch sizes alone."""
    if not is_dynamic(facts, role):
        return skip("verl reads it with use_dynamic_bsz=true alone")
    return many({f"{role}.engine.max_tokens_per_device": integer(value)})


def micro_batch(
    key: str, value: object, facts: Facts, *, role: str, over_all_devices: bool = False
) -> Outcome:
    """A micro-batch of samples as the tokens it may have."""
    if value is None or is_dynamic(facts, role):
        return skip("not set" if value is None else "use_dynamic_bsz=true bounds tokens instead")
    samples = integer(value)
    if over_all_devices:
        samples = max(1, samples // _num_ranks(facts))
    note = f"{samples} samples of at most {longest(facts)} tokens; strop bounds tokens, not samples"
    return many({f"{role}.engine.max_tokens_per_device": samples * longest(facts)}, note)


def _updates(facts: Facts, role: str) -> int:
    """Optimizer steps of one step of training; fine-tuning has one."""
    if role not in _SECTION:
        return 1
    prompts = facts.whole("data.train_batch_size")
    size = min(facts.whole(f"{_SECTION[role]}.ppo_mini_batch_size"), prompts)
    return -(-prompts // size) * facts.whole(f"{_SECTION[role]}.ppo_epochs")


def warmup(key: str, value: object, facts: Facts, *, ours: str, role: str) -> Outcome:
    """Steps of warm-up as optimizer steps."""
    steps = integer(value)
    if steps <= 0:
        return skip("no warm-up there, none here")
    per_step = _updates(facts, role)
    note = f"{steps} steps of {per_step} optimizer steps, which strop counts" if per_step > 1 else ""
    return many({f"{ours}.warmup_steps": steps * per_step}, note)


def warmup_share(key: str, value: Any, facts: Facts, *, ours: str, role: str) -> Outcome:
    """A share of all steps as optimizer steps."""
    if not value:
        return skip("no warm-up there, none here")
    total = facts.get("trainer.total_training_steps")
    if not isinstance(total, int):
        return many({f"{ours}.warmup_share": number(value)})
    steps = int(float(value) * total) * _updates(facts, role)
    return many({f"{ours}.warmup_steps": steps}, f"{value} of {total} steps")


def longest(facts: Facts) -> int:
    """Most tokens of a sample."""
    return int(facts.number("data.max_prompt_length")) + verl_agent.longest_response(facts)


def _num_ranks(facts: Facts) -> int:
    return int(facts.number("trainer.nnodes") * facts.number("trainer.n_gpus_per_node"))


def ranks(key: str, value: object, facts: Facts) -> Outcome:
    """Devices in all."""
    count = _num_ranks(facts)
    if count == 1:
        return many({"resources.ranks": 1})
    note = f"{facts.get('trainer.nnodes')} nodes x {facts.get('trainer.n_gpus_per_node')} devices"
    return many({"resources.ranks": count, "resources.runtime": "ray"}, note)


def started(key: str, value: object, facts: Facts) -> Outcome:
    """Processes of a fine-tuning, which torchrun counts by machine."""
    nodes = 1 if key.endswith("num_processes") else facts.get("torchrun.nnodes") or 1
    count = integer(value) * integer(nodes)
    if count == 1:
        return skip("one process")
    return many({"resources.ranks": count, "resources.runtime": "ray"}, "processes")


def every(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Steps between two of something."""
    if value == "after_each_epoch":
        return refuse(f"say it in steps: {ours}")
    return many({ours: max(0, integer(value))})


def sft_column(key: str, value: object, facts: Facts, *, ours: str, inside: str) -> Outcome:
    """A column of texts, or the text inside a column of records."""
    names = facts.get(inside) or []
    return many({ours: ".".join([str(value), *map(str, names)])}, "" if not names else "the text inside")


def sft_micro_batch(key: str, value: object, facts: Facts) -> Outcome:
    """Conversations of a pass as tokens."""
    if value == 0:
        return skip("not said there")
    tokens = integer(value) * facts.whole("data.max_length")
    return many({"sft.engine.max_tokens_per_device": tokens}, "strop bounds tokens, not conversations")
