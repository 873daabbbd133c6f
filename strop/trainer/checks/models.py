"""Models that do not fit each other, or the ranks of their role."""

from __future__ import annotations

import dataclasses
from typing import Any

from strop.engines.model import check_language_model
from strop.engines.parallel.model_axes import check_model_axes, divides_model
from strop.engines.pretrained_config import load_model_config
from strop.rollout.engine_group import check_engine
from strop.trainer.checks.devices import check_devices
from strop.trainer.config import Config
from strop.workers.critic import check_critic
from strop.workers.reward_model import check_reward_model
from strop.workers.routers import check_routers
from strop.workers.teacher import check_teacher


def check_models(config: Config) -> None:
    """Refuse models that do not fit each other, or the ranks of their role, before any process starts.

    Raises:
        ValueError: as `check_devices`, `check_language_model`, `check_engine`, `check_critic`, `check_teacher`,
            `check_reward_model`; or sequences that cannot be divided over ranks.
    """
    check_devices(config, "train")
    check_language_model(config.model)
    paths = {
        "critic": config.critic.path,
        "teacher": config.teacher.path,
        "prm": config.prm.path,
        "reward_model": config.reward_model.path,
        "reference": config.reference.path,
    }
    paths = {name: path for name, path in paths.items() if path and name in config.roles}
    for name, path in paths.items():
        _shape(config, name, path)
    check_engine(config.model, config.rollout)
    if "reference" in paths:
        check_language_model(dataclasses.replace(config.model, path=config.reference.path))
    if "critic" in config.roles:
        check_critic(config.model, config.critic.path)
    if "teacher" in config.roles:
        check_teacher(config.model, config.teacher.path)
    if "prm" in paths:
        check_teacher(config.model, config.prm.path, key="prm.path")
    if "reward_model" in config.roles:
        check_reward_model(config.reward_model.model)
    if config.actor.moe.is_on:
        check_routers(load_model_config(config.model), config.actor.moe, section="actor.moe")
    for name, engine in config.used_engines.items():
        if divides_model(engine):
            shape = _shape(config, name, paths.get(name) or config.model.path)
            check_model_axes(shape, engine, config.resources.ranks_of(name), section=f"{name}.engine")


def _shape(config: Config, name: str, path: str) -> Any:
    """The configuration of the model that a role starts from; an error names the role's own path."""
    try:
        model = config.reward_model.model if name == "reward_model" else config.model
        return load_model_config(dataclasses.replace(model, path=path))
    except ValueError as error:
        if path == config.model.path:
            raise
        raise ValueError(f"{name}.path: {error}") from error
