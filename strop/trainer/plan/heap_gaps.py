"""Gaps in the heap of a process on a CPU that one step leaves to the next: a tensor does not fit into the place of
another of its size between others (heap.py). Those of a pass itself are found by its trace (passes.py)."""

from __future__ import annotations

from collections.abc import Sequence

from strop.trainer.plan.parameters import Part, computed_count, held_count
from strop.trainer.plan.roles import RolePlan
from strop.trainer.plan.state_memory import resident
from strop.utils.glibc import largest_in_heap


def gradient_gaps(role: RolePlan, stage: int) -> float:
    """Bytes of the gradients of an update in the heap, which those of the next one do not fit into: the neighbours of
    the places that they leave are moments of the optimizer."""
    item = role.form.weights_dtype.itemsize
    if role.form.is_sharded:  # FSDP2 reduces gradients of a unit into one tensor, and shards are views of it
        counts = [held_count(unit, role.axes, role.engine) for unit in _units(role)]
    else:
        counts = [tensor.all for tensor in role.sizes.tensors]
    return resident(role, stage).gradients * _share_in_heap(role, [item * count.trained for count in counts])


def gathered_gaps(role: RolePlan, num_bytes: float) -> float:
    """Bytes in the heap of parameters that sharded ranks gather for generation: each is a tensor.

    Args:
        role: the policy.
        num_bytes: of all that a rank gathers.
    """
    item = role.form.compute_dtype.itemsize
    counts = [computed_count(tensor, role.axes) for tensor in role.sizes.tensors]
    return num_bytes * _share_in_heap(role, [item * count.total for count in counts])


def _units(role: RolePlan) -> list[Part]:
    """Parameters whose gradients are reduced together (engines/parallel/fsdp.py)."""
    sizes = role.sizes
    units = [*sizes.layers, sizes.embedding + sizes.head + sizes.rest]
    if role.axes.experts == role.axes.tensor == 1:
        return units
    return [part for unit in units for part in (Part(unit.cut, unit.whole), Part(experts=unit.experts))]


def _share_in_heap(role: RolePlan, pieces: Sequence[float]) -> float:
    """Of the bytes of these tensors of a role that learns."""
    largest = largest_in_heap(is_recomputed=role.form.checkpointing)
    return sum(piece for piece in pieces if piece < largest) / max(1.0, sum(pieces))
