"""FlashAttention over segments of unequal lengths, for half precision on a CUDA device.

One call per layer computes every segment: queries lie end to end as they do in the row, keys of the segments that each
one continues lie before its own. Nothing is padded, no mask is built, and a shape that was not seen before costs
nothing (cuDNN plans each new one for 0.1 to 3 s on an H100).

Source: Dao 2023, arXiv:2307.08691 (FlashAttention-2), by torch.nn.attention.varlen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.engines.segments import Places, Segment
from strop.utils.device import sent

HALF = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
"""Largest head that the kernel has."""
MIN_CAPABILITY = (8, 0)
"""Compute capability of the oldest device that it runs on (Ampere)."""

Kernel = Callable[..., Any]
"""As torch.nn.attention.varlen.varlen_attn."""


@dataclass(frozen=True, kw_only=True)
class VarlenPlan:
    """Offsets of the queries and keys of S segments."""

    query_ends: Tensor
    """[S + 1] int32: ends of the segments' queries, from 0 on."""
    key_ends: Tensor
    """[S + 1] int32: ends of the keys that they see."""
    max_queries: int
    max_keys: int
    key_index: Tensor | None
    """[sum of keys] int64, into keys and values; None: the keys are the queries' own tokens."""

    @property
    def tables(self) -> list[Tensor]:
        """Tensors whose sizes differ from row to row."""
        tables = [self.query_ends, self.key_ends]
        return tables if self.key_index is None else [*tables, self.key_index]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm, kernel: Kernel | None = None
    ) -> Tensor:
        """Attention output [N, H, D] for query [N, H, D], key and value [N', Hkv, D], all of one half precision.

        A query sees the keys of its segment up to its own place, counted from the end.
        """
        if self.key_index is not None:
            heads, dim = key.shape[1:]
            both = torch.cat([key.flatten(1), value.flatten(1)], dim=1)
            gathered = F.embedding(self.key_index, both)  # its backward pass adds in a fixed order
            key, value = (part.view(-1, heads, dim) for part in gathered.chunk(2, dim=1))
        else:
            key, value = key[: len(query)], value[: len(query)]
        out: Tensor = (kernel or flash_attention())(
            query,
            key,
            value,
            self.query_ends,
            self.key_ends,
            self.max_queries,
            self.max_keys,
            scale=form.scaling,
            window_size=(-1 if form.window is None else form.window - 1, 0),
        )
        return out


def varlen_plan(
    segments: Sequence[Segment], device: torch.device, places: Places | None = None
) -> VarlenPlan | None:
    """The plan of segments whose queries lie end to end; None where they do not, or where tokens see later ones.

    Args:
        segments, device, places: as of PackedAttention.
    """
    present = [segment for segment in segments if segment.length > 0]
    ends, key_ends = [0], [0]
    for segment in present:
        start = segment.start if places is None else int(places.queries[segment.start])
        if start != ends[-1] or segment.blocks:
            return None
        ends.append(start + segment.length)
        key_ends.append(key_ends[-1] + segment.num_keys)
    index = None
    if places is not None or any(segment.num_keys > segment.length for segment in present):
        keys = torch.from_numpy(np.concatenate([segment.keys() for segment in present]))
        index = sent(keys if places is None else places.keys[keys], device)
    # Not two rows of one tensor: a compiler would take the place of the second in it for a size of the row.
    query_table, key_table = (
        sent(torch.tensor(table, dtype=torch.int32), device) for table in (ends, key_ends)
    )
    return VarlenPlan(
        query_ends=query_table,
        key_ends=key_table,
        max_queries=max((segment.length for segment in present), default=0),
        max_keys=max((segment.num_keys for segment in present), default=0),
        key_index=index,
    )


def half_of(query: Tensor, value: Tensor, form: AttentionForm) -> torch.dtype | None:
    """Half precision in which the kernel computes such a layer; None where it cannot.

    Queries and keys may be wider than the values, after norms of their own.
    """
    dim = query.shape[2]
    fits = form.is_fused and form.chunk is None and value.shape[2] == dim <= MAX_HEAD_DIM and dim % 8 == 0
    if not fits or not runs_on(value.device):
        return None
    if value.dtype in HALF:
        return value.dtype
    kind = value.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_told_of_shared_heads() -> bool:
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def runs_on(device: torch.device) -> bool:
    """True where the device has the kernel."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def flash_attention() -> Kernel:
    """torch's kernel; later versions want to be told that query heads share key heads."""
    from torch.nn.attention.varlen import varlen_attn

    if not _is_told_of_shared_heads():
        return varlen_attn

    def call(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
        return varlen_attn(query, key, *rest, enable_gqa=query.shape[1] != key.shape[1], **options)

    return call
