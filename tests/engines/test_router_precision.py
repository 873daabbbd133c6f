"""Routers in half precision, and biases by which they choose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.half_weights import hold_half
from strop.engines.model import load_model
from strop.engines.moe.layers import is_choice_bias, moe_layers
from strop.engines.moe.precision import _multiplies_wide
from strop.engines.training import TrainEngine


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3_experts", "ernie4_5_moe", "glm4_moe"])
def test_routers_written_in_float32_multiply_in_it_also_where_the_model_computes_in_bfloat16(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    # A model of transformers in bfloat16 has rounded states and rounded weights, and multiplies them in float32.
    model = load_model(ModelConfig(path=str(tiny_folder(kind)), dtype="bfloat16"), device="cpu")
    router: Any = moe_layers(model.module)[0].router
    hidden = torch.randn(1, 7, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with model.precision():
        logits = router(hidden)[0]
    assert logits.dtype == torch.float32
    wanted = F.linear(hidden[0].bfloat16().float(), router.weight.bfloat16().float())
    if logits.ndim == 2 and torch.allclose(logits.sum(-1), torch.ones(7)):  # the probabilities of them
        wanted = wanted.softmax(-1)
    torch.testing.assert_close(logits.reshape(7, -1), wanted, rtol=1e-6, atol=1e-6)
    logits.square().sum().backward()
    assert router.weight.grad.dtype == torch.float32
    assert router.weight.grad.any()


def test_routers_written_in_the_precision_of_their_model_keep_it(
    tiny_folder: Callable[[str], Path],
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder("qwen3_moe")), dtype="bfloat16"), device="cpu")
    router: Any = moe_layers(model.module)[0].router
    with model.precision():
        assert router(torch.randn(1, 7, 32))[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "name"), [("ernie4_5_moe", "e_score_correction_bias"), ("afmoe", "expert_bias")]
)
def test_biases_of_choices_are_not_moved_by_weight_decay(
    tiny_folder: Callable[[str], Path], kind: str, name: str
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder(kind))), device="cpu")
    biases = {n: p.detach().clone() for n, p in model.named_parameters() if n.endswith(name)}
    assert biases
    assert all(bias.any() for bias in biases.values())
    optim = OptimizerConfig(lr=0.1, weight_decay=0.5)
    TrainEngine(model, EngineConfig(), optim, total_steps=None).step()
    after = dict(model.named_parameters())
    for n, bias in biases.items():
        assert torch.equal(after[n], bias), n


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "afmoe"])
def test_a_checkpoint_with_moments_of_biases_of_choices_is_gone_on_from(
    tiny_folder: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
    """Earlier versions trained these biases."""
    optim = OptimizerConfig(lr=0.1)
    model = load_model(ModelConfig(path=str(tiny_folder(kind))), device="cpu")
    for name, parameter in model.named_parameters():
        if is_choice_bias(name):
            parameter.requires_grad_(True)
    old = TrainEngine(model, EngineConfig(), optim, total_steps=None)
    old.step()
    old.save_state(tmp_path / "role")
    again = load_model(ModelConfig(path=str(tiny_folder(kind))), device="cpu")
    engine = TrainEngine(again, EngineConfig(), optim, total_steps=None)
    engine.load_state(tmp_path / "role")
    moments = engine.optimizer.state()[0]
    assert moments
    assert not any(is_choice_bias(name) for name in moments)
    for name, tensor in old.optimizer.state()[0].items():
        if not is_choice_bias(name):
            assert torch.equal(moments[name], tensor), name


@pytest.mark.parametrize("kind", ["ernie4_5_moe", "afmoe"])
def test_biases_of_choices_are_wide_in_a_frozen_model_over_ranks(
    tiny_folder: Callable[[str], Path], kind: str
) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder(kind)), dtype="bfloat16"), device="cpu")
    hold_half(model, device=torch.device("cpu"), is_sharded=True)
    types = {is_choice_bias(name): parameter.dtype for name, parameter in model.named_parameters()}
    assert types == {True: torch.float32, False: torch.bfloat16}


class _OfSequences(torch.nn.Module):
    """A router that takes hidden states [B, T, D] alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = hidden.shape
        return F.linear(hidden.view(rows * tokens, width).float(), self.weight.float())


def test_a_router_of_another_form_is_left_as_it_is() -> None:
    assert not _multiplies_wide(_OfSequences())
