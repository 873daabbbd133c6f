"""Triton's kernels compiled for a card, which their interpreter does not: types, masks and shapes, down to the machine
code of an H100 (`make triton`; no card is needed)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from strop.engines import gate_kernels, head_kernels, norm_kernels, rotary_kernels
from strop.engines.attention_form import AttentionForm
from strop.engines.head import chunk_rows
from strop.rollout.native import decode_kernel, layer_kernels, sample_kernel
from strop.utils.triton import triton

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        triton is None or torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
        reason="needs Triton and no card: make triton",
    ),
]
MODULES = (
    gate_kernels, head_kernels, norm_kernels, rotary_kernels, decode_kernel, layer_kernels, sample_kernel,
)  # fmt: skip
SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
"""Shared memory that a program may have, by compute capability: more of it is an error when a kernel is launched."""
HALF = torch.bfloat16
WIDE = torch.float32


class Driver:
    """Of a card that is not there: kernels are compiled for it and not launched."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=[90], ids=["H100"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What launches have compiled; the kernels do nothing."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: list[Any] = []

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: kernels.append(kernel.run(*args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "__getitem__", launch)
    monkeypatch.setattr(driver, "_active", Driver(request.param))
    functions = [function for module in MODULES for function in vars(module).values()]
    for function in functions:
        if isinstance(function, JITFunction):
            monkeypatch.setattr(function, "device_caches", defaultdict(function.create_binder))
    return kernels


def assert_machine_code(kernels: list[Any]) -> None:
    """Something was launched, and all of it has code for the card, which has the shared memory that it takes."""
    assert kernels
    for kernel in kernels:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_BYTES[kernel.metadata.target.arch]


@pytest.mark.parametrize("vocab", [1, 300, 151_936])
def test_the_head(compiled: list[Any], vocab: int) -> None:
    logits = torch.zeros(3, vocab)
    normalizers, means = head_kernels.statistics(logits)
    sample_kernel.draw(logits, torch.zeros(3, 2, dtype=torch.float64))
    for dtype in (HALF, WIDE):
        for num_targets in (1, 2, 5):
            for entropies in (None, torch.zeros(3)):
                targets = torch.zeros(3, num_targets, dtype=torch.int64)
                head_kernels.gradient(
                    logits,
                    normalizers,
                    means,
                    targets,
                    torch.zeros(3, num_targets),
                    entropies,
                    slope=0.7,
                    dtype=dtype,
                )
    assert_machine_code(compiled)


@pytest.mark.parametrize(("count", "dim"), [(1, 16), (5, 1024), (4096, 128), (4096, 7168)])
def test_norms(compiled: list[Any], count: int, dim: int) -> None:
    dtypes = ((WIDE, WIDE, HALF), (HALF, WIDE, WIDE), (WIDE, WIDE, WIDE), (HALF, HALF, HALF))
    for source, held, target in dtypes:
        hidden, weight = torch.zeros(count, dim, dtype=source), torch.zeros(dim, dtype=held)
        out, scales = norm_kernels.normed(hidden, weight, 1e-6, target)
        for trains_weight in (False, True):
            norm_kernels.normed_back(out, hidden, weight, scales, trains_weight=trains_weight)
    assert_machine_code(compiled)


@pytest.mark.parametrize("dtype", [HALF, torch.float16, WIDE])
def test_gates(compiled: list[Any], dtype: torch.dtype) -> None:
    for count in (1, 7, 4096):
        gates, ups = torch.zeros(2, count, dtype=dtype)
        gate_kernels.gradients_of(gate_kernels.product_of(gates, ups), gates, ups)
    assert_machine_code(compiled)


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (7, 64), (16, 128), (64, 256)])
def test_rotations(compiled: list[Any], heads: int, dim: int) -> None:
    angles = torch.zeros(1, 5, dim)
    for source in (HALF, WIDE):
        for target in (HALF, WIDE):
            for is_back in (False, True):
                states = torch.zeros(1, 5, heads, dim, dtype=source).transpose(1, 2)
                rotary_kernels.triton_turned(states, angles, angles, target, is_back=is_back)
    assert_machine_code(compiled)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 16), (16, 8, 128), (64, 8, 128), (7, 1, 64)])
def test_what_is_between_the_products_of_a_decode_step(
    compiled: list[Any], heads: int, kv_heads: int, dim: int
) -> None:
    width, angles = heads * dim, torch.zeros(3, dim)
    for stream_dtype, dtype in ((WIDE, HALF), (HALF, HALF), (WIDE, torch.float16), (WIDE, WIDE)):
        stream, delta = torch.zeros(3, width, dtype=stream_dtype), torch.zeros(3, width, dtype=dtype)
        for given, target in ((None, dtype), (delta, dtype), (delta, WIDE)):
            layer_kernels.add_and_norm(stream, given, torch.zeros(width), 1e-6, target)
        states = torch.zeros(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
        for norms in (None, (torch.zeros(dim), torch.zeros(dim))):
            layer_kernels.turn_heads(states, norms, 1e-6, angles, angles, (heads, kv_heads))
        layer_kernels.gate_halves(torch.zeros(3, 6 * width, dtype=dtype))
    assert_machine_code(compiled)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 256), (16, 8, 128), (32, 2, 64), (6, 1, 16)])
@pytest.mark.parametrize("dtype", [HALF, torch.float16, WIDE])
@pytest.mark.parametrize("compiled", [75, 80, 86, 90], ids=["T4", "A100", "A10", "H100"], indirect=True)
def test_attention_of_a_decode_step(
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    compiled: list[Any],
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
) -> None:
    if "T4" in request.node.name:
        monkeypatch.setattr(decode_kernel, "_key_bytes", lambda device: decode_kernel.TURING_KEY_BYTES)
    keys, values = torch.zeros(2, 9, kv_heads, 32, dim, dtype=dtype)
    for b, window in ((1, None), (64, None), (7, 1), (7, 70)):  # divided among programs, and not
        query, key, value = (torch.zeros(b, n, dim, dtype=dtype) for n in (heads, kv_heads, kv_heads))
        table, lengths = torch.zeros(b, 4, dtype=torch.int32), torch.zeros(b, dtype=torch.int64)
        form = AttentionForm(scaling=0.3, window=window)
        decode_kernel.attend(query, key, value, keys, values, table, lengths, form)
    assert_machine_code(compiled)


def test_kernels_are_few_whatever_the_numbers_of_rows(compiled: list[Any]) -> None:
    """Sequences end one after another, and each kernel of a number of them takes a second or two."""
    table = torch.zeros(32, 5, dtype=torch.int32)
    keys, values = torch.zeros(2, 9, 64, 32, 64, dtype=HALF)
    for count in (16, 21, 32):  # their keys are not divided among programs
        hidden, weight = torch.zeros(count, 64), torch.zeros(64)
        norm_kernels.normed(hidden, weight, 1e-6, HALF)
        gate_kernels.product_of(hidden, hidden)  # of any number of rows, a multiple of 16 numbers
        query, key, value = torch.zeros(3, count, 64, 64, dtype=HALF)
        lengths = torch.zeros(count, dtype=torch.int64)
        for pages in (table, torch.zeros(32, 16, dtype=torch.int32)):
            decode_kernel.attend(query, key, value, keys, values, pages, lengths, AttentionForm(scaling=0.3))
    assert len(compiled) == 12
    assert len({kernel.hash for kernel in compiled}) == 3


def test_kernels_of_sampling_are_two_whatever_the_number_of_rows(compiled: list[Any]) -> None:
    for count in (1, 3, 64):
        sample_kernel.draw(torch.zeros(count, 5008), torch.zeros(count, 2, dtype=torch.float64))
    assert len(compiled) == 6
    assert len({kernel.hash for kernel in compiled}) == 2


def test_the_kernel_of_the_heads_gradient_is_one_for_all_chunks(compiled: list[Any]) -> None:
    vocab = 151_936
    rows = chunk_rows(vocab, torch.device("cuda"))
    numbers, targets = torch.zeros(2 * rows + 1), torch.zeros(2 * rows + 1, 1, dtype=torch.int64)
    for start in (0, rows, 2 * rows):
        at, logits = slice(start, start + 1), torch.zeros(1, vocab)
        head_kernels.gradient(
            logits, numbers[at], numbers[at], targets[at], numbers[at, None], None, slope=1.0, dtype=HALF
        )
    assert len(compiled) == 3
    assert len({kernel.hash for kernel in compiled}) == 1


def test_kernels_of_divided_keys_are_two_however_many_parts_there_are(compiled: list[Any]) -> None:
    keys, values = torch.zeros(2, 9, 8, 32, 64, dtype=HALF)
    table = torch.zeros(32, 5, dtype=torch.int32)
    counts = (1, 3, 5, 9, 17, 33)
    assert [decode_kernel.num_splits(8 * count) for count in counts] == [16, 16, 8, 4, 2, 2]
    for count in counts:
        query, key, value = (torch.zeros(count, heads, 64, dtype=HALF) for heads in (16, 8, 8))
        lengths = torch.zeros(count, dtype=torch.int64)
        decode_kernel.attend(query, key, value, keys, values, table, lengths, AttentionForm(scaling=0.3))
    assert len(compiled) == 2 * len(counts)
    assert len({kernel.hash for kernel in compiled}) == 2
