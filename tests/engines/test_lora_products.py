"""An adapter added in place: PEFT's own forward pass and gradients, and fewer tensors of the output's size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from strop.data.tiny_model import make_tiny_model
from strop.engines import cpu_products
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.cpu.library import product_library
from strop.engines.cpu_products import LayerProducts
from strop.engines.lora.adapters import add_lora
from strop.engines.lora.products import add_in_place
from strop.engines.model import load_model
from strop.trainer.plan.tracing import Recorder

ADAPTER = "default"
HAS_GCC = product_library() is not None


def adapted(*, bias: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    module: Any = nn.Module()
    module.part = nn.Linear(6, 10, bias=bias, dtype=dtype)
    settings = peft.LoraConfig(r=2, lora_alpha=5, target_modules=["part"])
    peft.inject_adapter_in_model(settings, module, adapter_name=ADAPTER)
    layer = module.part.to(dtype)
    nn.init.normal_(layer.lora_B[ADAPTER].weight)
    return layer


def gradients(layer: Any, hidden: Tensor) -> list[Tensor]:
    hidden = hidden.clone().requires_grad_()
    output = layer(hidden)
    output.square().sum().backward()
    trained = [parameter.grad for parameter in layer.parameters() if parameter.grad is not None]
    layer.zero_grad()
    assert hidden.grad is not None
    return [output.detach(), hidden.grad, *trained]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 6), (2, 3, 6), (1, 0, 6)])
def test_output_and_gradients_are_those_of_peft(bias: bool, shape: tuple[int, ...]) -> None:
    layer, hidden = adapted(bias=bias), torch.randn(shape, dtype=torch.float64)
    expected = gradients(layer, hidden)
    add_in_place(layer)
    for got, wanted in zip(gradients(layer, hidden), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_nothing_of_the_size_of_the_output_is_made_beside_it() -> None:
    layer, hidden = adapted(), torch.randn(64, 6, dtype=torch.float64)
    add_in_place(layer)
    with Recorder() as recorder:
        layer(hidden)
    weights = recorder.live  # that were looked at
    assert recorder.peak - weights == 64 * (10 + 2) * 8  # and what the first matrix of rank 2 gives


@pytest.mark.parametrize(
    "is_compiling", [False, True]
)  # where torch adds the product with B itself, as on a GPU
def test_in_autocast_output_and_gradients_are_those_of_peft(
    is_compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, hidden = adapted(dtype=torch.float32), torch.randn(64, 6)
    expected = gradients(layer, hidden)
    add_in_place(layer)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: is_compiling)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = gradients(layer, hidden)
    assert [part.dtype for part in found] == [torch.bfloat16] + [torch.float32] * 3
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got.float(), wanted, rtol=0.03, atol=0.03 * float(wanted.abs().max()))


def test_in_autocast_rounded_states_are_not_kept_again() -> None:
    """PEFT widens them, and autocast rounds them for each adapter."""
    hidden = torch.randn(64, 6, dtype=torch.bfloat16)

    def kept(layer: Any) -> int:
        with Recorder() as recorder, torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(hidden)
        assert output.requires_grad
        return recorder.live

    theirs, ours = adapted(dtype=torch.float32), adapted(dtype=torch.float32)
    add_in_place(ours)
    assert kept(theirs) - kept(ours) >= hidden.numel() * 2


@pytest.mark.parametrize(
    "name",
    ["_product", pytest.param("compiled_product", marks=pytest.mark.skipif(not HAS_GCC, reason="needs gcc"))],
)
def test_a_layer_whose_product_is_that_of_another_library_gives_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of a layer that is not trained need no gradient, and nor does what is added to in place."""
    make_tiny_model(tmp_path, seed=0, num_layers=1)
    model = load_model(ModelConfig(path=str(tmp_path), dtype="float32"), device="cpu")
    add_lora(model, LoraConfig(rank=4, target_modules=("q_proj",)))
    (layer,) = (part for part in model.module.modules() if hasattr(part, "lora_A"))
    nn.init.normal_(layer.lora_B[ADAPTER].weight)
    hidden, taken = torch.randn(2, 9, 128), []

    def results() -> list[Tensor]:
        output = layer(hidden)
        output.square().sum().backward()
        grads = [layer.lora_A[ADAPTER].weight.grad, layer.lora_B[ADAPTER].weight.grad]
        layer.zero_grad()
        return [output.detach(), *grads]

    wanted = results()
    product = getattr(cpu_products, name)
    monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(cpu_products, "is_compiled_faster", lambda: name == "compiled_product")
    monkeypatch.setattr(cpu_products, name, lambda *given: taken.append(1) or product(*given))
    with LayerProducts():
        found = results()
    assert taken == [1]  # W x, of which nobody needs a gradient
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_states_of_one_dimension_go_peft_s_own_way() -> None:
    layer, hidden = adapted(), torch.randn(6, dtype=torch.float64)
    expected = layer(hidden)
    add_in_place(layer)
    assert torch.equal(layer(hidden), expected)


def test_an_adapter_that_is_off_adds_nothing() -> None:
    layer, hidden = adapted(), torch.randn(5, 6, dtype=torch.float64)
    add_in_place(layer)
    layer._disable_adapters = True
    assert torch.equal(layer(hidden), layer.base_layer(hidden))
