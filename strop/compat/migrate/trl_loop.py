"""TRL's arguments of the loop: batches, steps, epochs, checkpoints, validation, the optimizer's schedule.

TRL counts samples per device and optimizer steps; strop counts prompts per step, samples per optimizer step, and
steps.
"""

from __future__ import annotations

import math
from typing import Any

from strop.compat.migrate.result import Facts, Outcome, UnreadableError, integer, many, number, refuse, skip
from strop.compat.migrate.rules import installed_trackers, shown_as, tracker_names, without_trackers
from strop.data.config import DataConfig
from strop.engines.config import EngineConfig

KINDS = ("GRPO", "RLOO", "SFT", "PPO", "DPO", "KTO", "Reward")
COMMANDS = {"SFT": "sft", "DPO": "prefer", "KTO": "prefer", "Reward": "prefer"}
"""The commands for kinds of training that `strop train` is not; their settings stand in the section of that name."""


def argument(facts: Facts, name: str) -> Any:
    """An argument of the configuration, whichever kind it is."""
    return next((value for kind in KINDS if (value := facts.get(f"{kind}Config.{name}")) is not None), None)


class Batch:
    """The batch arithmetic of TRL, from its arguments."""

    def __init__(self, facts: Facts) -> None:
        def whole(name: str, otherwise: int = 1) -> int:
            value = argument(facts, name)
            return (0 if value is None else integer(value)) or otherwise

        accumulated = whole("gradient_accumulation_steps")
        together = whole("per_device_train_batch_size") * int(facts.number("processes"))
        self.per_update = together * accumulated
        """Samples of an optimizer step."""
        default = together * whole("steps_per_generation", accumulated)
        self.per_step = whole("generation_batch_size", default)
        """Samples that are generated together."""
        self.num_generations = whole("num_generations")
        self.updates = -(-self.per_step // self.per_update) * whole("num_iterations")
        """Optimizer steps per generation."""


def batches(key: str, value: object, facts: Facts) -> Outcome:
    """Samples per device as prompts per step and samples per optimizer step."""
    batch = Batch(facts)
    if (kind := key.partition("Config")[0]) in COMMANDS:
        ours = {f"{COMMANDS[kind]}.examples_per_update": batch.per_update}
        return many(ours, "per device x processes x accumulation")
    prompts, remainder = divmod(batch.per_step, batch.num_generations)
    if remainder:
        raise UnreadableError(
            f"{batch.per_step} samples are generated together, which is no multiple of "
            f"{batch.num_generations} generations"
        )
    return many(
        {"data.prompts_per_step": prompts, "actor.samples_per_update": batch.per_update},
        f"{batch.per_step} samples / {batch.num_generations} generations; {batch.per_update} per step",
    )


def answers(key: str, value: object, facts: Facts) -> Outcome:
    """The longest answer, and room for it and its prompt in a pass where that is more than by default."""
    limit = integer(value)
    ours: dict[str, Any] = {"data.max_response_tokens": limit}
    sample = limit + integer(argument(facts, "max_prompt_length") or DataConfig().max_prompt_tokens)
    if sample > EngineConfig().max_tokens_per_device:
        ours["actor.engine.max_tokens_per_device"] = sample
        if key.startswith("PPO") or argument(facts, "beta"):
            ours["reference.engine.max_tokens_per_device"] = sample
    return many(ours)


def counted(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """A number of optimizer steps as steps."""
    if value is None or value < 0:
        return skip("not set")
    if isinstance(value, float) and value < 1:
        return refuse("a share of all steps is known only with the data: set the number")
    steps = integer(value)
    if key.startswith((*COMMANDS, "PPO")) or steps == 0:
        return many({ours: steps})
    updates = Batch(facts).updates
    return many(
        {ours: max(1, -(-steps // updates))}, f"{updates} optimizer steps per step" if updates > 1 else ""
    )


_SCHEDULES = {
    **{name: name for name in ("linear", "cosine", "constant")},
    "constant_with_warmup": "constant",
    "warmup_stable_decay": "wsd",
}
_LOWEST = ("cosine_with_min_lr", "cosine_warmup_with_min_lr")


def schedule(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Schedule of the learning rate."""
    if value in _LOWEST:
        arguments = argument(facts, "lr_scheduler_kwargs") or {}
        lowest, rate = arguments.get("min_lr"), arguments.get("min_lr_rate")
        if rate is None and lowest is None:
            raise UnreadableError(f"{value} needs min_lr or min_lr_rate in lr_scheduler_kwargs, there too")
        if rate is None:
            rate = number(lowest) / number(argument(facts, "learning_rate"))
        return many({f"{ours}.schedule": "cosine", f"{ours}.min_lr_ratio": float(f"{number(rate):.10g}")})
    if value is None:
        return skip("not set")
    if value not in _SCHEDULES:
        return refuse("strop does not have it; use constant, linear, cosine or wsd")
    return many({f"{ours}.schedule": _SCHEDULES[value]})


def schedule_numbers(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """The numbers of a schedule."""
    if not value:
        return skip("not set")
    if argument(facts, "lr_scheduler_type") in _LOWEST and set(value) <= {"min_lr", "min_lr_rate"}:
        return many({}, "with lr_scheduler_type")
    return refuse(f"the schedule's numbers are under {ours}")


def save_steps(key: str, value: object, facts: Facts) -> Outcome:
    """Steps between checkpoints."""
    if argument(facts, "save_strategy") not in (None, "steps"):
        return skip("read with save_strategy=steps alone")
    return counted(key, value, facts, ours="run.save_every")


def evaluated(key: str, value: object, facts: Facts) -> Outcome:
    """Interval and sampling of the validation."""
    if str(value) == "no":
        return many({"eval.every": 0, "eval.before_train": False})
    if str(value) != "steps":
        return refuse("say it in steps: eval.every")
    num_generations = argument(facts, "num_generations_eval")
    ours = {
        "eval.samples_per_prompt": argument(facts, "num_generations")
        if num_generations is None
        else num_generations,
        "eval.temperature": argument(facts, "temperature"),
    }
    return many(ours, "TRL validates as it trains; eval_steps says when")


def betas(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Both decay rates, from two arguments."""
    first, second = argument(facts, "adam_beta1"), argument(facts, "adam_beta2")
    return many({ours: [0.9 if first is None else first, 0.999 if second is None else second]})


def warmup(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Steps of warm-up, or their share of all steps."""
    if isinstance(value, float) and 0 < value < 1:
        return warmup_share(key, value, facts, ours=ours)
    return many({ours: integer(value)})


def warmup_share(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """A share of all steps."""
    total = None if key.startswith("PPO") else argument(facts, "max_steps")
    if not value:
        return skip("no warm-up there, none here")
    if not isinstance(total, int) or total < 1:
        return many({f"{ours.removesuffix('steps')}share": value})
    return many({ours: math.ceil(round(value * total, 6))})


def epochs(key: str, value: Any, facts: Facts, *, ours: str) -> Outcome:
    """Whole visits of the rows; where max_steps is set, as many as those may take."""
    limit = argument(facts, "max_steps")
    if isinstance(limit, int) and limit > 0 and not key.startswith("PPO"):
        return many({ours: limit}, "max_steps ends the run, after as many epochs as it takes")
    if number(value) != int(value):
        return refuse("strop visits every row equally often: use whole epochs, or max_steps")
    return many({ours: int(value)})


def trackers(value: object, facts: Facts) -> Outcome:
    """Trackers of the metrics."""
    available, missing = tracker_names(
        value, {**installed_trackers(), "all": "tensorboard", "none": "console"}
    )
    ours = list(dict.fromkeys(["console", "jsonl", *available]))
    note = f"{without_trackers(missing)}; metrics are in metrics.jsonl" if missing else ""
    return many({"trainer.trackers": ours}, note)


def shown(key: str, value: object, facts: Facts, *, ours: str) -> Outcome:
    """Name of the run for trackers."""
    return shown_as(value, argument(facts, "report_to"), ours=ours)
