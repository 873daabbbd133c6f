"""Costs of two ranks of this machine that talk, in seconds of a rank's processor.

Concurrency: both ranks call every function here, in the same order, within a minute of each other.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM

from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM, use_packed_attention
from strop.engines.parallel.tensor import TensorParallel
from strop.engines.parallel.token_exchange import gather_tokens, scatter_tokens
from strop.engines.segments import Segment

TIMEOUT = datetime.timedelta(seconds=60)
"""Of a wait for the other rank."""
SAMPLES, COUNTED = 12, 2
"""Of a measurement, and the place of the one that counts: beside other programs some take several times as long."""
TOKENS, LAYERS = 8, 2
"""Of a pass."""
NUM_COLLECTIVES = 4 * LAYERS + 2
"""Of each layer, of embeddings and hidden states."""
ROWS = 1 << 12
"""Of 1 KiB, that a rank sends."""


def meet(rank: int, meeting: str) -> DeviceMesh:
    """The mesh of two ranks, which find each other by a file."""
    dist.init_process_group("gloo", f"file://{meeting}", TIMEOUT, 2, rank)
    return init_device_mesh("cpu", (2,))


def sent_bytes_per_s(mesh: DeviceMesh) -> float:
    """Bytes that a rank sends in a second: gathered tokens, and those that are added up; 0 where noise hides it."""
    group, rows = mesh.get_group(), torch.zeros(ROWS, 256)

    def exchange(rows: torch.Tensor) -> None:
        scatter_tokens(gather_tokens(rows, group), group)

    both = _seconds(lambda: exchange(rows), repeats=1) - _seconds(lambda: exchange(rows[:2]), repeats=4)
    return 2 * rows.nbytes / both if both > 0 else 0.0


def collective_seconds(mesh: DeviceMesh) -> float:
    """Seconds that a collective adds to a pass of a few tokens, with the Python around it: of a tiny model in one
    process, and cut over both ranks; not above 0 where noise hides it."""
    shape = Qwen3Config(
        hidden_size=64, intermediate_size=64, vocab_size=64, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    module = Qwen3ForCausalLM(shape).eval()  # type: ignore[no-untyped-call]  # transformers has no types here
    model = CausalLM(module, compute_dtype=torch.float32)
    use_packed_attention(model.module, None, by_formula=False)
    ids = torch.arange(TOKENS)[None]

    @torch.inference_mode()
    def tiny_pass() -> None:
        attention = PackedAttention([Segment(start=0, length=TOKENS)], device=torch.device("cpu"))
        model.hidden(ids, ids, attention)

    alone_s = _seconds(tiny_pass, repeats=8)
    model.tensor_parallel = TensorParallel(model.module, mesh)
    return (_seconds(tiny_pass, repeats=8) - alone_s) / NUM_COLLECTIVES


def _seconds(function: Callable[[], None], *, repeats: int) -> float:
    """Of the processor, for a call."""
    function()
    taken = []
    for _ in range(SAMPLES):
        before = time.process_time()
        for _ in range(repeats):
            function()
        taken.append((time.process_time() - before) / repeats)
    return sorted(taken)[COUNTED]
