"""verl's asynchronous trainers as rollout.max_staleness: fully_async_policy (2025, 2026) and one_step_off_policy.

There a window is what is trained between two updates of the engine's weights: `trigger_parameter_sync_step` local
updates of `require_batches` mini-batches of prompts. That is a step here. `staleness_threshold` is the share of a
window that may be begun ahead of it, which is rollout.max_staleness.
"""

from __future__ import annotations

from typing import Any

from strop.compat.migrate.result import Facts, Outcome, integer, many, number, refuse, skip

_ASYNC = "async_training"
_MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
_CORRECTION = "algorithm.rollout_correction"
_DEFAULTS = {"staleness_threshold": 0.1, "trigger_parameter_sync_step": 4, "require_batches": 1}
"""Defaults of fully_async_ppo_trainer.yaml."""


def is_fully_async(facts: Facts) -> bool:
    """The settings are those of fully_async_main."""
    return any(facts.is_given(f"{_ASYNC}.{name}") for name in _DEFAULTS)


def validates_by_steps(facts: Facts) -> bool:
    """No other key says how often there is a validation."""
    return not facts.is_given("rollout.test_freq")


def window(facts: Facts) -> int:
    """Prompts between two updates of the engine's weights."""
    prompts = (
        facts.whole(_MINI) * _number(facts, "require_batches") * _number(facts, "trigger_parameter_sync_step")
    )
    return integer(prompts)


def _number(facts: Facts, name: str) -> float:
    is_given = facts.is_given(f"{_ASYNC}.{name}")
    return facts.number(f"{_ASYNC}.{name}") if is_given else _DEFAULTS[name]


def prompts_per_step(key: str, value: object, facts: Facts) -> Outcome:
    """Prompts of a step, which fully asynchronous training counts by its mini-batches."""
    if is_fully_async(facts):
        return many(
            {"data.prompts_per_step": window(facts)}, "what is trained between two updates of the weights"
        )
    return many({"data.prompts_per_step": integer(value)}, "prompts in both")


def staleness(key: str, value: object, facts: Facts) -> Outcome:
    """Staleness bound of the generation."""
    note = "of the prompts of a step; answers on their way go on with the new weights"
    return many({"rollout.max_staleness": float(number(value)), **_corrected(facts)}, note)


def _corrected(facts: Facts) -> dict[str, Any]:
    """Correction of older samples that verl makes by default."""
    if any(facts.is_given(f"{_CORRECTION}.{name}") for name in ("bypass_mode", "rollout_is", "rollout_rs")):
        return {}
    if facts.get(f"{_ASYNC}.compute_prox_log_prob") is True:
        return {"algorithm.correction.weights": "token"}
    return {"algorithm.old_log_probs": "rollout"}


def steps(key: str, value: object, facts: Facts) -> Outcome:
    """Prompts of the whole run as steps."""
    if value is None:
        return skip("not set")
    count = integer(value) // window(facts)
    return many({"trainer.max_steps": count}, f"{integer(value)} prompts, {window(facts)} a step")


def rollout_ranks(key: str, value: object, facts: Facts) -> Outcome:
    """Devices of generation apart; one step off where nothing says how far."""
    count = int(facts.get("rollout.nnodes") or 1) * integer(value)
    ours = {"resources.apart": {"rollout": count}, "resources.runtime": "ray"}
    if is_fully_async(facts):
        return many(ours)
    return many({**ours, "rollout.max_staleness": 1.0, **_corrected(facts)}, "one step off")


_V1 = "trainer.v1"
_ROLLOUT = "actor_rollout_ref.rollout"


def is_ahead(facts: Facts) -> bool:
    """Generation is ahead of training, by the trainer of 2026."""
    return facts.get(f"{_V1}.trainer_mode") in ("colocate_async", "separate_async")


def is_apart(facts: Facts) -> bool:
    """Generation has devices of its own, by the trainer of 2026."""
    return bool(facts.get(f"{_V1}.trainer_mode") == "separate_async")


def trainer_mode(key: str, value: object, facts: Facts) -> Outcome:
    """Mode of the trainer: generation ahead of training, and how far."""
    if value in (None, "sync"):
        return skip("as here")
    if not is_ahead(facts):
        return refuse(
            "how far generation may be ahead is rollout.max_staleness: use sync, colocate_async or separate_async"
        )
    bound = facts.get(f"{_V1}.sampler.max_off_policy_threshold")
    versions = 1.0 if bound is None else float(number(bound))
    if versions <= 0:
        return skip("nothing is ahead with trainer.v1.sampler.max_off_policy_threshold=0")
    note = (
        "versions of the policy that a sample may be behind; what is on its way goes on with the new weights"
    )
    ours: dict[str, Any] = {"rollout.max_staleness": versions, **_corrected(facts)}
    if is_apart(facts) and _count_of_rollout(facts) is None:
        note += "; generation apart: set resources.apart={rollout: N}"
    return many(ours, note)


def _count_of_rollout(facts: Facts) -> int | None:
    """Devices of generation alone; None where nothing says how many."""
    per_node = facts.get(f"{_ROLLOUT}.n_gpus_per_node")
    if not per_node:
        return None
    return integer(per_node) * integer(facts.get(f"{_ROLLOUT}.nnodes") or 1)


def places_of_rollout(key: str, value: object, facts: Facts) -> Outcome:
    """Devices of generation alone."""
    if not is_apart(facts):
        return skip("generation and training share their devices")
    count = _count_of_rollout(facts)
    if count is None:
        return skip("not set")
    if key.endswith(".nnodes"):
        return many({}, "with actor_rollout_ref.rollout.n_gpus_per_node")
    return many({"resources.apart": {"rollout": count}, "resources.runtime": "ray"}, "of generation alone")


def over_sampled(key: str, value: object, facts: Facts) -> Outcome:
    """The share of a batch's requests that verl's SGLang rollout of 2025 does not wait for."""
    if not value:
        return skip("off there too")
    share = number(value)
    if not 0 < share < 1:
        return refuse("it is a share between 0 and 1: rollout.over_issue")
    note = (
        "a step begins so many more prompts, and does not wait for the slowest; verl's SGLang rollout of 2025 gives up "
        "the slowest requests of a step, and its versions of 2026 do not read it"
    )
    return many({"rollout.over_issue": round(share / (1 - share), 4), "rollout.slowest": "drop"}, note)


def hybrid(key: str, value: object, facts: Facts) -> Outcome:
    """Trainer and rollout on the same devices, or apart."""
    if value is True:
        return skip("as here")
    if facts.is_given("rollout.n_gpus_per_node"):
        return skip("rollout.n_gpus_per_node says where generation is")
    return refuse("say where generation is: resources.apart={rollout: N}")
