"""Memory of a rank's state in every phase: weights, gradients and optimizer, on the device and on its host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.engines.config import OptimizerConfig
from strop.trainer.plan.parameters import Axes, Count, Share
from strop.trainer.plan.roles import RolePlan
from strop.utils.glibc import largest_in_heap

EIGHT_BIT_BYTES = 2 * (1 + 4 / 256)
"""Of a number in adamw_8bit: two moments in a byte each, and a scale for 256 of them."""

GLOO_THREADS = 2
"""Of a group of ranks; roles with the same axes share one."""


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Memory of one rank in a phase."""

    phase: str
    device: Mapping[str, float]
    """Bytes by purpose."""
    host: Mapping[str, float] = field(default_factory=dict)
    heap_left: float = 0.0
    """Bytes that it leaves free in the heap of a process on a CPU."""

    @property
    def device_bytes(self) -> int:
        """All on the device."""
        return int(sum(self.device.values()))

    @property
    def host_bytes(self) -> int:
        """All on the host."""
        return int(sum(self.host.values()))


@dataclass(frozen=True, kw_only=True)
class Resident:
    """State of a role on a rank between its calls."""

    weights: float
    optimizer: float
    gradients: float
    """While it learns."""

    @property
    def between(self) -> float:
        """Of these, there all the time."""
        return self.weights + self.optimizer


def resident(role: RolePlan, stage: int = 0) -> Resident:
    """Bytes of the state of a rank."""
    share = role.share(stage)
    item = role.form.weights_dtype.itemsize
    return Resident(
        weights=weight_bytes(role, share),
        optimizer=0.0 if role.optim is None else optimizer_bytes(share.held, role.optim, item),
        gradients=share.held.trained * item if role.learns else 0.0,
    )


def weight_bytes(role: RolePlan, share: Share) -> float:
    """Bytes of a rank's weights; those of products that nothing trains are half of that."""
    form, sizes = role.form, role.sizes
    wide, narrow = form.weights_dtype.itemsize, form.compute_dtype.itemsize
    if not form.holds_half:
        return share.held.total * wide
    if form.is_sharded and not role.learns:
        return share.held.total * narrow
    products = sizes.products + (sizes.head.all if form.is_accelerator else Count())
    rounded = products.total - (products.trained if role.learns else 0.0)
    return share.held.total * (wide - (wide - narrow) * rounded / sizes.total)


def optimizer_bytes(count: Count, optim: OptimizerConfig, item: int) -> float:
    """Bytes of an optimizer's state."""
    if optim.name == "adamw_8bit":
        return count.trained * EIGHT_BIT_BYTES
    if optim.name == "muon":
        return (count.matrices + 2 * (count.trained - count.matrices)) * item
    return 2 * count.trained * item


def idle_bytes(role: RolePlan, is_cpu: bool) -> float:
    state = fullest(role)
    if role.engine.offload == "all" and not is_cpu:
        return 0.0
    if role.engine.offload == "optimizer" and not is_cpu:
        return state.weights
    return state.between


def fullest(role: RolePlan) -> Resident:
    """The stage with most state."""
    return max((resident(role, stage) for stage in fullest_stages(role)), key=lambda state: state.between)


def fullest_stages(role: RolePlan) -> Sequence[int]:
    last = role.axes.pipeline - 1
    return sorted({0, last // 2, last})


def state_parts(
    role: RolePlan, stage: int, is_cpu: bool, *, gradients: bool, optimizer: bool = True
) -> dict[str, float]:
    """State that is on the device while a role works."""
    state = resident(role, stage)
    if role.engine.offload == "all" and not is_cpu:
        return {}
    parts = {"weights": state.weights}
    if gradients:
        parts["gradients"] = state.gradients
    if role.learns and (is_cpu or role.engine.offload == "none" or optimizer):
        parts["optimizer"] = state.optimizer
    return parts


def host_parts(role: RolePlan, stage: int, is_cpu: bool, *, gradients: bool) -> dict[str, float]:
    """State that is on the host while a role works."""
    state = resident(role, stage)
    if is_cpu or role.engine.offload == "none":
        return {}
    parts = {"optimizer": state.optimizer}
    if role.engine.offload == "all":
        parts |= {"weights": state.weights, "gradients": state.gradients if gradients else 0.0}
    return parts


def gathered_parts(role: RolePlan, share: Share) -> dict[str, float]:
    """Parameters that sharded ranks gather for a pass, two layers at a time."""
    if not role.form.is_sharded:
        return {}
    item = role.form.compute_dtype.itemsize
    layers = 2 * share.largest_layer.total
    if not role.engine.reshard_after_forward:
        layers = share.gathered.total - share.root.total
    return {"gathered parameters": (layers + share.root.total) * item}


def reduced_parts(role: RolePlan, unit: Count) -> dict[str, float]:
    """Gradients of a layer, or of what is beside the layers, on their way between sharded ranks."""
    item = role.form.compute_dtype.itemsize
    return {"gradients on their way": unit.trained * (item + max(4, item))} if role.form.is_sharded else {}


def gloo_parts(roles: Sequence[RolePlan], is_cpu: bool) -> dict[str, float]:
    """Heaps of the threads in which gloo gathers parameters for ranks on a CPU: each has had the largest tensor that
    does not come from the system, whole and this rank's part of it. Roles with the same axes share their threads."""
    largest: dict[Axes, float] = {}
    in_heap = largest_in_heap(is_recomputed=any(role.form.checkpointing for role in roles))
    for role in roles:
        item, shards = role.form.compute_dtype.itemsize, role.axes.shards
        for share in map(role.share, fullest_stages(role) if shards > 1 else ()):
            units = (share.largest_layer.total * item, share.root.total * item)
            pieces = [unit * (1 + 1 / shards) for unit in units if unit < in_heap]
            largest[role.axes] = max(largest.get(role.axes, 0.0), *pieces, 0.0)
    total = GLOO_THREADS * sum(largest.values())
    return {"copies of gloo": total} if is_cpu and total else {}
