"""One token per sequence over its own slot: the compiled function and that of torch, against plain attention."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from strop.engines.attention_form import AttentionForm
from strop.rollout.native.cache import DecodeAttention, SlotCache
from strop.rollout.native.cpu import kernel
from strop.utils import c_library

LENGTHS = [0, 1, 7, 30, 15, 16, 17]
KV_HEADS = 2
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="the function is compiled by gcc")


def filled(dim: int, dtype: torch.dtype) -> SlotCache:
    """A cache of 2 layers with other numbers in every place, also behind the ends of the sequences."""
    slots = SlotCache(len(LENGTHS))
    generator = torch.Generator().manual_seed(0)
    for slot in range(len(LENGTHS)):
        slots.write([slot], torch.randn(2, 2, KV_HEADS, 40, dim, generator=generator).to(dtype))
    return slots


def plain(slots: SlotCache, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Softmax over the tokens that each query sees, one at a time, in float64."""
    out = torch.empty(query.shape, dtype=torch.float64)
    keys, values = (part.double() for part in slots.layer(1, len(LENGTHS), 40))
    group = query.shape[1] // KV_HEADS
    for row, length in enumerate(LENGTHS):
        first = 0 if window is None else max(0, length + 1 - window)
        for head in range(query.shape[1]):
            at = head // group
            seen = torch.cat(
                [keys[row, at, :length], key[row, at].to(slots.layer(1, 1, 1)[0].dtype).double()[None]]
            )
            given = torch.cat(
                [values[row, at, :length], value[row, at].to(slots.layer(1, 1, 1)[0].dtype).double()[None]]
            )
            asked = query[row, head].to(slots.layer(1, 1, 1)[0].dtype)  # as the precision of the cache has it
            weights = torch.softmax(seen[first:] @ asked.double() * 0.3, 0)
            out[row, head] = weights @ given[first:]
    return out


def inputs(dim: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as models give them: views with tokens behind heads."""
    generator = torch.Generator().manual_seed(1)
    shapes = (KV_HEADS * group, KV_HEADS, KV_HEADS)
    made = (torch.randn(heads, len(LENGTHS), dim, generator=generator).transpose(0, 1) for heads in shapes)
    query, key, value = made
    return query, key, value


@needs_gcc
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5)])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("dim", "group"), [pytest.param(8, 1, marks=pytest.mark.slow), (32, 2), (20, 3)])
def test_the_compiled_function_is_attention(
    dtype: torch.dtype, tolerance: float, window: int | None, dim: int, group: int
) -> None:
    slots = filled(dim, dtype)
    query, key, value = inputs(dim, group)
    wanted = plain(slots, query, key, value, window)
    before = [part.clone() for part in slots.layer(1, len(LENGTHS), 40)]
    attention = DecodeAttention(slots, torch.tensor(LENGTHS), num_tokens=32)
    assert kernel.decode_kernel(query, slots.layer(1, len(LENGTHS), 32)[0]) is not None
    out = attention.attend(1, query, key, value, AttentionForm(scaling=0.3, window=window))
    assert float((out.double() - wanted).abs().max()) < tolerance
    for after, then, new in zip(slots.layer(1, len(LENGTHS), 40), before, (key, value), strict=True):
        for row, length in enumerate(LENGTHS):
            then[row, :, length] = new[row].to(dtype)
        assert torch.equal(after, then), "the new token and nothing else entered the cache"


@needs_gcc
@pytest.mark.parametrize("window", [None, 5])
def test_without_it_the_result_is_the_same_but_for_rounding(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    query, key, value = inputs(16, 2)
    outs = []
    for has_kernel in (True, False):
        if not has_kernel:
            monkeypatch.setattr(kernel, "attend", lambda *_: None)
        attention = DecodeAttention(filled(16, torch.float32), torch.tensor(LENGTHS), num_tokens=32)
        outs.append(attention.attend(1, query, key, value, AttentionForm(scaling=0.3, window=window)))
    assert float((outs[0] - outs[1]).abs().max()) < 1e-5


@needs_gcc
def test_a_value_that_is_no_number_stays_none() -> None:
    query, key, value = inputs(32, 2)
    for one in (query, key, value):
        broken = [part.clone() for part in (query, key, value)]
        at = next(n for n, part in enumerate((query, key, value)) if part is one)
        broken[at][3] = float("nan")
        for dtype in (torch.float32, torch.bfloat16):
            attention = DecodeAttention(filled(32, dtype), torch.tensor(LENGTHS), num_tokens=32)
            out = attention.attend(1, *broken, AttentionForm(scaling=0.3))
            assert bool(out[3].isnan().all())
            assert not bool(out[[0, 1, 2, 4, 5, 6]].isnan().any())


def test_precisions_and_devices_without_it_are_told() -> None:
    query, keys = torch.zeros(1, 2, 8), torch.zeros(1, 2, 4, 8)
    assert kernel.decode_kernel(query.double(), keys.double()) is None
    assert kernel.decode_kernel(query.to("meta"), keys.to("meta")) is None


@needs_gcc
def test_compiled_code_that_others_can_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = c_library.cache_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="can be changed by others"):
        c_library.cache_folder()


@needs_gcc
def test_where_it_cannot_be_compiled_torch_attends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel, "FLAGS", (*kernel.FLAGS, "--no-such-flag"))
    assert kernel.compiled.__wrapped__(8, 2, 1, False) is None
    assert "gcc could not compile decode.c" in caplog.text
