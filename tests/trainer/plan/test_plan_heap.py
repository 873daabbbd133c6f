"""The heap of a plan beside that of glibc."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from transformers import Gemma2Config, PreTrainedConfig, Qwen3Config

from strop.engines.config import LoraConfig
from strop.trainer.plan.batches import packed_shape
from strop.trainer.plan.heap import ALIGNMENT, OBJECTS, Heap
from strop.trainer.plan.meta_model import PassForm
from strop.trainer.plan.passes import trace_passes
from strop.utils.glibc import LARGEST_HEAP_BYTES

MIB = 2**20
REAL = """
import ctypes, json, sys
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
libc.mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD, as it is in a process that has given back such a piece
libc.mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
events = json.load(sys.stdin)
start = peak = libc.sbrk(0)
pieces = {}
for number, size in events:
    if size:
        piece = ctypes.c_void_p()
        assert libc.posix_memalign(ctypes.byref(piece), 64, ctypes.c_size_t(size)) == 0
        pieces[number] = piece
        peak = max(peak, libc.sbrk(0))
    else:
        libc.free(pieces.pop(number))
print(peak - start)
"""
"""Most bytes by which the heap of a process grows."""
Events = Sequence[tuple[int, int]]
"""Number of a piece, and its size; 0 where it is given back."""


def planned_top(events: Events) -> int:
    heap, starts = Heap(LARGEST_HEAP_BYTES, objects=0.0), {}
    for number, size in events:
        if size:
            starts[number] = heap.take(size)
        elif (start := starts.pop(number)) is not None:
            heap.give_back(start)
    return heap.top


def real_peak(events: Events, small_holes: int) -> int:
    """Args:
    events: in order.
    small_holes: 48 bytes between pieces that something else has, as small objects of a process do.
    """
    output = subprocess.run(
        [sys.executable, "-c", REAL],
        env=os.environ | {"GLIBC_TUNABLES": f"glibc.malloc.tcache_count={small_holes}"},
        input=json.dumps(events), capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(output.stdout)


def in_turns(count: int, *, others: bool) -> Events:
    """Pieces of 1 MiB, each with another one behind it or not, given back and taken again."""
    events = []
    for number in range(count):
        events.append((number, MIB))
        if others:
            events.append((1000 + number, MIB))
    events += [(number, 0) for number in range(count)]
    return [*events, *((2000 + number, MIB) for number in range(count))]


def of_a_pass(seed: int) -> Events:
    """Layers that keep some tensors and drop others, and give what they kept back from the last one on."""
    rng, events, kept, number = random.Random(seed), [], [], 0
    sizes = [rng.randrange(64, 8192) * 64 * 16 for _ in range(6)]
    for _ in range(8):
        dropped = []
        for size in sizes:
            for where in (kept, dropped):
                number += 1
                events.append((number, size if where is kept else 2 * size))
                where.append(number)
            if len(dropped) > 1:
                events.append((dropped.pop(0), 0))
        events += [(piece, 0) for piece in dropped]
    for piece in reversed(kept):
        number += 1
        events += [(number, sizes[number % 6]), (piece, 0), (number, 0)]
    return events


def with_large_ones(size: int) -> Events:
    """Pieces of 1 MiB, and in their places one that the heap does not grow for, with more of 1 MiB beside it."""
    events = [(number, MIB) for number in range(50)]
    events += [(number, 0) for number in range(50)]
    return [
        *events,
        (1000, size),
        *((2000 + number, MIB) for number in range(50)),
        (1000, 0),
        (3000, 8 * MIB),
    ]


CASES = {
    "a large piece in free room": (with_large_ones(40 * MIB), 0),
    "a large piece beside it": (with_large_ones(60 * MIB), 0),
    "with others between": (in_turns(50, others=True), 1000),
    "without": (in_turns(50, others=False), 0),
    **{f"pass {seed}": (of_a_pass(seed), 0) for seed in range(6)},
}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a system without glibc")
@pytest.mark.parametrize(("events", "small_holes"), CASES.values(), ids=CASES)
def test_a_heap_grows_as_that_of_glibc(events: Events, small_holes: int) -> None:
    allowed = 0.05 if small_holes else 0.01  # where small objects go differs by version
    assert planned_top(events) == pytest.approx(real_peak(events, small_holes), rel=allowed)


def test_a_piece_fits_where_a_neighbour_is_free() -> None:
    heap = Heap(LARGEST_HEAP_BYTES, objects=0.0)
    pieces = [heap.take(MIB) for _ in range(5)]
    size = MIB + ALIGNMENT
    assert pieces == [number * size for number in range(5)]
    heap.give_back(1 * size)
    assert heap.take(MIB) == 5 * size  # a hole of its own size is too small
    heap.give_back(2 * size)
    assert heap.take(MIB) == size  # two are not
    assert (heap.used, heap.end) == (5 * size, 6 * size)


def test_small_objects_keep_free_neighbours_apart() -> None:
    heap = Heap(LARGEST_HEAP_BYTES, objects=1.0)
    pieces = [heap.take(MIB) for _ in range(5)]
    for start in pieces[:4]:
        assert start is not None
        heap.give_back(start)
    assert heap.take(MIB) == 5 * (MIB + ALIGNMENT)
    assert heap.take(MIB // 2) == 0


def test_a_share_of_the_pieces_has_an_object_behind_it() -> None:
    heap = Heap(LARGEST_HEAP_BYTES)
    pieces = [heap.take(1024) for _ in range(1000)]
    num_objects = (heap.end - heap.used) / ALIGNMENT
    assert num_objects == pytest.approx(1000 * OBJECTS, rel=0.1)
    for start in pieces:
        assert start is not None
        heap.give_back(start)
    assert heap.used == 0
    assert heap.end >= num_objects * ALIGNMENT


def test_an_empty_heap_has_no_holes() -> None:
    heap = Heap(LARGEST_HEAP_BYTES, objects=0.0)
    starts = [heap.take(size) for size in (MIB, 3 * MIB, 5 * MIB)]
    for start in starts:
        assert start is not None
        heap.give_back(start)
    assert (heap.end, heap.used) == (0, 0)
    assert heap.top == 9 * MIB + 3 * ALIGNMENT


def test_larger_pieces_than_the_heap_has_are_not_in_an_empty_one() -> None:
    heap = Heap(LARGEST_HEAP_BYTES)
    assert heap.take(LARGEST_HEAP_BYTES) is None
    assert heap.take(0) is None
    assert heap.end == 0


FORMS = {
    "float32": PassForm(compute_dtype=torch.float32),
    "adapter in bfloat16": PassForm(compute_dtype=torch.bfloat16, lora=LoraConfig(rank=4), holds_half=True),
}


SHAPES = {
    "layers alike": Qwen3Config(
        hidden_size=64, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, head_dim=16,
        intermediate_size=128, vocab_size=512, tie_word_embeddings=True,
    ),
    "windows in turns": Gemma2Config(
        hidden_size=64, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, head_dim=16,
        intermediate_size=128, vocab_size=512, sliding_window=32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_holes_of_many_layers_follow_from_those_of_few(
    shape: PreTrainedConfig, form: PassForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = packed_shape([(64, (192,) * 4)] * 2)
    few = trace_passes(shape, form, batch)
    monkeypatch.setattr("strop.trainer.plan.meta_model.layer_kind", id)  # none is like another
    monkeypatch.setattr("strop.trainer.plan.meta_model._TEMPLATES", {})
    every = trace_passes(shape, form, batch)
    assert len(few.layers) < len(every.layers) == 8
    gaps = every.gap_bytes(every.kinds)
    assert abs(few.gap_bytes(few.kinds) - gaps) <= 0.03 * every.saved_bytes()
    assert gaps > 0.1 * every.saved_bytes()


def test_more_layers_leave_more_holes() -> None:
    form = FORMS["adapter in bfloat16"]
    passes = trace_passes(SHAPES["layers alike"], form, packed_shape([(64, (192,) * 4)] * 2))
    few, many = (passes.gap_bytes(passes.kinds[:1] * count) for count in (4, 32))
    assert many > 4 * few


@pytest.mark.parametrize(("largest", "share"), [(0, 0.0), (1 << 40, 1.0)], ids=["none", "all"])
def test_what_is_larger_than_a_piece_of_the_heap_does_not_stay_in_it(
    largest: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, head_dim=16,
        intermediate_size=128, vocab_size=512,
    )  # fmt: skip
    batch = packed_shape([(64, (192,) * 4)] * 2)
    between = trace_passes(shape, PassForm(compute_dtype=torch.float32), batch).heap_share
    monkeypatch.setattr("strop.trainer.plan.passes.largest_in_heap", lambda **_: largest)
    assert trace_passes(shape, PassForm(compute_dtype=torch.float32), batch).heap_share == pytest.approx(
        share, abs=0.02
    )
    assert between == pytest.approx(1.0, abs=0.02), "2 MiB at most"


def test_an_accelerator_has_no_such_heap() -> None:
    shape = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, head_dim=16,
        intermediate_size=128, vocab_size=512,
    )  # fmt: skip
    form = PassForm(compute_dtype=torch.bfloat16, is_accelerator=True)
    passes = trace_passes(shape, form, packed_shape([(64, (192,) * 4)] * 2))
    assert passes.gap_bytes(passes.kinds) == passes.heap_share == 0
