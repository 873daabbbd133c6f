"""verl: reward functions, managers of the user's own, and reward models beside them."""

from __future__ import annotations

from collections.abc import Sequence

from strop.compat.migrate import verl_prime
from strop.compat.migrate.result import Facts, Outcome, many, refuse, skip

_MANAGERS = ("naive", "batch", "prime", "dapo", "rate_limited", "function", "loop", "episode")
_SCORERS = ("custom_reward_function.path", "reward.custom_reward_function.path")


def manager(key: str, value: object, facts: Facts, *, file: str) -> Outcome:
    """A manager by name: one of verl's own, or one of the user's file."""
    if value is None or value in _MANAGERS:
        return skip("functions for one sample and for batches are told apart by their parameters")
    if facts.get(file):
        return skip(f"read with {file}")
    return refuse(f"in which file {value} is, is not said: set reward.path and reward.manager")


def manager_file(key: str, value: object, facts: Facts, *, names: Sequence[str]) -> Outcome:
    """The file of a manager of the user's own."""
    if not value:
        return skip("not set")
    name = next((value_found for value_found in map(facts.get, names) if value_found), None)
    if name is None:
        return refuse("which class of the file it is, is not said: set reward.path and reward.manager")
    if any(facts.get(function) for function in _SCORERS):
        return refuse("the function must be in the file of the manager: import it there, and set reward.name")
    note = "import RewardManagerBase and register from strop.rewards.managers"
    return many({"reward.path": value, "reward.manager": name}, note)


def model_only(key: str, value: object, facts: Facts, *, function: str) -> Outcome:
    """A reward model is on: it alone, unless a function of the user's is there too."""
    if value is not True:
        return skip("no reward model there, none here")
    if verl_prime.is_prime(facts):
        return skip("algorithm.adv_estimator=prime brings the process reward model along")
    if facts.get(function):
        return refuse(
            "a function that asks a model's server: here both scores are added, reward.weight is its share"
        )
    return many({"reward.weight": 0.0}, "the reward is the model's alone")
