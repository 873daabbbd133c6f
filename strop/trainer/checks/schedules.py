"""Warnings about schedules that a run is too short for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.engines.learning_rates import unfinished_warm_up

if TYPE_CHECKING:
    from strop.trainer.config import Config
    from strop.workers.config import ActorConfig, CriticConfig, PrmConfig


def schedule_warnings(config: Config, num_steps: int) -> list[str]:
    """Sentences about a learning rate that stays low, and a policy that stays as it is, for all of so many steps."""
    sections: dict[str, ActorConfig | CriticConfig | PrmConfig] = {
        "actor": config.actor,
        "critic": config.critic,
        "prm": config.prm,
    }
    learners = {name: section for name, section in sections.items() if name in config.roles}
    warnings: list[str] = []
    if 0 < num_steps <= config.trainer.critic_warmup:
        del learners["actor"]
        warnings.append(
            f"trainer.critic_warmup is {config.trainer.critic_warmup}, and the run has {num_steps} "
            f"step{'' if num_steps == 1 else 's'}: the policy is not trained at all; lower it, or raise the number of "
            f"steps"
        )
    warnings += [
        unfinished_warm_up(name, section.optim, config.updates_of_run(section, num_steps))
        for name, section in learners.items()
    ]
    return [f"WARNING: {warning}" for warning in warnings if warning]
