"""TRL's arguments of PPO: batches in episodes, a KL penalty in the reward, a critic, samples to look at.

One optimizer steps policy and values together there; every row for the actor holds for the critic too (trl.py).
"""

from __future__ import annotations

import math

from strop.compat.migrate.result import Facts, Outcome, UnreadableError, integer, many, refuse, skip
from strop.compat.migrate.rules import model_path
from strop.compat.migrate.trl_loop import argument, epochs, warmup_share

SETTINGS = {
    "algorithm.adv_estimator": "gae",
    "rollout.samples_per_prompt": 1,
    "algorithm.clip_ratio_c": math.inf,
    "actor.optim.max_grad_norm": math.inf,
    "data.ground_truth_key": None,
    "data.default_data_source": "trl",
}
"""Settings of PPOTrainer, whatever its arguments say: one answer to each prompt, and so on."""


class _Episodes:
    """The batch arithmetic of TRL's PPO."""

    def __init__(self, facts: Facts) -> None:
        def whole(name: str, otherwise: int) -> int:
            value = argument(facts, name)
            return otherwise if value is None else integer(value)

        device = whole("per_device_train_batch_size", 8)
        accumulated = whole("gradient_accumulation_steps", 1)
        parts = whole("num_mini_batches", 1)
        local = device * accumulated
        if local % parts:
            raise UnreadableError(
                f"{local} episodes of a process cannot be cut into {parts} mini-batches: TRL refuses it too"
            )
        passes = parts * -(-(local // parts) // device)
        if passes % accumulated:
            raise UnreadableError(
                f"{passes} passes of an epoch are no multiple of {accumulated} accumulated ones, so that steps of "
                f"the optimizer reach over epochs: set actor.samples_per_update and critic.samples_per_update"
            )
        self.batch = local * int(facts.number("processes"))
        """Episodes of a step."""
        self.updates_per_epoch = passes // accumulated
        self.updates = self.updates_per_epoch * whole("num_ppo_epochs", 4)
        """Optimizer steps of a step."""

    def steps(self, facts: Facts) -> int | None:
        """Steps in all; None where the rows decide."""
        total = argument(facts, "total_episodes")
        return None if total is None else max(1, -(-integer(total) // self.batch))


def episodes(key: str, value: object, facts: Facts) -> Outcome:
    """Episodes of a step, and of an optimizer step."""
    count = _Episodes(facts)
    per_update = -(-count.batch // count.updates_per_epoch)
    return many(
        {"data.prompts_per_step": count.batch, "actor.samples_per_update": per_update},
        "per device x accumulation x processes; TRL accumulates over mini-batches, too",
    )


def total_episodes(key: str, value: object, facts: Facts) -> Outcome:
    """The length of the run."""
    steps = _Episodes(facts).steps(facts)
    return skip("not set: num_train_epochs says it") if steps is None else many({"trainer.max_steps": steps})


def ppo_epochs(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Visits of the rows, which total_episodes replaces."""
    steps = _Episodes(facts).steps(facts)
    if steps is None:
        return epochs(key, value, facts, ours=ours)
    return many({ours: steps}, "as many as the steps of total_episodes can take")


def ppo_warmup(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Warm-up, in steps of the loop there and in optimizer steps here."""
    if isinstance(value, float) and 0 < value < 1:
        return warmup_share(key, value, facts, ours=ours)
    updates = _Episodes(facts).updates
    return many({ours: integer(value) * updates}, f"{updates} optimizer steps per step")


def reference(key: str, value: object, facts: Facts) -> Outcome:
    """The frozen model of the KL penalty."""
    if value in (None, "", facts.get("PPOTrainer.model")):
        return skip("the policy as it is in the beginning, in both")
    return model_path(key, value, facts, ours="reference.path")


def stop_token(key: str, value: object, facts: Facts) -> Outcome:
    """End of a response at the end-of-sequence token."""
    if value == "eos":
        return skip("the end-of-sequence token ends a response here too")
    if value is not None:
        return refuse("it is the end-of-sequence token or none; other tokens are rollout.stop_token_ids")
    if argument(facts, "stop_token_id") is not None:
        return skip("stop_token_id says it")
    return refuse("the end-of-sequence token always ends a response here; TRL samples on to response_length")


def sample_generations(key: str, value: object, facts: Facts) -> Outcome:
    """Interval at which answers to the validation prompts are shown."""
    if not integer(value):
        return many({"eval.every": 0, "eval.before_train": False})
    steps = _Episodes(facts).steps(facts)
    if steps is None:
        return refuse("how many steps that is follows from the rows: set eval.every")
    ours = {
        "eval.every": max(1, steps // integer(value)),
        "eval.before_train": False,
        "eval.temperature": 0.01,
    }
    return many(
        ours, "TRL shows answers to one batch of eval_dataset, at this temperature; here all are validated"
    )
