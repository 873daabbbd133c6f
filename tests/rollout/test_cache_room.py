"""The table of keys and values on an accelerator: as large as it will be, where there is memory for it."""

from __future__ import annotations

import pytest
import torch

from strop.rollout.native import cache as cache_module
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cache import FREE_SHARE, SlotCache
from strop.rollout.native.engine import NativeEngine

TOKEN_BYTES = 2 * 3 * 4 * 8 * 4  # keys and values, 3 layers, 4 heads of 8 numbers in float32


def table_for(monkeypatch: pytest.MonkeyPatch, num_tokens_free: int) -> SlotCache:
    """A cache on a device that computes nothing, with memory for so many tokens."""
    free = num_tokens_free * TOKEN_BYTES / FREE_SHARE
    monkeypatch.setattr(cache_module, "free_bytes", lambda device: free)
    table = SlotCache(64)
    table.form_like(torch.empty(2, 3, 4, 1, 8, device="meta"))
    return table


def test_room_for_all_that_is_in_sight_is_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_for(monkeypatch, 10_000)
    table.expect(300, num_slots=5)
    assert table.reserve(20, num_slots=2)
    assert (table.table.shape[2], table.table.shape[4]) == (5, 320)  # whole multiples of 64 tokens
    before = table.table
    assert table.reserve(300, num_slots=5)
    assert table.table is before, "no growth, no copy"


def test_with_less_memory_it_grows_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_for(monkeypatch, 5 * 320 - 1)
    table.expect(300, num_slots=5)
    assert table.reserve(20, num_slots=2)
    assert (table.table.shape[2], table.table.shape[4]) == (2, 64)


def test_memory_in_pieces_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_for(monkeypatch, 10_000)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)

    def broken(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch.Tensor, "new_zeros", broken)
    assert not table.reserve(20, num_slots=2)


def test_where_memory_is_in_pieces_a_smaller_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_for(monkeypatch, 10_000)
    table.expect(300, num_slots=5)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    make = torch.Tensor.new_zeros

    def largest(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        if shape[2] * shape[4] > 2 * 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return make(like, shape)

    monkeypatch.setattr(torch.Tensor, "new_zeros", largest)
    assert table.reserve(20, num_slots=2)
    assert (table.table.shape[2], table.table.shape[4]) == (2, 64)


@pytest.mark.parametrize(
    ("held", "free", "stays"),
    [(9, 51, True), (11, 80, False), (9, 49, False)],
    ids=["small", "large", "crowded"],
)
def test_an_engine_stays_awake_where_it_is_small_and_memory_is_plenty(
    monkeypatch: pytest.MonkeyPatch, held: int, free: int, stays: bool
) -> None:
    engine = object.__new__(NativeEngine)
    engine._batch = object.__new__(DecodeBatch)
    monkeypatch.setattr(DecodeBatch, "held_bytes", property(lambda self: held))
    monkeypatch.setattr(DecodeBatch, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr("strop.rollout.native.engine.device_bytes", lambda device: 100)
    monkeypatch.setattr("strop.rollout.native.engine.free_bytes", lambda device: free)
    assert engine.leaves_room == stays
    monkeypatch.setattr(DecodeBatch, "device", property(lambda self: torch.device("cpu")))
    assert not engine.leaves_room
