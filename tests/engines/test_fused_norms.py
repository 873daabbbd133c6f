"""Norms by torch's fused function: the numbers and gradients of the model's own, and only where they are plain."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import nn
from transformers import MiniMaxConfig, MiniMaxForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from references.language_models import load_plain
from strop.engines import fused_norms
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


@pytest.mark.parametrize(
    ("kind", "num_half"),
    [
        ("llama", 4),
        ("qwen3", 4),
        ("ernie4_5_moe", 3),  # the router of the second layer reads states in float32
        ("deepseek_v3_experts", 3),
        ("llama4", 2),  # experts read states times scores
        ("flex_olmo", 0),  # norms of what attention and experts give, which is added to the residual stream
        ("afmoe", 3),  # norms before and behind each part
        ("gemma3n", 0),  # what attention reads is also added up
    ],
)
def test_products_alone_read_the_norms_in_their_precision(
    tiny_folder: Callable[[str], Path], kind: str, num_half: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounded = load_plain(tiny_folder(kind), dtype=torch.float32)
    wide = deepcopy(rounded)
    dtypes: list[torch.dtype] = []
    num_norms = use_fused_norms(rounded)
    for part in rounded.modules():
        if "forward" in vars(part):
            part.register_forward_hook(lambda part, args, output: dtypes.append(output.dtype))
    monkeypatch.setattr(fused_norms, "norms_before_products", lambda module: set())
    assert use_fused_norms(wide) == num_norms
    ids = torch.arange(3, 33)[None]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rounded(ids).logits, wide(ids).logits), "products would have rounded it"
    assert dtypes.count(torch.bfloat16) == num_half
    assert set(dtypes) <= {torch.bfloat16, torch.float32}
    rounded(ids)
    assert set(dtypes[len(dtypes) // 2 :]) == {torch.float32}, "without autocast nothing rounds"


def test_norms_whose_output_is_the_residual_stream_stay_wide() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = MiniMaxConfig(
        **sizes, intermediate_size=8, num_local_experts=2, vocab_size=11, num_hidden_layers=1,
        layer_types=["full_attention"],
    )  # fmt: skip
    assert not fused_norms.norms_before_products(MiniMaxForCausalLM(config))


def test_norms_and_gates_are_part_of_one_compiled_function() -> None:
    norm = weighted(LlamaRMSNorm(24))
    norm.forward = MethodType(fused_norms._before_products, norm)

    def layer(hidden: torch.Tensor) -> torch.Tensor:
        states = norm(hidden)
        return gated(states, states)

    hidden = torch.randn(5, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.compile(layer, backend="eager", fullgraph=True)(hidden)
        assert torch.equal(found, layer(hidden))
    assert found.dtype == torch.bfloat16
