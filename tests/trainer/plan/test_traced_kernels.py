"""Kernels of an accelerator as a trace sees them keep the tensors that the real ones keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from strop.engines import fused_norms, gate_kernels, norm_kernels
from strop.trainer.plan.accelerator import fused_gate, fused_norm, fused_norm_before_products

ROWS, DIM, INNER = 6, 16, 40


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor has them; they compute nothing."""
    for module in (fused_norms, gate_kernels):
        monkeypatch.setattr(module, "has_kernels", lambda device: True)

    def normed(hidden: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(hidden, dtype=dtype), torch.zeros(len(hidden))

    monkeypatch.setattr(norm_kernels, "normed", normed)
    monkeypatch.setattr(gate_kernels, "product_of", lambda gates, ups: torch.zeros_like(gates))


def kept(work: Callable[[], Tensor]) -> tuple[list[tuple[torch.dtype, tuple[int, ...]]], torch.dtype]:
    """Tensors that a forward pass keeps for the backward pass, and what it gives."""
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        return saved, work().dtype


def bytes_of(saved: list[tuple[torch.dtype, tuple[int, ...]]]) -> int:
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in saved)


@pytest.mark.parametrize(
    ("traced", "real", "gives"),
    [
        (fused_norm, fused_norms._fused, torch.float32),
        (fused_norm_before_products, fused_norms._before_products, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_keeps_what_it_read_and_a_number_of_each_row(
    traced: Callable[..., Tensor], real: Callable[..., Tensor], gives: torch.dtype, dtype: torch.dtype
) -> None:
    norm, hidden = LlamaRMSNorm(DIM), torch.zeros(ROWS, DIM, dtype=dtype, requires_grad=True)
    (planned, planned_dtype), (found, found_dtype) = (
        kept(lambda f=f: f(norm, hidden)) for f in (traced, real)
    )
    assert planned_dtype == found_dtype == gives
    assert bytes_of(planned) == bytes_of(found) == ROWS * DIM * dtype.itemsize + DIM * 4 + ROWS * 4


def test_a_gate_keeps_its_two_factors() -> None:
    part = LlamaMLP(LlamaConfig(hidden_size=DIM, intermediate_size=INNER, num_attention_heads=2))
    hidden = torch.zeros(ROWS, DIM, dtype=torch.bfloat16, requires_grad=True)
    planned, found = (kept(lambda f=f: f(part, hidden)) for f in (fused_gate, gate_kernels._forward))
    assert planned == found
    part.down_proj = nn.Identity()
    with_products, _ = kept(lambda: fused_gate(part, hidden))
    products, _ = kept(lambda: part.gate_proj(hidden) + part.up_proj(hidden))
    assert bytes_of(with_products) - bytes_of(products) == 2 * ROWS * INNER * 2
