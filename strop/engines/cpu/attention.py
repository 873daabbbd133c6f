"""Attention of packed segments in C: keys are read where they lie, nothing is padded or moved, and no mask is made.

In place of the buckets of attention.py, for float32 and bfloat16 on a CPU; in bfloat16 scores, weights and sums are
float32. Forward, parts of segments are shared out over threads; backward, trees of segments that share keys, since
those add to the gradient of the same keys: one tree keeps as many threads busy as there are key heads. Whether it is
taken never follows from the number of segments or threads: the last digits of a token would follow from them too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.engines.attention_form import AttentionForm
from strop.engines.cpu.library import library_for, update_library
from strop.engines.segments import Segment, Span

TASK_QUERIES = 256
"""Of a segment that a thread takes at a time, forward."""
KEY_BLOCK = 256
"""Keys whose sums are made together (KEYS of update.c), from the beginning of each run on: where a run ends in a
multiple of it, sums are those of a sequence in one piece."""
MAX_GROUP_LANES = 4
"""Query heads of a key head, in vectors: so many rows has a block of scores (update.c)."""
_OUTSIDE, _LATER = -1, -2
"""Places of no segment, and of a segment that has not been looked at."""


class _Layer(ctypes.Structure):
    """`struct layer` of update.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "query", "key", "value", "out", "grad", "result", "normalizers", "grad_query", "grad_key", "grad_value",
        )),
        *((name, ctypes.c_int64 * 2) for name in ("query_steps", "key_steps", "value_steps", "grad_steps")),
        *((name, ctypes.c_int64) for name in ("key_heads", "group", "dim", "value_dim", "window")),
        ("scaling", ctypes.c_float),
    )  # fmt: skip


@dataclass(frozen=True)
class CpuPlan:
    """Tables of a packed row, as update.c reads them."""

    segments: NDArray[np.int64]
    """[S, 5]: start, length, tokens before, first span, spans; those of a tree one after another."""
    spans: NDArray[np.int64]
    """[K, 2]: first and end of the runs that segments continue."""
    tasks: NDArray[np.int64]
    """[T, 3]: segment, first query, end."""
    trees: NDArray[np.int64]
    """[R, 2]: first segment and end."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor | None:
        """Attention output [N, H, Dv] for query [N, H, D], key [N, Hkv, D] and value [N, Hkv, Dv]; None where the
        compiled functions are not for them."""
        if torch.is_autocast_enabled("cpu"):
            half = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(half), key.to(half), value.to(half)
        library = library_for(query, key, value)
        if library is None or not form.is_fused or form.chunk is not None:
            return None
        lanes, kv_heads = library.lanes(), key.shape[1]
        is_whole = not query.shape[2] % lanes and not value.shape[2] % lanes
        fits = is_whole and query.shape[1] // kv_heads <= MAX_GROUP_LANES * lanes
        if not fits:
            return None
        output: Tensor = _Attend.apply(query, key, value, self, form.scaling, form.window or 0)  # type: ignore[no-untyped-call]
        return output


def cpu_plan(segments: Sequence[Segment]) -> CpuPlan | None:
    """The plan of segments; None without a compiler, or where one has tokens that see later ones, or keys of several
    trees: then all of them go into buckets."""
    if update_library() is None or any(segment.blocks for segment in segments):
        return None
    segments = [segment for segment in segments if segment.length > 0]
    trees = _trees(segments)
    if trees is None:
        return None
    ordered = [segment for tree in trees for segment in tree]
    rows: list[tuple[int, ...]] = []
    spans: list[Span] = []
    tasks: list[tuple[int, int, int]] = []
    for number, segment in enumerate(ordered):
        before = segment.num_keys - segment.length
        rows.append((segment.start, segment.length, before, len(spans), len(_runs(segment))))
        spans += _runs(segment)
        starts = range(0, segment.length, TASK_QUERIES)
        tasks += [(number, start, min(start + TASK_QUERIES, segment.length)) for start in starts]
    ends = np.cumsum([0, *map(len, trees)])
    return CpuPlan(
        segments=np.array(rows, dtype=np.int64).reshape(-1, 5),
        spans=np.array(spans, dtype=np.int64).reshape(-1, 2),
        tasks=np.array(tasks, dtype=np.int64).reshape(-1, 3),
        trees=np.stack([ends[:-1], ends[1:]], axis=1).astype(np.int64),
    )


def _trees(segments: Sequence[Segment]) -> list[list[Segment]] | None:
    """Segments that share keys with each other alone; None where one continues another that stands behind it.

    Keys may also lie behind all segments, as those of tokens do that a prefill has computed before.
    """
    own = [(segment.start, segment.start + segment.length) for segment in segments]
    size = max((end for segment in segments for _, end in _runs(segment)), default=0)
    tree_of_place = np.full(max([size, *(end for _, end in own)]), _OUTSIDE)
    for start, end in own:
        tree_of_place[start:end] = _LATER
    trees: list[list[Segment]] = []
    for segment, (first, last) in zip(segments, own, strict=True):
        runs = _runs(segment)
        before = {int(tree_of_place[place]) for start, end in runs for place in (start, end - 1)} - {_OUTSIDE}
        if len(before) > 1 or _LATER in before:
            return None
        number = before.pop() if before else len(trees)
        if number == len(trees):
            trees.append([])
        trees[number].append(segment)
        for start, end in (*runs, (first, last)):
            tree_of_place[start:end] = number
    return trees


def _runs(segment: Segment) -> list[Span]:
    """Runs of the row that a segment continues."""
    return [(start, end) for start, end in segment.prefix if end > start]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: CpuPlan, scaling: float, window: int
    ) -> Tensor:
        query, key, value = (_in_rows(tensor) for tensor in (query, key, value))
        out = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype)
        normalizers = torch.empty(query.shape[:2])
        layer = _layer(query, key, value, scaling, window)
        layer.result, layer.normalizers = out.data_ptr(), normalizers.data_ptr()
        _run("attend", query.dtype, layer, plan, plan.tasks)
        ctx.save_for_backward(query, key, value, out, normalizers)
        ctx.plan, ctx.form = plan, (scaling, window)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, normalizers = ctx.saved_tensors
        grad = _in_rows(grads[0])
        grad_query = torch.empty(query.shape, dtype=query.dtype)
        grad_key, grad_value = torch.zeros(key.shape), torch.zeros(value.shape)
        layer = _layer(query, key, value, *ctx.form)
        layer.out, layer.normalizers, layer.grad = out.data_ptr(), normalizers.data_ptr(), grad.data_ptr()
        layer.grad_query, layer.grad_key = grad_query.data_ptr(), grad_key.data_ptr()
        layer.grad_value, layer.grad_steps = grad_value.data_ptr(), _steps(grad)
        _run("attend_back", query.dtype, layer, ctx.plan, ctx.plan.trees)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, None


def _run(name: str, dtype: torch.dtype, layer: _Layer, plan: CpuPlan, work: NDArray[np.int64]) -> None:
    tables = (plan.segments, plan.spans, work)
    function = getattr(update_library(dtype), name)
    addresses = [table.ctypes.data for table in tables]
    if function(ctypes.byref(layer), *addresses, len(work), torch.get_num_threads()):
        raise MemoryError("no memory for a block of attention scores")


def _layer(query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int) -> _Layer:
    kv_heads = key.shape[1]
    return _Layer(
        query=query.data_ptr(), key=key.data_ptr(), value=value.data_ptr(),
        query_steps=_steps(query), key_steps=_steps(key), value_steps=_steps(value),
        key_heads=kv_heads, group=query.shape[1] // kv_heads, dim=query.shape[2], value_dim=value.shape[2],
        window=window, scaling=scaling,
    )  # fmt: skip


def _steps(tensor: Tensor) -> ctypes.Array[ctypes.c_int64]:
    """From token to token and from head to head."""
    return (ctypes.c_int64 * 2)(tensor.stride(0), tensor.stride(1))


def _in_rows(tensor: Tensor) -> Tensor:
    """With the numbers of a head one after another."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
