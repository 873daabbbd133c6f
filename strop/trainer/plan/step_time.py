"""Seconds of the stages of a step, by the work of passes and the speed of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.algorithms.specs import policy_loss_declaration
from strop.trainer.config import Config
from strop.trainer.plan.changes import with_values
from strop.trainer.plan.devices import Device
from strop.trainer.plan.generation_memory import running_at_once
from strop.trainer.plan.generation_time import GenerationTime, apart_devices, devices_of, generation_time
from strop.trainer.plan.pass_time import pass_seconds
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.state_memory import PhaseMemory
from strop.trainer.role_columns import columns_before_updates


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of the stages of a step."""

    stages: Mapping[str, float]
    step: float
    idle_share: float
    """Of all devices, over the step: waiting for the longest answer, for other ranks, or for the other pool."""


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """Passes and updates of the roles of a step."""

    stages: Mapping[str, float]
    sent: float
    """Of these, waiting for other ranks."""


def step_time(
    config: Config, roles: Sequence[RolePlan], device: Device, phases: Sequence[PhaseMemory]
) -> StepTime:
    """Seconds of a step.

    Args:
        config: of the run.
        roles: with a model, the policy first.
        device: of every rank.
        phases: memory of a rank.
    """
    running = config.rollout.max_running if device.is_cpu else running_at_once(config, roles[0], phases)
    generation = generation_time(with_running(config, running), roles[0], device)
    return joined(config, roles[0], device, generation, training_time(config, roles, device))


def with_running(config: Config, running: int) -> Config:
    """The run with so many sequences at a time."""
    if running == config.rollout.max_running:
        return config
    return with_values(config, {"rollout.max_running": running})


def training_time(config: Config, roles: Sequence[RolePlan], device: Device) -> TrainingTime:
    """Of a step; the first arguments of `step_time`."""
    stages = dict[str, float]()
    made = columns_before_updates(config, config.samples_per_step)
    passes_before = _passes_before_gradients(config)
    sent = 0.0
    for role in roles:
        seconds = pass_seconds(role, device)
        forward = seconds.forward * role.updates * role.num_samples / role.num_trained
        if role.name == "actor":
            if "old_log_probs" in made:
                stages["old_log_prob"] = forward
            if "ref_log_prob" in made and "reference" not in config.roles:
                stages["ref"] = forward
            of_update = seconds.update + seconds.forward * passes_before
            stages["update_actor"] = of_update * role.updates * role.epochs
        else:
            name = {"reference": "ref", "critic": "values"}.get(role.name, role.name)
            stages[name] = forward
            if role.learns:
                stages[f"update_{role.name}"] = seconds.update * role.updates * role.epochs
        sent += seconds.sent * role.updates * role.epochs
    return TrainingTime(stages=stages, sent=sent)


def _passes_before_gradients(config: Config) -> int:
    """Passes over all tokens of an update of the policy before its first gradient: for what its loss selects tokens by
    (clip_cov, kl_cov), and for the experts that they choose."""
    selects = bool(policy_loss_declaration(config.algorithm.policy_loss).prepared)
    return selects + (config.actor.moe.balance_loss_coef > 0)


def joined(
    config: Config, actor: RolePlan, device: Device, generation: GenerationTime, training: TrainingTime
) -> StepTime:
    """A step of its two parts, and the weights that go from one to the other."""
    apart, main = apart_devices(config), actor.axes.world
    gen, sync = generation.seconds, 0.0
    stages = {"gen": gen, **training.stages}
    if apart or config.rollout.own_processes is not None:
        wire = device.network if main + apart > device.per_node else device.link
        senders = max(1, main // device.per_node)
        sync = actor.sizes.total * actor.form.compute_dtype.itemsize / wire / senders
        stages["update_weights"] = sync
    trains = sum(training.stages.values())
    is_ahead = apart and config.rollout.max_staleness > 0
    step = (max(gen, trains) if is_ahead else gen + trains) + sync
    worked = gen * generation.busy * (apart or main) + (trains - training.sent) * main
    total = step * (apart + main)
    return StepTime(stages=stages, step=step, idle_share=max(0.0, 1 - worked / total) if total else 0.0)


def all_devices(config: Config) -> int:
    """Devices of all pools."""
    return config.resources.ranks + sum(devices_of(config, role) for role in config.resources.apart)
