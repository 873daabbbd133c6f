"""Step kernels: attention of packed rows and of a decode step, sampling, and the log-prob head, each alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.look import Facts, Look
from benchmarks.gpu.timing import micros, seconds
from benchmarks.gpu.workload import shape
from strop.engines import head as head_module
from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionForm
from strop.engines.segments import Segment
from strop.rollout.native import decode_kernel
from strop.rollout.native.cache import DecodeAttention
from strop.rollout.native.cuda_graph import cuda_graphs
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.native.sampling import SEQUENCE, Rows, next_tokens


def kernels(look: Look) -> None:
    """Measure each alone."""
    look.measure("attention of packed rows, microseconds", lambda facts: _packed(look, facts))
    look.measure("attention of a decode step, microseconds", lambda facts: _decode(look, facts))
    look.measure("sampling, microseconds", lambda facts: _sampling(look, facts))
    look.measure("log-prob head, milliseconds", lambda facts: _head(look, facts))


def _packed(look: Look, facts: Facts) -> None:
    """Forward and backward pass of 8 responses of 512 tokens behind one prompt of 512, with strop's plan, and as one
    padded call of each backend."""
    sizes, count, length = shape(look), look.size(8, 2), look.size(512, 16)
    heads, kv_heads, dim = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    segments, num_tokens = responses_of_one_prompt(count, length), length * (count + 1)

    def states(*form: int) -> Tensor:
        return torch.randn(*form, dim, device=look.device, dtype=torch.bfloat16, requires_grad=True)

    query, key, value = (states(num_tokens, n) for n in (heads, kv_heads, kv_heads))
    plan, form = PackedAttention(segments, device=torch.device(look.device)), AttentionForm(scaling=dim**-0.5)
    weight = torch.randn(num_tokens, heads, dim, device=look.device, dtype=torch.bfloat16)

    def both(call: Callable[[], Tensor], gradient: Tensor) -> Callable[[], None]:
        return lambda: torch.autograd.backward([call()], [gradient])

    facts["strop"] = micros(look, both(lambda: plan.attend(0, query, key, value, form), weight), count=10)
    queries, keys, values = (
        states(count, n, m) for n, m in ((heads, length), (heads, 2 * length), (heads, 2 * length))
    )
    mask = torch.ones(length, 2 * length, dtype=torch.bool, device=look.device).tril(length)
    mask = mask.expand(count, 1, length, 2 * length)
    padded = torch.randn_like(queries)
    for backend in _backends():
        with sdpa_kernel([backend]):
            work = both(lambda: F.scaled_dot_product_attention(queries, keys, values, mask), padded)
            name = f"one call with a mask, {backend.name}"
            facts[name] = look.attempt(partial(micros, look, work, count=10))


def responses_of_one_prompt(count: int, length: int) -> list[Segment]:
    """A prompt and its responses end to end, each of so many tokens."""
    prompt = Segment(start=0, length=length)
    starts = range(length, length * (count + 1), length)
    return [prompt] + [Segment(start=start, length=length, prefix=((0, length),)) for start in starts]


def _backends() -> Iterator[SDPBackend]:
    yield from (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH)


VARIANTS: dict[str, dict[str, int]] = {
    "captured": {}, "5 stages": {"num_stages": 5}, "8 warps": {"num_warps": 8}, "32 keys": {"KEYS": 32},
    "128 keys": {"KEYS": 128},
}  # fmt: skip
"""Options of the kernel of a decode step in place of its own. Of its three stages one is for the table, so keys and
values have one buffer, and a program computes or waits for the next ones; with five they have two."""


def _without_launches(look: Look, work: Callable[[], Tensor]) -> float:
    """Microseconds of the device alone, on a card: several calls, captured as one."""
    count = look.size(20, 1)

    def several() -> Tensor:
        return [work() for _ in range(count)][-1]

    replay = cuda_graphs()(several)[0] if look.device == "cuda" else several
    return round(micros(look, replay, count=5) / count, 2)


class _With:
    """A kernel of Triton that is launched with other options."""

    def __init__(self, kernel: Any, options: dict[str, int]) -> None:
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        launch = self._kernel[grid]
        return lambda *args, **usual: launch(*args, **(usual | self._options))


def _decode(look: Look, facts: Facts) -> None:
    """One token of each sequence over its keys: 640 used ones in a table of 1,024."""
    sizes = shape(look)
    heads, kv_heads, dim = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    table, used, form = look.size(1024, 64), look.size(640, 40), AttentionForm(scaling=dim**-0.5)
    for b in (look.size(64, 4), look.size(256, 8)):
        cache = PagedCache(b, torch.device(look.device))
        given = torch.zeros(2, 1, kv_heads, used - 1, dim, device=look.device, dtype=torch.bfloat16)
        for slot in range(b):  # pages of its own for each
            computed = cache.put(given, before=None, state_bytes=0)
            if computed is None or not cache.enter(range(slot, slot + 1), computed, longest=used - 1):
                raise MemoryError(f"no memory for the keys and values of {b} x {used} tokens of one layer")
            del computed
        cache.reserve(np.full(b, used - 1))
        attention = DecodeAttention(cache, torch.full((b,), used - 1, device=look.device), num_tokens=table)
        query, key, value = (
            torch.randn(b, n, dim, device=look.device, dtype=torch.bfloat16)
            for n in (heads, kv_heads, kv_heads)
        )
        with torch.inference_mode():
            ours = partial(attention.attend, 0, query, key, value, form)
            facts[f"{b} sequences, strop"] = micros(look, ours)
            for name, options in VARIANTS.items():
                with mock.patch.object(decode_kernel, "_attend", _With(decode_kernel._attend, options)):
                    facts[f"{b} sequences, {name}"] = look.attempt(partial(_without_launches, look, ours))
            keys, values = torch.randn(2, b, kv_heads, table, dim, device=look.device, dtype=torch.bfloat16)
            mask = (torch.arange(table, device=look.device) < used)[None, None, None].expand(b, 1, 1, table)
            masked = partial(
                F.scaled_dot_product_attention,
                query[:, :, None],
                keys,
                values,
                attn_mask=mask,
                enable_gqa=True,
            )
            facts[f"{b} sequences, sdpa with a mask"] = micros(look, masked)
        read = 2 * b * used * kv_heads * dim * 2
        facts[f"{b} sequences, bound"] = round(1e6 * read / (1e12 * look.ceilings(facts)["copy_tb_per_s"]), 1)


def _sampling(look: Look, facts: Facts) -> None:
    for b in (look.size(64, 4), look.size(256, 8)):
        logits = torch.randn(b, shape(look)["vocab_size"], device=look.device)
        rows = np.zeros(b, dtype=SEQUENCE)
        rows["temperature"], rows["top_p"], rows["key"] = 1.0, 1.0, np.arange(b)
        for name, top_p, top_k in (("whole", 1.0, 0), ("top_p 0.9", 0.9, 0), ("top_k 50", 1.0, 50)):
            rows["top_p"], rows["top_k"] = top_p, top_k
            facts[f"{b} rows, {name}"] = micros(look, partial(_sampled, logits, rows), count=10)


def _sampled(logits: Tensor, rows: Rows) -> list[int]:
    tokens: list[int] = next_tokens(logits, rows)[0].tolist()
    return tokens


def _head(look: Look, facts: Facts) -> None:
    """Log-probs of 4,096 tokens, forward and backward, by precision and size of chunks."""
    count, sizes = look.size(4096, 64), shape(look)
    vocab, hidden_size = sizes["vocab_size"], sizes["hidden_size"]
    weight = torch.randn(vocab, hidden_size, device=look.device).mul_(0.02).requires_grad_()
    targets = torch.randint(0, vocab, (count,), device=look.device)
    hidden = torch.randn(count, hidden_size, device=look.device, requires_grad=True)
    usual = head_module.DEVICE_CHUNK_ELEMENTS
    try:
        for dtype in (torch.bfloat16, None):
            for elements in (usual >> 3, usual, usual << 1):
                head_module.DEVICE_CHUNK_ELEMENTS = elements
                head = head_module.Head(weight, product_dtype=dtype)

                def both(head: head_module.Head = head) -> None:
                    head.log_probs(hidden, targets, temperature=1.0)[0].sum().backward()  # type: ignore[no-untyped-call]

                name = f"{'float32' if dtype is None else 'bfloat16'}, chunks of {elements >> 20} Mi logits"
                facts[name] = round(1e3 * seconds(look, both, repeats=2), 2)
    finally:
        head_module.DEVICE_CHUNK_ELEMENTS = usual
    operations = 8 * count * hidden_size * vocab  # forward, again, and two products of the backward pass
    facts["bound"] = round(1e3 * operations / (1e12 * look.ceilings(facts)["bf16_tflops"]), 2)
