"""Devices: memory, and how fast they multiply, move and send; published figures by name, or measured on this CPU."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from strop.engines.cpu_products import is_half_faster, linear
from strop.engines.flops.peak import half_precision_peak
from strop.trainer.plan.baseline import ASSUMED, Baseline
from strop.trainer.plan.tracing import Work
from strop.utils.machine_limits import host_free_bytes

GIB = 2**30
FEW_ROWS = 8
LEAST_ROWS, PRODUCT_FLOPS = 64, 1e10
"""Rows and operations of the product that is measured."""
MATRIX = 1024
"""Rows and columns, at most, of the one in bfloat16."""
ATTENDED = (512, 64)
"""Tokens and numbers of a head of the attention that is measured."""
COLLECTIVE_S = 6e-6
"""Of an accelerator: half of an all-reduce of a few tokens."""
PRODUCT_SHARE, ATTENTION_SHARE, BANDWIDTH_SHARE, LINK_SHARE = 0.65, 0.35, 0.75, 0.7
"""Of a published figure that passes reach: with these the updates of benchmarks/RESULTS.md on an H100 are met within a
tenth. They are stated in every plan."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device, at the speed that passes reach."""

    name: str
    memory_bytes: float
    product_flops: float
    """Products, per second."""
    half_flops: float
    """The same in bfloat16."""
    wide_flops: float
    """The same in float32, in which a CPU makes logits."""
    attention_flops: float
    bandwidth: float
    """Bytes per second that operators read and write."""
    weight_bandwidth: float
    """The same of weights that a decode step reads."""
    few_rows_bandwidth: float
    """The same of weights in products of a few rows by torch: decode steps of models that no compiled one is for."""
    call_s: float
    """Seconds of an operator that does nothing."""
    link: float
    """Bytes per second that a device sends within a node."""
    collective_s: float
    """Seconds of a collective of a few tokens, beside what it sends, with what Python does around it."""
    network: float
    """The same to other nodes."""
    per_node: int
    threads: int = 0
    """Of a process; 0 of an accelerator."""

    @property
    def is_cpu(self) -> bool:
        """It is this machine's processor."""
        return self.threads > 0

    def seconds(self, work: Work) -> float:
        """Time of a pass."""
        computed = work.product_flops / self.product_flops + work.attention_flops / self.attention_flops
        moved = work.moved_bytes / self.bandwidth
        calls = work.num_calls * self.call_s
        return computed + moved + calls if self.is_cpu else max(computed + moved, calls)

    @property
    def stated(self) -> str:
        """Its figures, in one line."""
        return (
            f"{self.name}: {self.memory_bytes / GIB:.0f} GiB; reached: products {self.product_flops / 1e12:.3g} "
            f"TFLOP/s, attention {self.attention_flops / 1e12:.3g}, memory {self.bandwidth / 1e9:.3g} GB/s, link "
            f"{self.link / 1e9:.3g} GB/s, network {self.network / 1e9:.3g} GB/s"
        )


_TABLE = {
    # name: GiB of memory, TB/s of memory, GB/s of the link, GB/s of the network, devices of a node
    "B200": (180, 8.0, 900, 50, 8),
    "H200": (139.8, 4.8, 450, 50, 8),
    "H100": (79.2, 3.35, 450, 50, 8),
    "H100 PCIe": (79.6, 2.0, 52, 50, 8),
    "H800": (79.2, 3.35, 200, 50, 8),
    "H20": (95.6, 4.0, 450, 50, 8),
    "A100-40GB": (39.4, 1.555, 300, 25, 8),
    "A100": (79.2, 2.039, 300, 25, 8),
    "A800": (79.2, 2.039, 200, 25, 8),
    "L40S": (44.4, 0.864, 26, 12.5, 8),
    "L4": (22.0, 0.3, 26, 12.5, 8),
    "A10": (22.0, 0.6, 26, 12.5, 4),
    "RTX 4090": (23.6, 1.008, 26, 12.5, 8),
    "RTX 3090": (23.6, 0.936, 26, 12.5, 8),
    "MI300X": (191.0, 5.3, 448, 50, 8),
}
"""Of the makers' data sheets; the memory as drivers show it. Links: NVLink in one direction, else PCIe 4.0 x16; of the
H100 PCIe 5.0."""


def device_named(name: str) -> Device:
    """A device by its name, such as h100 or RTX 4090, or as its driver calls it: NVIDIA H100 80GB HBM3.

    Raises:
        ValueError: it is not in the table.
    """
    spelled = re.sub(r"\brtx[- ]?(?=\d)", "RTX ", name.replace("_", " "), flags=re.IGNORECASE)
    matches = [key for key in _TABLE if re.search(rf"\b{key.replace('-', '.*')}\b", spelled, re.IGNORECASE)]
    peak = half_precision_peak(spelled)
    if not matches or peak is None:
        raise ValueError(
            f"--device {name!r} is not known: {', '.join(_TABLE)}, or cpu; for another one give the nearest of them "
            f"with --memory-gib"
        )
    key = max(matches, key=len)
    memory, bandwidth, link, network, per_node = _TABLE[key]
    return Device(
        name=key,
        memory_bytes=memory * GIB,
        product_flops=PRODUCT_SHARE * peak,
        half_flops=PRODUCT_SHARE * peak,
        wide_flops=PRODUCT_SHARE * peak,
        attention_flops=ATTENTION_SHARE * peak,
        bandwidth=BANDWIDTH_SHARE * bandwidth * 1e12,
        weight_bandwidth=BANDWIDTH_SHARE * bandwidth * 1e12,
        few_rows_bandwidth=BANDWIDTH_SHARE * bandwidth * 1e12,
        call_s=5e-6,
        link=LINK_SHARE * link * 1e9,
        collective_s=COLLECTIVE_S,
        network=LINK_SHARE * network * 1e9,
        per_node=per_node,
    )


def this_cpu(
    *,
    dtype: torch.dtype,
    rows: int,
    hidden: int,
    inner: int,
    num_threads: int = 0,
    processes: int = 1,
    baseline: Baseline = ASSUMED,
) -> Device:
    """This machine's processor, at products and operators of the sizes of a pass; about a second the first time.

    Args:
        dtype: of the computation.
        rows: tokens of a pass.
        hidden, inner: sizes of the model.
        num_threads: of a process; 0: as many as torch takes now, shared by the processes.
        processes: on the machine.
        baseline: of each of them, which says what it costs them to talk.
    """
    threads = num_threads or max(1, torch.get_num_threads() // processes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        hidden, inner = min(hidden, 8192), min(inner, 16384)
        few = max(LEAST_ROWS, int(PRODUCT_FLOPS / (2 * hidden * inner)))
        rates = _measured(dtype, min(rows, few), hidden, inner, threads)
    finally:
        torch.set_num_threads(before)
    products, half, wide, attention, bandwidth, weights, few_rows, call_s = rates
    return Device(
        name=f"this CPU, {threads} thread{'s' if threads > 1 else ''}",
        memory_bytes=float(host_free_bytes()),
        product_flops=products,
        half_flops=half,
        wide_flops=wide,
        attention_flops=attention,
        bandwidth=bandwidth,
        weight_bandwidth=weights,
        few_rows_bandwidth=few_rows,
        call_s=call_s,
        link=baseline.bytes_per_s,
        collective_s=baseline.call_s,
        network=0.1e9,
        per_node=processes,
        threads=threads,
    )


@lru_cache
def _measured(
    dtype: torch.dtype, rows: int, hidden: int, inner: int, threads: int
) -> tuple[float, float, float, float, float, float, float, float]:
    """Operations per second of products, of those in bfloat16, of those in float32 and of attention, bytes per second
    of operators, of weights, of those in products of few rows, seconds of a call."""
    # Numbers that were rounded to bfloat16 are multiplied in float32 where that is faster.
    factor = torch.float32 if dtype == torch.bfloat16 and not is_half_faster() else dtype
    inputs, weight = torch.rand(rows, hidden, dtype=factor), torch.rand(inner, hidden, dtype=factor)
    product_s = wide_s = _median(lambda: linear(inputs, weight))
    if factor.itemsize == 2:
        wide = inputs.float(), weight.float()
        wide_s = _median(lambda: linear(*wide))
    square = weight[:MATRIX, :MATRIX].bfloat16()
    half_s = _median(lambda: square @ square.T)
    head = torch.rand(1, 8, *ATTENDED, dtype=dtype)
    attention_s = _median(lambda: F.scaled_dot_product_attention(head, head, head, is_causal=True))
    left = torch.rand(rows, inner)
    moved_s = _median(lambda: left * left)
    large = torch.rand(1 << 24)
    weight_s = _median(lambda: large.sum())
    few_rows_s = _median(lambda: linear(inputs[:FEW_ROWS], weight))
    small = torch.rand(16)
    call_s = _median(lambda: [small + small for _ in range(1000)]) / 1000
    return (
        2.0 * rows * hidden * inner / product_s,
        2.0 * len(square) ** 2 * square.shape[1] / half_s,
        2.0 * rows * hidden * inner / wide_s,
        2.0 * 8 * ATTENDED[0] ** 2 * ATTENDED[1] / attention_s,
        8.0 * rows * inner / moved_s,
        large.nbytes / weight_s,
        weight.numel() * dtype.itemsize / few_rows_s,
        call_s,
    )


def _median(function: Callable[[], object], repeats: int = 7) -> float:
    with torch.no_grad():
        function()
        seconds = []
        for _ in range(repeats):
            start = time.thread_time()
            function()
            seconds.append(time.thread_time() - start)
        return sorted(seconds)[repeats // 2]
