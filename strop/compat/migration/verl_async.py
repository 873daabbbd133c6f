"""verl's asynchronous trainers as rollout.max_staleness: fully_async_policy (2025, 2026) and one_step_off_policy.

There a window is what is trained between two updates of the engine's weights: `trigger_parameter_sync_step` local
updates of `require_batches` mini-batches of prompts. That is a step here. `staleness_threshold` is the share of a
window that may be begun ahead of it, which is rollout.max_staleness.
"""

from __future__ import annotations

from typing import Any

from strop.compat.migration.outcomes import Facts, Outcome, integer, many, number, refuse, skip

_ASYNC = "async_training"
_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
_CORRECTION = "algorithm.rollout_correction"
_DEFAULTS = {"staleness_threshold": 0.1, "trigger_parameter_sync_step": 4, "require_batches": 1}
"""Those of fully_async_ppo_trainer.yaml."""


def is_fully_async(facts: Facts) -> bool:
    """The settings are those of fully_async_main."""
    return any(facts.is_given(f"{_ASYNC}.{name}") for name in _DEFAULTS)


def window(facts: Facts) -> int:
    """Prompts between two updates of the engine's weights."""
    prompts = (
        facts.whole(_MINI) * _number(facts, "require_batches") * _number(facts, "trigger_parameter_sync_step")
    )
    return integer(prompts)


def _number(facts: Facts, name: str) -> float:
    given = facts.is_given(f"{_ASYNC}.{name}")
    return facts.number(f"{_ASYNC}.{name}") if given else _DEFAULTS[name]


def prompts_per_step(key: str, value: Any, facts: Facts) -> Outcome:
    """Prompts of a step, which fully asynchronous training counts by its mini-batches."""
    if is_fully_async(facts):
        return many(
            {"data.prompts_per_step": window(facts)}, "what is trained between two updates of the weights"
        )
    return many({"data.prompts_per_step": integer(value)}, "prompts in both")


def staleness(key: str, value: Any, facts: Facts) -> Outcome:
    """How far generation is ahead."""
    note = "of the prompts of a step; answers on their way go on with the new weights"
    return many({"rollout.max_staleness": float(number(value)), **_corrected(facts)}, note)


def _corrected(facts: Facts) -> dict[str, Any]:
    """What verl does about older samples where nothing else is said."""
    if any(facts.is_given(f"{_CORRECTION}.{name}") for name in ("bypass_mode", "rollout_is", "rollout_rs")):
        return {}
    if facts.get(f"{_ASYNC}.compute_prox_log_prob") is True:
        return {"algorithm.correction.weights": "token"}
    return {"algorithm.old_log_probs": "rollout"}


def steps(key: str, value: Any, facts: Facts) -> Outcome:
    """Prompts of the whole run as steps."""
    if value is None:
        return skip("not set")
    count = integer(value) // window(facts)
    return many({"trainer.max_steps": count}, f"{integer(value)} prompts, {window(facts)} a step")


def rollout_ranks(key: str, value: Any, facts: Facts) -> Outcome:
    """Devices of generation apart; one step off where nothing says how far."""
    count = int(facts.get("rollout.nnodes") or 1) * integer(value)
    ours = {"resources.apart": {"rollout": count}, "resources.runtime": "ray"}
    if is_fully_async(facts):
        return many(ours)
    return many({**ours, "rollout.max_staleness": 1.0, **_corrected(facts)}, "one step off")


def hybrid(key: str, value: Any, facts: Facts) -> Outcome:
    """Trainer and rollout on the same devices, or apart."""
    if value is True:
        return skip("as here")
    if facts.is_given("rollout.n_gpus_per_node"):
        return skip("rollout.n_gpus_per_node says where generation is")
    return refuse("say where generation is: resources.apart={rollout: N}")
