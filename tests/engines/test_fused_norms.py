"""Norms by torch's fused function: the numbers and gradients of the model's own, and only where they are plain."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from strop.engines.fused_norms import use_fused_norms
from strop.engines.gate_kernels import gated

Norm = LlamaRMSNorm | Qwen3RMSNorm


def weighted(norm: Norm) -> Norm:
    nn.init.normal_(norm.weight, mean=1.0)
    return norm


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_numbers_and_gradients_are_those_of_the_models_own(kind: type[Norm]) -> None:
    own = weighted(kind(24, eps=1e-5))
    fused = deepcopy(own)
    assert use_fused_norms(nn.ModuleList([fused])) == 1
    hidden = torch.randn(3, 7, 24, requires_grad=True)
    ours, wanted = fused(hidden), own(hidden)
    torch.testing.assert_close(ours, wanted)
    weight = torch.randn(3, 7, 24)
    grads = torch.autograd.grad((ours * weight).sum(), (hidden, fused.weight))
    wanted_grads = torch.autograd.grad((wanted * weight).sum(), (hidden, own.weight))
    torch.testing.assert_close(grads, wanted_grads)


def test_half_inputs_give_what_wide_weights_make_of_them() -> None:
    own = weighted(LlamaRMSNorm(24))
    fused = deepcopy(own)
    use_fused_norms(nn.ModuleList([fused]))
    hidden = torch.randn(5, 24).to(torch.bfloat16)
    assert fused(hidden).dtype == own(hidden).dtype == torch.float32
    torch.testing.assert_close(fused(hidden), own(hidden), atol=0.02, rtol=0.01)  # its own rounds in between


def test_a_norm_that_adds_one_to_its_weight_stays() -> None:
    norm = GemmaRMSNorm(24)
    hidden = torch.randn(2, 24)
    before = norm(hidden)
    assert use_fused_norms(nn.ModuleList([norm])) == 0
    assert torch.equal(norm(hidden), before)


def test_a_copy_of_a_model_norms_with_its_own_weight() -> None:
    first = weighted(LlamaRMSNorm(8))
    use_fused_norms(nn.ModuleList([first]))
    second = deepcopy(first)
    nn.init.zeros_(second.weight)
    assert not second(torch.randn(2, 8)).any()
    assert first(torch.randn(2, 8)).any()


def test_a_layers_norm_of_the_residual_stream_gives_the_precision_of_products() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([weighted(LlamaRMSNorm(24))])
    model.last = weighted(LlamaRMSNorm(24))
    assert use_fused_norms(model) == 2
    hidden = torch.randn(5, 24)
    wide = model.layers[0](hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.layers[0](hidden), wide.bfloat16()), "what a product would make of it"
        assert model.layers[0](hidden.bfloat16()).dtype == torch.float32, "of a projection: a norm of heads"
        assert model.last(hidden).dtype == torch.float32
    assert wide.dtype == torch.float32


def test_norms_and_gates_are_part_of_one_compiled_function() -> None:
    layers = nn.ModuleList([weighted(LlamaRMSNorm(24))])
    use_fused_norms(layers)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        states = layers[0](hidden)
        return gated(states, states)

    hidden = torch.randn(5, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.compile(layer, backend="eager", fullgraph=True)(hidden)
        assert torch.equal(found, layer(hidden))
    assert found.dtype == torch.bfloat16
