"""Memory of a rank in each phase of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from strop.trainer.config import Config
from strop.trainer.plan.generation_memory import apart_phase, freed_copies, rollout_phase
from strop.trainer.plan.pass_memory import forward_phase, optimizer_phase, update_phase
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.state_memory import PhaseMemory, gloo_parts, idle_bytes
from strop.trainer.plan.transfer_memory import checkpoint_phases, load_phase, sync_phase
from strop.trainer.role_columns import columns_before_updates


def phases_of(config: Config, roles: Sequence[RolePlan], *, device_bytes: float | None) -> list[PhaseMemory]:
    """The phases of the ranks of the main pool, where the actor is, and of pools apart.

    Args:
        config: of the run.
        roles: with a model, the policy first.
        device_bytes: memory of an accelerator; None of a CPU, where device and host are one.
    """
    phases = training_phases(config, roles, device_bytes=device_bytes)
    if not generates_here(config):
        phases.append(apart_phase(config, roles[0], device_bytes))
    return phases


def generates_here(config: Config) -> bool:
    """The ranks of the actor generate."""
    return "rollout" not in config.resources.apart


def training_phases(
    config: Config, roles: Sequence[RolePlan], *, device_bytes: float | None
) -> list[PhaseMemory]:
    """As `phases_of`, without those of ranks that only generate."""
    main = [role for role in roles if role.held_by not in config.resources.apart]
    actor = roles[0]
    is_cpu = device_bytes is None
    phases: list[PhaseMemory] = []
    freed = (
        freed_copies(actor)
        if is_cpu and generates_here(config) and config.rollout.own_processes is None
        else 0.0
    )
    for working in main:
        others = _others(config, main, working, is_cpu)
        if _forwards(config, working):
            phases.append(forward_phase(working, others, is_cpu))
        if working.learns:
            updating = update_phase(working, others, is_cpu, freed_bytes=freed)
            phases += [updating, optimizer_phase(working, others, is_cpu)]
    if generates_here(config):
        heap_left = max(phase.heap_left for phase in phases)  # by the step before
        others = _others(config, main, None, is_cpu)
        phases.insert(0, rollout_phase(config, actor, others, device_bytes, heap_left=heap_left))
    phases += checkpoint_phases(config, [role for role in main if role.learns], main, is_cpu)
    if not generates_here(config) or config.rollout.own_processes:
        phases.append(sync_phase(config, main, actor, is_cpu))
    phases = [_with_gloo(phase, main, is_cpu) for phase in phases]
    if is_cpu:  # before ranks have gathered anything
        phases.insert(0, load_phase(main))
    for role in roles:
        if role not in main:
            held = [other for other in roles if other.held_by == role.held_by]
            others = _others(config, held, role, is_cpu)
            apart = [forward_phase(role, others, is_cpu)]
            if role.learns:
                apart += [update_phase(role, others, is_cpu), optimizer_phase(role, others, is_cpu)]
            apart = [_with_gloo(phase, held, is_cpu) for phase in apart]
            phases += [dataclasses.replace(phase, phase=f"{phase.phase} (apart)") for phase in apart]
    return phases


def _with_gloo(phase: PhaseMemory, roles: Sequence[RolePlan], is_cpu: bool) -> PhaseMemory:
    """A phase of the ranks of these roles, with what gloo has taken by then."""
    return dataclasses.replace(phase, device={**phase.device, **gloo_parts(roles, is_cpu)})


def least_bytes(config: Config, roles: Sequence[RolePlan], *, device_bytes: float | None) -> float:
    """Most of the phases whose memory is state alone: found without a trace, so that what is far too large costs no
    time."""
    main = [role for role in roles if role.held_by not in config.resources.apart]
    is_cpu = device_bytes is None
    states = [
        optimizer_phase(role, _others(config, main, role, is_cpu), is_cpu) for role in main if role.learns
    ]
    return max(phase.device_bytes for phase in states)


def _others(
    config: Config, main: Sequence[RolePlan], working: RolePlan | None, is_cpu: bool
) -> dict[str, float]:
    """Roles that are idle beside one that works."""
    return {
        f"{role.name}: idle": 0.0
        if config.resources.offload_idle and not is_cpu
        else idle_bytes(role, is_cpu)
        for role in main
        if role is not working
    }


def _forwards(config: Config, role: RolePlan) -> bool:
    if role.name != "actor":
        return True
    made = columns_before_updates(config, config.samples_per_step)
    return "old_log_probs" in made or ("ref_log_prob" in made and "reference" not in config.roles)
