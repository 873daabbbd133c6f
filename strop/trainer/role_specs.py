"""Roles of a run: the worker class of each, its settings and its parallel axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strop.controller import Mesh, RoleSpec, role
from strop.engines.config import EngineConfig
from strop.rollout.vllm.follower import VllmFollower
from strop.trainer.config import Config, UpdateSettings
from strop.workers.actor import ActorWorker
from strop.workers.async_rollout.worker import AsyncRolloutWorker
from strop.workers.critic import CriticWorker
from strop.workers.models import TrainingInit
from strop.workers.prm import PrmWorker
from strop.workers.reference import ReferenceWorker
from strop.workers.reward_model import RewardModelWorker
from strop.workers.rollout import RolloutSettings, RolloutWorker
from strop.workers.teacher import TeacherWorker


def role_specs(
    config: Config,
    settings: RolloutSettings,
    *,
    num_steps: int,
    checkpoint: Path | None = None,
    optimizer: Path | None = None,
) -> Mapping[str, RoleSpec[Any]]:
    """All roles, in the order in which those of one process are made; arguments as of `make_worker_groups`."""
    device, model = settings.device, config.model

    def learning(section: UpdateSettings) -> TrainingInit:
        return TrainingInit(
            device=device,
            num_updates=config.updates_of_run(section, num_steps),
            checkpoint=checkpoint,
            optimizer=optimizer,
        )

    specs: dict[str, RoleSpec[Any]] = {
        "actor": role(ActorWorker, model, config.actor, config.algorithm, learning(config.actor))
    }
    if "critic" in config.roles:
        specs["critic"] = role(CriticWorker, model, config.critic, config.algorithm, learning(config.critic))
    if "teacher" in config.roles:
        distillation = config.algorithm.distillation
        specs["teacher"] = role(TeacherWorker, model, config.teacher, distillation, device=device)
    if "prm" in config.roles:  # it takes over no optimizer of another run
        own_start = dataclasses.replace(learning(config.prm), optimizer=None)
        specs["prm"] = role(PrmWorker, model, config.prm, own_start)
    if "reward_model" in config.roles:
        specs["reward_model"] = role(RewardModelWorker, config.reward_model, device=device)
    if "reference" in config.roles:
        specs["reference"] = role(ReferenceWorker, model, config.reference, device=device)
    rollout = AsyncRolloutWorker if config.async_setting else RolloutWorker
    specs["rollout"] = role(rollout, model, config.rollout, config.reward, settings)
    if config.rollout.spans_nodes:
        specs["rollout"] = specs["rollout"].followed_by(role(VllmFollower, config.rollout.vllm))
    engines = config.engines
    return {name: spec.on(role_mesh(config, name, engines.get(name))) for name, spec in specs.items()}


def role_mesh(config: Config, name: str, engine: EngineConfig | None) -> Mesh:
    """The parallel axes of a role; one without this engine has data-parallel ranks alone."""
    engine = engine or EngineConfig()
    tp, sp = engine.tensor_parallel, engine.sequence_parallel
    cp, pp = engine.context_parallel, engine.pipeline_parallel
    return Mesh(dp=config.resources.ranks_of(name) // (tp * sp * cp * pp), tp=tp, sp=sp, cp=cp, pp=pp)
