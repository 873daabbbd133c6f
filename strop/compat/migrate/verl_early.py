"""verl before March 2025 (v0.1, v0.2): defaults that differ from its versions since then."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from strop.compat.migrate.result import Facts, Outcome, many, number, skip
from strop.compat.migrate.verl_prime import is_prime

_A, _R, _REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))
_OF_THAT_TIME = (
    "data.val_batch_size",
    f"{_A}.ppo_micro_batch_size",
    f"{_R}.log_prob_micro_batch_size",
    f"{_REF}.log_prob_micro_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.forward_micro_batch_size",
)
_SINCE_THEN = (
    *("algorithm.use_kl_in_reward", "data.filter_overlong_prompts", "algorithm.norm_adv_by_std_in_grpo"),
    *(f"{_A}.loss_agg_mode", f"{_A}.clip_ratio_c", f"{_A}.policy_loss.loss_mode", f"{_A}.optim.clip_grad"),
    *(f"{_R}.mode", f"{_R}.multi_turn.enable", f"{_R}.val_kwargs.n", "trainer.device", "trainer.use_v1"),
    *("custom_reward_function.path", "reward.custom_reward_function.path"),
)
"""Keys that came in March 2025 and later."""
_DEFAULTS: Mapping[str, Any] = {
    "data.filter_overlong_prompts": True,
    f"{_A}.entropy_coeff": 0.001,
    f"{_A}.clip_ratio_c": math.inf,
}
"""Prompts over the limit were always dropped, the entropy had a coefficient, and the clip had no second bound."""
_IN_REWARD: Mapping[str, Any] = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.001}
"""A KL term was taken off the rewards wherever the loss had none."""


def is_early(facts: Facts) -> bool:
    """The script is of that time: it has keys that went away, and none of those that came."""
    return any(map(facts.is_given, _OF_THAT_TIME)) and not any(map(facts.is_given, _SINCE_THEN))


def defaults_of_early(facts: Facts) -> dict[str, Any]:
    """Defaults of the early versions, as far as they differ."""
    in_loss = facts.get(f"{_A}.use_kl_loss") is True
    return {**_DEFAULTS, **({} if in_loss else _IN_REWARD)}


def kl_in_reward(value: object, facts: Facts) -> Any:
    """KL term in the rewards."""
    if is_prime(facts):
        return skip("the recipe of PRIME takes none off its rewards")
    if value is True and not facts.is_given("algorithm.use_kl_in_reward"):
        note = f"as in verl before March 2025, of which the script is: wherever {_A}.use_kl_loss is off"
        return many({"algorithm.use_kl_in_reward": True}, note)
    return value


def kl_coefficient(key: str, value: object, facts: Facts) -> Outcome:
    """The coefficient of the KL term in the rewards."""
    ours = {"algorithm.kl_ctrl.kl_coef": number(value)}
    is_read = facts.get("algorithm.use_kl_in_reward") is True or not value
    if is_read or facts.is_given("algorithm.use_kl_in_reward") or facts.get(f"{_A}.use_kl_loss") is True:
        return many(ours)
    return many(
        ours, "read with algorithm.use_kl_in_reward=true alone; verl before March 2025 needed no such switch"
    )
