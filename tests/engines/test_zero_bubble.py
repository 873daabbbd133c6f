"""Gradients of weights behind their backward pass: those of plain autograd, and steps of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_lora_axes import adapted
from test_pipeline_parallel import step_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from references.engine_steps import PAIRS, Setting, check, engine_of, one_process, rank_step, run_step
from references.rank_processes import Ranks, run_ranks
from strop.engines.parallel.ranks import alone
from strop.engines.parallel.weight_gradients import WeightGradients, WeightProduct

Folder = Callable[[str], Path]
ZERO_BUBBLE: dict[str, Any] = {"pp_size": 2, "schedule": "zero_bubble", "max_tokens": 28}


class Layer(nn.Module):
    """A matrix with a bias, norms, and two matrices of one parameter, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.experts = nn.Parameter(torch.randn(2, 6, 6))
        self.frozen = nn.Linear(6, 4).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        middle = self.norm(torch.tanh(self.first(hidden)))
        for number in (0, 1, 0):
            middle = torch.tanh(F.linear(middle, self.experts[number]))
        return self.frozen(middle)


def layer_and_inputs() -> tuple[Layer, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Layer().double(), torch.randn(2, 5, 4, dtype=torch.float64)


@pytest.mark.parametrize("recomputes", [False, True])
def test_gradients_are_those_of_autograd(recomputes: bool) -> None:
    layer, inputs = layer_and_inputs()
    plain, plain_inputs = copy.deepcopy(layer), inputs.clone().requires_grad_(True)
    inputs.requires_grad_(True)
    for _ in range(2):  # gradients are added
        plain(plain_inputs).square().sum().backward()
    left_out = WeightGradients([layer])
    products: list[list[WeightProduct]] = []
    for _ in range(2):
        output = checkpoint(layer, inputs, use_reentrant=False) if recomputes else layer(inputs)
        output.square().sum().backward()
        products.append(left_out.take())
    assert [len(of_pass) for of_pass in products] == [4, 4]
    assert layer.first.weight.grad is None
    assert layer.experts.grad is None
    torch.testing.assert_close(inputs.grad, plain_inputs.grad)
    torch.testing.assert_close(layer.first.bias.grad, plain.first.bias.grad)
    torch.testing.assert_close(layer.norm.weight.grad, plain.norm.weight.grad)
    for product in [product for of_pass in products for product in of_pass]:
        product.add()
    for (name, ours), theirs in zip(layer.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)
    assert layer.frozen.weight.grad is None


def test_a_layer_behind_which_nobody_waits_is_not_left_out() -> None:
    layer, inputs = layer_and_inputs()
    plain = copy.deepcopy(layer)
    left_out = WeightGradients([layer])
    layer(inputs).square().sum().backward()
    plain(inputs).square().sum().backward()
    torch.testing.assert_close(layer.first.weight.grad, plain.first.weight.grad)
    assert len(left_out.take()) == 3
    with torch.no_grad():
        torch.testing.assert_close(layer(inputs), plain(inputs))
    assert left_out.take() == []


class Product(nn.Linear):
    """A matrix with a bias, by a call of its own."""

    def __init__(self, call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(4, 6, dtype=torch.float64)
        self.call = call

    def forward(self, hidden: Tensor) -> Tensor:
        return self.call(hidden, self.weight, self.bias)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, b: F.linear(x, weight=w, bias=b),
        lambda x, w, b: F.linear(bias=b, input=x, weight=w),
        lambda x, w, b: F.linear(x, w, bias=b),
        lambda x, w, b: F.linear(x, weight=w) + b,
    ],
)
def test_operands_by_name_are_those_by_place(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    layer, (_, inputs) = Product(call), layer_and_inputs()
    left_out = WeightGradients([layer])
    layer(inputs.requires_grad_(True)).square().sum().backward()
    assert layer.weight.grad is None
    (product,) = left_out.take()
    product.add()
    grad, weight, bias = inputs.grad, layer.weight.grad, layer.bias.grad
    inputs.grad = layer.weight.grad = layer.bias.grad = None
    (inputs @ layer.weight.T + layer.bias).square().sum().backward()
    for ours, theirs in ((grad, inputs.grad), (weight, layer.weight.grad), (bias, layer.bias.grad)):
        torch.testing.assert_close(ours, theirs)


def test_products_keep_nothing_of_the_graph() -> None:
    layer, inputs = layer_and_inputs()
    left_out = WeightGradients([layer])
    layer(inputs.requires_grad_(True)).sum().backward()
    for product in left_out.take():
        assert product.inputs.grad_fn is None
        assert product.output_grads.grad_fn is None


# A head that is the embedding; a head of its own; biases; experts one by one, with a router.
@pytest.mark.parametrize(
    ("kind", "setting"),
    [
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        ("llama", {"checkpointing": True, "sync": "each"}),
        pytest.param("llama_biased", {"offload": "all"}, marks=pytest.mark.slow),
        ("qwen3_moe", {"checkpointing": True}),
    ],
    ids=str,
)
def test_two_stages_take_the_step_of_one_process(
    tiny_folder: Folder, kind: str, setting: dict[str, Any]
) -> None:
    folder = str(tiny_folder(kind))
    expected = one_process(Setting(folder=folder))
    check(Setting(folder=folder, **ZERO_BUBBLE, **setting), PAIRS, 2, expected)


def test_half_precision_differs_by_its_rounding(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("llama"))
    plain = Setting(folder=folder, dtype="bfloat16", pp_size=2, max_tokens=28)
    for ours, theirs in zip(
        run_ranks(rank_step, 2, replace(plain, schedule="zero_bubble"), PAIRS),
        run_ranks(rank_step, 2, plain, PAIRS),
        strict=True,
    ):
        assert ours.loss == theirs.loss
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=2**-8)
        for name, weight in ours.weights.items():
            torch.testing.assert_close(weight, theirs.weights[name], atol=2e-3, rtol=0, msg=name)


def test_adapters_over_two_stages(five_layers: Path, tmp_path: Path) -> None:
    one = adapted(five_layers, tmp_path)
    expected = run_step(alone("cpu"), one, PAIRS)
    cut = Setting(folder=one.folder, lora=one.lora, checkpointing=True, **ZERO_BUBBLE)
    check(cut, PAIRS, 2, expected)


@pytest.mark.dist
@pytest.mark.parametrize(
    "axes", [{}, {"sync": "each"}, {"pp_size": 4}, {"tp_size": 2}, {"cp_size": 2, "checkpointing": True}]
)
def test_four_ranks_take_the_step_of_one_process(five_layers: Path, axes: dict[str, Any]) -> None:
    expected = one_process(Setting(folder=str(five_layers)))
    check(Setting(folder=str(five_layers), **ZERO_BUBBLE | axes), PAIRS, 4, expected)


@pytest.mark.dist
@pytest.mark.parametrize("ep_size", [1, 2])
def test_experts_of_four_ranks_take_the_step_of_one_process(tiny_folder: Folder, ep_size: int) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    expected = one_process(Setting(folder=folder))
    check(Setting(folder=folder, ep_size=ep_size, **ZERO_BUBBLE), PAIRS, 4, expected)


@pytest.mark.dist
def test_a_rank_without_rows_passes_in_step(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3"))
    pairs = PAIRS[3:4]  # the second of two data-parallel groups has none
    expected = run_step(alone("cpu"), Setting(folder=folder), pairs)
    check(Setting(folder=folder, **ZERO_BUBBLE), pairs, 4, expected)


def products_of_step(ranks: Ranks, setting: Setting) -> tuple[int, list[int]]:
    """Matrices of a rank's layers, and the products that each backward pass of a step left out."""
    engine = engine_of(ranks.join(**setting.axes), setting)
    pipeline = engine.model.pipeline
    assert pipeline is not None
    left_out = pipeline.weight_gradients
    assert left_out is not None
    counts: list[int] = []
    take = left_out.take

    def counted() -> list[WeightProduct]:
        products = take()
        counts.append(len(products))
        return products

    left_out.take = counted  # type: ignore[method-assign]
    step_of(engine)
    layers = pipeline.own_layers(0)
    return sum(type(part) is nn.Linear for layer in layers for part in layer.modules()), counts


def test_every_matrix_of_the_layers_is_left_out(five_layers: Path) -> None:
    results = run_ranks(products_of_step, 2, Setting(folder=str(five_layers), **ZERO_BUBBLE))
    assert [num_matrices for num_matrices, _ in results] == [3 * 7, 2 * 7]
    for num_matrices, counts in results:
        assert len(counts) > 2
        assert set(counts) == {num_matrices}
