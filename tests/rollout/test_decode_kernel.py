"""The Triton kernel of a decode step in Triton's interpreter, against plain attention: `make triton`."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.rollout.native import decode_kernel
from strop.utils.triton import triton

pytestmark = pytest.mark.skipif(
    triton is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1: make triton",
)
PAGE, SLOTS = 32, 6
LENGTHS = [0, 130, 31, 32, 67]


def pages_of(generator: torch.Generator) -> Tensor:
    """A table [slots, 5] of different pages in no order."""
    return (1 + torch.randperm(SLOTS * 5, generator=generator)).view(SLOTS, 5).int()


def plain(
    query: Tensor, keys: Tensor, values: Tensor, lengths: list[int], scaling: float, window: int | None
) -> Tensor:
    """Softmax in float64 over keys [B, Hkv, T, D] of which the query's own is at `lengths`."""
    out = torch.empty(query.shape, dtype=torch.float64)
    group = query.shape[1] // keys.shape[1]
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length + 1 - window)
        for head in range(query.shape[1]):
            seen = (row, head // group, slice(first, length + 1))
            scores = keys[seen].double() @ query[row, head].double() * scaling
            out[row, head] = torch.softmax(scores, 0) @ values[seen].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 5, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (6, 1, 32), (2, 2, 64), (2, 1, 256)])
@pytest.mark.parametrize("splits", [1, 4, 16])
def test_the_kernel_reads_and_writes_the_pages_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
    splits: int,
) -> None:
    monkeypatch.setattr(decode_kernel, "num_splits", lambda count: splits)
    generator = torch.Generator().manual_seed(dim)
    b = len(LENGTHS)
    table, lengths = pages_of(generator), torch.tensor(LENGTHS)
    pool = torch.randn(2, 1 + SLOTS * 5, kv_heads, PAGE, dim, generator=generator).to(dtype)
    query, key, value = (
        torch.randn(b, count, dim, generator=generator).to(dtype) for count in (heads, kv_heads, kv_heads)
    )
    wanted = pool.clone()
    for new, part in zip((key, value), wanted, strict=True):
        for row, length in enumerate(LENGTHS):
            part[table[row, length // PAGE], :, length % PAGE] = new[row]
    keys, values = wanted[:, table[:b]].transpose(2, 3).flatten(3, 4)
    form = AttentionForm(scaling=0.3, window=window)
    out = decode_kernel.attend(query, key, value, pool[0], pool[1], table, lengths, form)
    tolerance = (
        1e-5 if dtype == torch.float32 else 5e-3
    )  # bfloat16 is no number of the interpreter's products
    torch.testing.assert_close(
        out.double(), plain(query, keys, values, LENGTHS, 0.3, window), atol=tolerance, rtol=tolerance
    )
    assert torch.equal(pool, wanted), "the new tokens and nothing else entered the pages"
