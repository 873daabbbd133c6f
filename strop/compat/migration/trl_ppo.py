"""TRL's PPO: one answer to each prompt, a value model and a reward model, and one optimizer for policy and values."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from strop.compat.migration.outcomes import Facts, Outcome, integer, many, number, refuse, skip
from strop.compat.migration.tables import Migration

_ACTOR, _CRITIC = "actor.optim.", "critic.optim."


def of_ppo(per_step: int, per_update: int) -> dict[str, Any]:
    """The batches of policy and critic, in samples."""
    return {
        "data.prompts_per_step": per_step,
        "rollout.samples_per_prompt": 1,
        "actor.samples_per_update": per_update,
        "critic.samples_per_update": per_update,
    }


def with_critic(migration: Migration) -> Migration:
    """What the one optimizer is told, for the critic's as well."""
    rows = []
    for row in migration.rows:
        both = {name.replace(_ACTOR, _CRITIC): value for name, value in row.outcome.ours.items()}
        outcome = dataclasses.replace(row.outcome, ours={**row.outcome.ours, **both})
        rows.append(dataclasses.replace(row, outcome=outcome))
    return dataclasses.replace(migration, rows=tuple(rows))


def _given(facts: Facts, name: str) -> Any:
    return facts.get(f"PPOConfig.{name}")


def episodes(key: str, value: Any, facts: Facts) -> Outcome:
    """Answers in all, as steps."""
    batch = int(facts.number("processes"))
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches"):
        given = _given(facts, name)
        batch *= 1 if given is None else integer(given)
    steps = math.ceil(integer(value) / batch)
    return many({"trainer.max_steps": steps}, f"{value} answers / {batch} of a step")


def passes(key: str, value: Any, facts: Facts) -> Outcome:
    """Passes over the samples of a step."""
    return many({"actor.epochs": integer(value), "critic.epochs": integer(value)})


def ppo_kl(key: str, value: Any, facts: Facts) -> Outcome:
    """The KL term, taken off the reward token by token."""
    kinds = {"k1": "kl", "k3": "low_var_kl"}
    if number(value) == 0:
        return many({"algorithm.use_kl_in_reward": False})
    if (kind := _given(facts, "kl_estimator")) not in kinds:
        return refuse(f"kl_estimator is {kind!r}: use {' or '.join(kinds)}, algorithm.kl_penalty")
    ours = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": number(value)}
    return many({**ours, "algorithm.kl_penalty": kinds[kind]})


def ppo_clip(key: str, value: Any, facts: Facts) -> Outcome:
    """The clip range of the policy loss."""
    ours = {"algorithm.clip_ratio": number(value), "algorithm.clip_ratio_c": float("inf")}
    return many(ours, "TRL has no dual clip")


def gae(key: str, value: Any, facts: Facts) -> Outcome:
    """The advantages, with their lambda."""
    ours = {"algorithm.adv_estimator": "gae", "algorithm.lam": number(value)}
    return many({**ours, "algorithm.loss_agg_mode": "token-mean"})


def one_of_them(value: Any, facts: Facts) -> Any:
    """A token as a list of tokens."""
    return [integer(value)]


def reward_model(key: str, value: Any, facts: Facts) -> Outcome:
    """The reward model alone says what an answer is worth."""
    if not isinstance(value, str) or not value:
        return refuse("name its folder or its place on a hub: reward_model.path")
    ours = {"reward_model.path": value, "reward.weight": 0.0, "data.ground_truth_key": None}
    return many({**ours, "data.default_data_source": "trl"})


def reference(key: str, value: Any, facts: Facts) -> Outcome:
    """The frozen model of the KL term."""
    if value in (None, "", facts.get("PPOTrainer.model")):
        return skip("the model as it is in the beginning, in both")
    return (
        many({"reference.path": value})
        if isinstance(value, str)
        else refuse("name its folder: reference.path")
    )


PPO_FUNCTIONS = (episodes, passes, ppo_kl, ppo_clip, gae, one_of_them, reward_model, reference)
"""What rows of trl.toml name."""
