"""verl's recipe of PRIME, recipe.prime.main_prime: `reward_model` there is a language model that learns during the run.

Its trainer draws more prompts than it trains and prefers those of middling difficulty. Leave-one-out advantages of
process rewards and of outcomes are added with weights and whitened over the batch. The reference is computed, but no
KL is taken off the rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.compat.migrate.result import Facts, Outcome, UnreadableError, integer, many, number, skip
from strop.compat.migrate.source import PRIME

_MODEL = "reward_model.model"
_TELLING = (
    f"{_MODEL}.beta_train",
    f"{_MODEL}.update",
    "algorithm.reward_dpo_coef",
    "reward_model.prime_norm",
)
"""Keys that no other recipe has."""
_BAND = ("data.accuracy_lower_bound", "data.accuracy_upper_bound")
DEFAULTS: Mapping[str, Any] = {
    "reward_model.enable": True,
    f"{_MODEL}.update": "before",
    f"{_MODEL}.beta_train": 0.05,
    f"{_MODEL}.optim.lr": 1e-6,
    f"{_MODEL}.optim.weight_decay": 0.0,
    "reward_model.prime_norm": "batch_norm",
    "algorithm.adv_estimator": "rloo",
    "algorithm.reward_gt_coef": 5,
    "algorithm.reward_dpo_coef": 5,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.entropy_coeff": 0.001,
    "data.filter_accuracy": True,
    _BAND[0]: 0.2,
    _BAND[1]: 0.8,
    "data.oversample_factor": 4.0,
    "trainer.val_before_train": False,
}
"""Defaults of prime_trainer.yaml, as far as something here depends on them."""
WRITTEN = (
    f"{_MODEL}.update", f"{_MODEL}.optim.weight_decay", "reward_model.mini_batch_size", "reward_model.prime_norm",
    "algorithm.reward_dpo_coef", "actor_rollout_ref.actor.entropy_coeff", "data.filter_accuracy",
    "trainer.val_before_train",
)  # fmt: skip
"""Keys whose defaults differ from ours."""


def is_prime(facts: Facts) -> bool:
    """The settings are those of the recipe, with its process reward model."""
    is_recipe = facts.get("program") == PRIME or any(facts.is_given(key) for key in _TELLING)
    return is_recipe and facts.get("reward_model.enable") is not False


def scoring_model(key: str, value: object, facts: Facts) -> Outcome:
    """The model that the process reward model begins as, or one that scores."""
    return many({"prm.path" if is_prime(facts) else "reward_model.path": value})


def of_scoring(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """A number of the engine of either."""
    return many({f"{'prm' if is_prime(facts) else 'reward_model'}.engine.{ours}": integer(value)})


def scoring_micro_batch(key: str, value: object, facts: Facts) -> Outcome:
    """Samples of a pass as tokens, of either."""
    longest = int(facts.number("data.max_prompt_length") + facts.number("data.max_response_length"))
    role = "prm" if is_prime(facts) else "reward_model"
    note = f"{value} samples of at most {longest} tokens"
    return many({f"{role}.engine.max_tokens_per_device": integer(value) * longest}, note)


def coefficients(key: str, value: object, facts: Facts) -> Outcome:
    """The weights of process rewards and outcomes."""
    process, outcome = number(value), number(facts.get("algorithm.reward_gt_coef"))
    if process == 0 and outcome == 0:
        raise UnreadableError("both weights are 0, and nothing is trained")
    return many({
        "algorithm.adv_settings.process_weight": process, "algorithm.adv_settings.outcome_weight": outcome
    })  # fmt: skip


def middling(key: str, value: object, facts: Facts) -> Outcome:
    """Prompts of middling difficulty, out of more than are trained."""
    factor = number(facts.get("data.oversample_factor"))
    if value is not True:
        return skip(
            "without it the first prompts of those that are drawn are trained: no others are drawn here"
        )
    low, high = (number(facts.get(bound)) for bound in _BAND)
    ours = {"enable": True, "metric": "acc", "lowest_mean": low, "highest_mean": high, "max_rounds": 1}
    ours["prompts_per_round"] = int(facts.whole("data.train_batch_size") * factor)
    note = (
        "a step with too few of them is smaller here, and filled with others there; set trainer.max_steps too"
    )
    return many({f"algorithm.filter_groups.{name}": setting for name, setting in ours.items()}, note)
