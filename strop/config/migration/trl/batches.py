"""What TRL assumes where a script says nothing, and its batch arithmetic.

TRL counts samples per device and optimizer steps; strop counts prompts per step, samples per optimizer step, and
steps.
"""

from __future__ import annotations

from typing import Any

from strop.config.migration.outcomes import Facts
from strop.config.migration.values import integer

_SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "save_steps": 500,
    "eval_strategy": "no",
    "seed": 42,
    "gradient_checkpointing": True,
}
_RL: dict[str, Any] = {
    **_SHARED,
    "learning_rate": 1e-6,
    "num_iterations": 1,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "temperature": 1.0,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_cap": 3.0,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "GRPO": {
        **_RL,
        "num_generations": 8,
        "beta": 0.0,
        "importance_sampling_level": "token",
        "loss_type": "dapo",
        "delta": None,
    },
    "RLOO": {**_RL, "num_generations": 2, "beta": 0.05},
    "SFT": {**_SHARED, "learning_rate": 2e-5, "max_length": 1024, "assistant_only_loss": False},
}
"""By trainer, what TRL assumes, as far as something here depends on it."""
_ALWAYS = (
    "per_device_train_batch_size", "num_train_epochs", "weight_decay", "lr_scheduler_type", "save_steps",
    "eval_strategy", "seed", "gradient_checkpointing",
)  # fmt: skip
_OWN = {
    "GRPO": ("num_generations", "max_completion_length", "loss_type", "delta"),
    "RLOO": ("num_generations", "max_completion_length", "beta"),
    "SFT": ("learning_rate", "assistant_only_loss"),
}


def written_out(kind: str, facts: Facts) -> list[str]:
    """Arguments whose defaults differ from ours, in the setting at hand."""
    config = f"{kind}Config"
    names = [*_ALWAYS, *_OWN[kind]]
    if kind != "SFT" and facts.get(f"{config}.use_vllm") is True:
        names.append("vllm_importance_sampling_correction")
    return [f"{config}.{name}" for name in names]


class Batch:
    """The batch arithmetic of TRL, from its arguments."""

    def __init__(self, facts: Facts, config: str) -> None:
        def whole(name: str) -> int | None:
            value = facts.get(f"{config}.{name}")
            return None if value is None else integer(value, facts)

        device = whole("per_device_train_batch_size") or 1
        accumulated = whole("gradient_accumulation_steps") or 1
        processes = int(facts.number("processes"))
        self.per_update = device * processes * accumulated
        """Samples of an optimizer step."""
        steps = whole("steps_per_generation") or accumulated
        self.per_step = whole("generation_batch_size") or device * processes * steps
        """Samples that are generated together."""
        self.num_generations = whole("num_generations") or 1
        self.updates = -(-self.per_step // self.per_update) * (whole("num_iterations") or 1)
        """Optimizer steps per generation."""

    def steps(self, updates: int) -> int:
        """Our steps for that many optimizer steps."""
        return max(1, -(-updates // self.updates))
