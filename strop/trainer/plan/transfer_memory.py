"""Memory of a rank while weights move: a load, a weight sync, a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from strop.rollout.weight_sync.transport_choice import bucket_memory
from strop.trainer.config import Config
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.state_memory import PhaseMemory, fullest, idle_bytes


def load_phase(main: Sequence[RolePlan]) -> PhaseMemory:
    """On a CPU, where device and host are one: the last of the models is whole, the others are sharded by then."""
    last = max(main, key=lambda role: load_host_bytes([role]))
    others = {f"{role.name}: weights": fullest(role).weights for role in main if role is not last}
    return PhaseMemory(phase="load", device={f"{last.name}: whole model": load_host_bytes([last]), **others})


def sync_phase(config: Config, main: Sequence[RolePlan], actor: RolePlan, is_cpu: bool) -> PhaseMemory:
    """New weights on their way to engines with weights of their own: from shards, where nothing is gathered, or merged
    with an adapter one after the other."""
    device, host = bucket_parts(config, actor, is_cpu)
    state = {f"{role.name}: idle": idle_bytes(role, is_cpu) for role in main}
    merged = {}
    if actor.form.lora.enabled:
        largest = max(part.all.total for part in actor.sizes.tensors)
        merged = {"one merged weight, whole": largest * actor.form.weights_dtype.itemsize}
    return PhaseMemory(phase="weight sync", device={**state, **device, **merged}, host=host)


def bucket_parts(config: Config, actor: RolePlan, is_cpu: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Buckets of a weight sync on the device and on the host of either side, which on a CPU are one."""
    resources = config.resources
    most = bucket_memory("cpu" if is_cpu else "cuda", store=resources.weight_store, num_nodes=resources.nodes)
    model = 2 * actor.sizes.total * actor.form.compute_dtype.itemsize

    def part(size: int) -> dict[str, float]:
        return {"buckets": float(min(size, model))} if size else {}

    return (part(most.host), {}) if is_cpu else (part(most.device), part(most.host))


def checkpoint_phases(
    config: Config, learners: Sequence[RolePlan], main: Sequence[RolePlan], is_cpu: bool
) -> list[PhaseMemory]:
    """The state is written from the device, or from a copy on the host; rank 0 gathers the policy for its folder."""
    state = {f"{role.name}: idle": idle_bytes(role, is_cpu) for role in main}
    copies = sum(fullest(role).between for role in learners) if config.run.async_save else 0.0
    whole = 0.0
    if config.run.hf_model != "never" and learners and learners[0].form.is_sharded:
        whole = learners[0].sizes.total * learners[0].form.weights_dtype.itemsize
    parts = {"copy that is written": copies, "whole model on rank 0": whole}
    parts = {name: size for name, size in parts.items() if size}
    if is_cpu:
        return [PhaseMemory(phase="checkpoint", device={**state, **parts})]
    return [PhaseMemory(phase="checkpoint", device=state, host=parts)]


def load_host_bytes(roles: Sequence[RolePlan]) -> float:
    """Host memory of a process while it loads: a model for several ranks is whole in each until it is sharded."""
    return max(map(_read_bytes, roles))


def _read_bytes(role: RolePlan) -> float:
    """Of a model that is read from its folder: whole in the precision of its weights; but linear layers that the folder
    has as they are held are pages of its file, and the others are there and in the file (engines/half_weights.py)."""
    sizes, wide, narrow = role.sizes, role.form.weights_dtype.itemsize, role.form.compute_dtype.itemsize
    if not role.form.holds_half or getattr(role.shape.config, "dtype", None) != role.form.compute_dtype:
        return sizes.total * wide
    return sizes.products.total * narrow + (sizes.total - sizes.products.total) * (wide + narrow)
