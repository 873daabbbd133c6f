"""The ceiling of this machine: the fastest product of matrices that was found for it, and memory's bandwidth.

Benchmarks that say how much of the machine they use measure it here, in the run that they measure. Several large shapes
are tried, by torch's first choice (MKL), by oneDNN and, in float32, by strop's own function, with the threads that
tensor operations use.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from strop.engines.cpu.library import product_library
from strop.engines.cpu_products import compiled_product

SHAPES = ((2048, 2048, 2048), (4096, 1024, 1024), (2048, 256, 768), (256, 768, 768))
"""Rows, inner numbers and columns of the products that are tried."""
TRIES, LONGEST_S = 10, 5.0
"""Of one product, and of all its tries together."""


@dataclass(frozen=True)
class Ceiling:
    """The fastest product of matrices."""

    flops: float
    """Operations per second; a multiplication and an addition are two."""
    library: str
    shape: tuple[int, int, int]
    by_library: Mapping[str, float] = field(default_factory=dict)
    """The fastest of each library."""

    def json(self) -> dict[str, object]:
        """Facts for the line of a benchmark."""
        return {
            "gflops": round(self.flops / 1e9, 1), "library": self.library, "shape": list(self.shape),
            "by_library": {name: round(flops / 1e9, 1) for name, flops in self.by_library.items()},
        }  # fmt: skip


def product_ceiling(dtype: torch.dtype) -> Ceiling:
    """The fastest product of matrices of this precision."""
    best = Ceiling(0.0, "", (0, 0, 0))
    by_library: dict[str, float] = {}
    for shape in SHAPES:
        rows, inner, columns = shape
        inputs, weight = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        for library, product in libraries(dtype).items():
            seconds = shortest(lambda product=product, inputs=inputs, weight=weight: product(inputs, weight))
            flops = 2 * rows * inner * columns / seconds
            by_library[library] = max(flops, by_library.get(library, 0.0))
            if flops > best.flops:
                best = Ceiling(flops, library, shape)
    return replace(best, by_library=by_library)


def libraries(dtype: torch.dtype) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Functions of inputs [M, K] and a weight [N, K] that give inputs times the weight transposed."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"torch": torch.nn.functional.linear}
    takes_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if torch._C._has_mkldnn and (dtype == torch.float32 or (dtype == torch.bfloat16 and takes_bfloat16)):
        functions["onednn"] = lambda inputs, weight: torch.ops.mkldnn._linear_pointwise(
            inputs, weight, None, "none", [], ""
        )
    if dtype == torch.float32 and product_library() is not None:
        functions["strop"] = compiled_product
    return functions


def memory_bandwidth() -> float:
    """Bytes per second of reading a tensor that no cache holds."""
    row = torch.randn(1 << 26)
    return row.nbytes / shortest(row.sum)


def shortest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few calls, behind one that warms up."""
    work()
    taken: list[float] = []
    while len(taken) < TRIES and sum(taken) < LONGEST_S:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken)
