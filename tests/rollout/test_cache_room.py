"""Memory of generation: how the table of a CPU's sequences grows, and whether an engine on an accelerator keeps its own
while others work."""

from __future__ import annotations

import pytest
import torch

from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cache import FREE_SHARE, SlotCache
from strop.rollout.native.engine import NativeEngine
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling

TOKEN_BYTES = 2 * 3 * 4 * 8 * 4  # keys and values, 3 layers, 4 heads of 8 numbers in float32


def table_for(num_tokens_free: int) -> SlotCache:
    """A cache that computes nothing, with memory for a table of so many tokens."""
    cache = SlotCache(64)
    cache.free_bytes = int(num_tokens_free * TOKEN_BYTES / FREE_SHARE)
    cache.form_like(torch.empty(2, 3, 4, 1, 8, device="meta"))
    return cache


def size(cache: SlotCache) -> tuple[int, int]:
    return cache.table.shape[2], cache.table.shape[4]


def test_room_for_all_that_is_in_sight_is_made_at_once() -> None:
    cache = table_for(64 * 320)
    cache.expect([Request("0", (1,) * 200, Sampling(key=0, max_tokens=100))])
    assert cache.make_room(20, num_slots=2)
    assert size(cache) == (64, 320)  # whole multiples of 64 tokens
    before = cache.table
    assert cache.make_room(300, num_slots=5)
    assert cache.table is before, "no growth, no copy"


def test_slots_are_as_many_as_sequences_in_sight_and_all_where_more_come() -> None:
    cache = table_for(64 * 320)
    cache.expect([Request(str(number), (1,) * 20, Sampling(key=0, max_tokens=30)) for number in range(8)])
    assert cache.make_room(20, num_slots=2)
    assert size(cache) == (8, 64)
    before = cache.table
    assert cache.make_room(50, num_slots=8)
    assert cache.table is before
    assert cache.make_room(50, num_slots=9)
    assert size(cache) == (64, 64)


def test_with_less_memory_it_grows_as_it_must() -> None:
    cache = table_for(64 * 320 - 1)
    cache.expect([Request("0", (1,) * 200, Sampling(key=0, max_tokens=100))])
    assert cache.make_room(20, num_slots=2)
    assert size(cache) == (2, 64)
    assert cache.make_room(130, num_slots=2)
    assert size(cache) == (2, 192)


def test_a_layer_that_is_read_has_the_length_of_the_step_before() -> None:
    cache = table_for(64 * 320)
    assert cache.make_room(300, num_slots=2)
    lengths = [cache.layer(0, 2, num_tokens)[0].shape[2] for num_tokens in (1, 64, 65, 100, 128, 300)]
    assert lengths == [64, 64, 128, 128, 128, 320]


@pytest.mark.parametrize(
    ("num_tokens_free", "grown"),
    [(64 * 64, (64, 64)), (64 * 64 - 1, (6, 64)), (6 * 64 - 1, (5, 64)), (5 * 64 - 1, None)],
    ids=["all slots", "half more", "one more", "none"],
)
def test_a_fifth_sequence_takes_spare_room_where_there_is_memory(
    num_tokens_free: int, grown: tuple[int, int] | None
) -> None:
    cache = table_for(4 * 64)
    assert cache.make_room(20, num_slots=4)
    cache.free_bytes = int(num_tokens_free * TOKEN_BYTES / FREE_SHARE)
    assert cache.make_room(20, num_slots=5) == (grown is not None)
    assert size(cache) == (grown or (4, 64))


def test_states_take_their_part() -> None:
    cache = table_for(4 * 64)
    cache.state_bytes = 32 * TOKEN_BYTES  # of each sequence
    assert not cache.make_room(20, num_slots=3)
    assert cache.make_room(20, num_slots=2)
    assert size(cache) == (2, 64)


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
    assert engine.leaves_room() == stays
    assert not engine.leaves_room(held - 1), "updates need more"
    monkeypatch.setattr(DecodeBatch, "device", property(lambda self: torch.device("cpu")))
    assert not engine.leaves_room()
