"""Sequences of one prompt read its keys and values in one place: what their own slots hold, and the same numbers."""

from __future__ import annotations

import mmap
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.native.cache import SlotCache
from strop.rollout.native.cpu.steps import fused_step


@pytest.mark.parametrize("seed", range(5))
def test_the_place_that_is_read_holds_what_the_slot_holds(seed: int) -> None:
    """Groups enter, sequences end in any order, others move into their slots, and the table grows."""
    draw, capacity, running = random.Random(seed), 12, 0
    cache = SlotCache(capacity)
    shares = 0
    for number in range(1, 120):
        if running and draw.random() < 0.6:
            slot, running = draw.randrange(running), running - 1
            if slot != running:
                cache.move(running, slot, 1 + number % 9)
        else:
            count = min(draw.randint(1, 5), capacity - running)
            if count == 0:
                continue
            prompt = torch.full((2, 1, 1, draw.randint(1, 90), 1), float(number))
            cache.write(range(running, running + count), prompt)
            running += count
        sources, num_shared = cache.shared(running)
        for slot in range(running):
            beginning = cache.table[:, :, slot, :, :1]
            assert torch.equal(cache.table[:, :, int(sources[slot]), :, :1], beginning), (number, slot)
            assert float(beginning.min()) > 0
            shares += int(sources[slot] != slot)
        assert (num_shared > 0).all()
    assert shares > 50


def test_no_place_is_read_that_a_table_with_longer_slots_has_lost() -> None:
    """Where memory is short, fewer slots get longer; the place of the last one was read by others."""
    cache = SlotCache(4)
    cache.write(range(3), torch.full((2, 1, 1, 60, 1), 7.0))
    cache.write([3], torch.full((2, 1, 1, 60, 1), 8.0))
    cache.move(3, 0, 60)
    assert cache.shared(3)[0].max() == 3
    cache.free_bytes = 3 * 2 * 4 * 2 * 64 * 2
    assert cache.make_room(100, num_slots=3)
    assert cache.table.shape[2] == 3
    sources, _ = cache.shared(3)
    assert sources.max() < 3
    assert torch.equal(cache.table[0, 0, sources, 0, 0, 0], torch.tensor([8.0, 7.0, 7.0]))


def test_a_kernel_without_large_pages_has_a_cache_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Memory(mmap.mmap):
        def madvise(self, *advice: int) -> None:
            asked.append(advice[0])
            raise OSError("invalid argument")

    monkeypatch.setattr(mmap, "mmap", Memory)
    cache = SlotCache(2)
    cache.write([0], torch.ones(2, 1, 1, 5, 8))
    assert asked == [mmap.MADV_HUGEPAGE]
    assert float(cache.table.sum()) == 2 * 5 * 8
    monkeypatch.setattr("strop.rollout.native.cache.HUGE_SHARE", 0.0)
    SlotCache(2).write([0], torch.ones(2, 1, 1, 5, 8))
    assert len(asked) == 1, "large tables are left alone"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the step is compiled by gcc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["mistral", "qwen3", "wide"])
@torch.inference_mode()
def test_a_step_gives_the_same_bits_wherever_it_reads_a_prompt(
    folder: Callable[[str], Path], kind: str, dtype: str
) -> None:
    model = load_model(ModelConfig(path=str(folder(kind)), dtype=dtype), device="cpu")
    step, text = fused_step(model), model.config
    assert step is not None
    dim = model.layers[0].self_attn.head_dim  # type: ignore[union-attr]
    shape = (2, text.num_hidden_layers, text.num_key_value_heads, 32, dim)
    prompt = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(model.compute_dtype)
    together, apart = SlotCache(4), SlotCache(4)
    together.write(range(4), prompt)
    for slot in range(4):
        apart.write([slot], prompt)
    assert together.shared(4)[0].tolist() == [0] * 4
    assert apart.shared(4)[0].tolist() == list(range(4))
    for cache in (together, apart):
        cache.make_room(50, num_slots=4)
    for place in range(32, 50):  # a window of 8 goes from inside the prompt to behind it
        ids, lengths = torch.tensor([3, 5, 8, 13]) + place % 7, torch.full((4,), place)
        logits = [step.computed(ids, lengths, cache, num_tokens=place + 1) for cache in (together, apart)]
        assert torch.equal(*logits), place
    assert torch.equal(together.table[:, :, :4, :, :50], apart.table[:, :, :4, :, :50])
    together.table[:, :, 1:4, :, :32] = 0  # whole blocks, which nobody reads
    assert torch.equal(step.computed(ids, lengths, together, num_tokens=place + 1), logits[0])
