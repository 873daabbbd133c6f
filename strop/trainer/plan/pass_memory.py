"""Memory of a rank in the passes of a role: forward, update, and the step of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from strop.engines.head import DEVICE_CHUNK_ELEMENTS
from strop.trainer.plan.heap_gaps import gradient_gaps
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.state_memory import (
    PhaseMemory,
    fullest_stages,
    gathered_parts,
    host_parts,
    reduced_parts,
    resident,
    state_parts,
)

HEAP_GAPS = 0.08
"""Share of activations by which the heap of a process on a CPU is larger: freed pieces that nothing fits into
(benchmarks/RESULTS.md)."""


def forward_phase(role: RolePlan, others: Mapping[str, float], is_cpu: bool) -> PhaseMemory:
    """A pass without gradient."""
    worst = None
    for stage in fullest_stages(role):
        share = role.share(stage)
        parts = {
            **state_parts(role, stage, is_cpu, gradients=False),
            **gathered_parts(role, share),
            "activations": role.forward_bytes / role.axes.tensor,
            **others,
        }
        phase = PhaseMemory(
            phase=f"{role.name}: {'values' if role.form.has_value_head else 'log-probs'}",
            device=parts,
            host=host_parts(role, stage, is_cpu, gradients=False),
        )
        worst = phase if worst is None or phase.device_bytes > worst.device_bytes else worst
    assert worst is not None, "there is a stage"
    return worst


def update_phase(
    role: RolePlan, others: Mapping[str, float], is_cpu: bool, *, freed_bytes: float = 0.0
) -> PhaseMemory:
    """Forward and backward passes of an optimizer step, at their most, on the stage with most.

    Args:
        role: that learns.
        others: memory of the roles beside it.
        is_cpu: its device.
        freed_bytes: of the heap of a CPU, that generation has given back.
    """
    phases = [_update_of_stage(role, stage, others, is_cpu, freed_bytes) for stage in fullest_stages(role)]
    return max(phases, key=lambda phase: phase.device_bytes)


def _update_of_stage(
    role: RolePlan, stage: int, others: Mapping[str, float], is_cpu: bool, freed_bytes: float
) -> PhaseMemory:
    share, axes, passes = role.share(stage), role.axes, role.passes
    num_batches = len(role.longest)
    in_flight = min(num_batches, axes.pipeline - stage)
    kinds = [passes.kinds[i] for i in share.layers]
    saved = float(sum(passes.layers[kind].saved_bytes for kind in kinds) * in_flight)
    saved += passes.saved_base_bytes * (in_flight if stage == 0 else 1)
    on_host = 0.0
    if not is_cpu and role.engine.offload_activations:
        saved, on_host = saved / max(1, len(kinds)), saved
    top = passes.top_bytes / axes.tensor
    if axes.tensor > 1 and not is_cpu and not role.form.has_value_head:
        # A rank has its share of the vocabulary, and so many more rows in a chunk: logits, and half as much gradient.
        logits = role.largest_batch.num_predicted * role.sizes.vocab / axes.tensor
        top = max(top, 1.5 * 4 * min(DEVICE_CHUNK_ELEMENTS, logits))
    tail: float = passes.tail_bytes
    if num_batches == 1 and not role.form.is_sharded:
        # What is added up to becomes the gradient, which is counted.
        tail -= min(tail, role.sizes.embedding.all.trained * role.form.weights_dtype.itemsize)
    tail /= axes.tensor
    state = state_parts(role, stage, is_cpu, gradients=False)
    moves = not is_cpu and role.engine.offload == "optimizer"
    if moves:
        state.pop("optimizer", None)  # on the host until the step
    gradients = resident(role, stage).gradients
    if role.form.is_sharded and num_batches > 1 and role.engine.gradient_sync == "last":
        gradients = share.gathered.trained * max(4, role.form.compute_dtype.itemsize)
    if role.engine.offload == "all" and not is_cpu:
        gradients = 0.0
    # Gradients take the place of activations, layer by layer, and what is beside the layers has its own at the end.
    during = {
        "activations": saved / axes.tensor,
        "head and one layer": top,
        **reduced_parts(role, share.largest_layer),
        **({"gradients": gradients} if num_batches > 1 else {}),
    }
    behind = {
        "gradients": gradients,
        "embedding's gradient": tail,
        **reduced_parts(role, share.root),
    }
    fuller = max((during, behind), key=lambda parts: sum(parts.values()))
    device = {**state, **fuller, **gathered_parts(role, share), **others}
    heap_left = 0.0
    if is_cpu:
        in_heap = passes.heap_share * (saved / axes.tensor + top)
        of_gradients = gradient_gaps(role, stage) + HEAP_GAPS * in_heap
        # Holes of the step before are filled by what a pass leaves between.
        gaps = max(of_gradients, passes.gap_bytes(kinds) / axes.tensor) + freed_bytes
        device["gaps of the heap"] = gaps
        heap_left = gaps + in_heap
    host = host_parts(role, stage, is_cpu, gradients=True)
    if on_host:
        host["activations"] = on_host / axes.tensor
    return PhaseMemory(phase=f"{role.name}: update", device=device, host=host, heap_left=heap_left)


def optimizer_phase(role: RolePlan, others: Mapping[str, float], is_cpu: bool) -> PhaseMemory:
    """All of the state, and nothing else."""
    stage = max(fullest_stages(role), key=lambda stage: resident(role, stage).between)
    return PhaseMemory(
        phase=f"{role.name}: optimizer step",
        device={**state_parts(role, stage, is_cpu, gradients=True), **others},
        host=host_parts(role, stage, is_cpu, gradients=True),
    )
