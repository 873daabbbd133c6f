"""Products by oneDNN: the same numbers and gradients as torch's own, taken by the weight alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.data.tiny_model import make_tiny_model
from strop.engines import causal_lm, cpu_products
from strop.engines.attention import PackedAttention, Segment
from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.cpu_products import LayerProducts, has_large, linear
from strop.engines.model import load_model


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a processor where oneDNN is faster; shapes of the weights that it was given."""
    taken: list[tuple[int, ...]] = []
    product = cpu_products._product

    def noted(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        taken.append(tuple(weight.shape))
        return product(inputs, weight, bias)

    monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(cpu_products, "_product", noted)
    return taken


@pytest.mark.parametrize("shape", [(7, 256), (2, 3, 256), (1, 256)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients_are_those_of_float64(
    shape: tuple[int, ...], has_bias: bool, everywhere: list[tuple[int, ...]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator) for size in (shape, (320, 256), (320,))][: 2 + has_bias]
    given = [one.requires_grad_() for one in made]
    exact = [one.detach().double().requires_grad_() for one in made]
    found, wanted = linear(*given), F.linear(*exact)
    grad = torch.randn(found.shape, generator=generator)
    found.backward(grad)
    wanted.backward(grad.double())
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4)
    for one, other in zip(given, exact, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=0, atol=2e-4)
    assert everywhere[0] == (320, 256)
    assert len(everywhere) == 3


def test_a_frozen_weight_gets_no_gradient(everywhere: list[tuple[int, ...]]) -> None:
    inputs, weight = torch.randn(4, 256, requires_grad=True), torch.randn(256, 256)
    linear(inputs, weight).sum().backward()
    torch.testing.assert_close(inputs.grad, weight.sum(0).expand(4, -1), rtol=0, atol=1e-4)
    assert len(everywhere) == 2


def test_layers_are_taken_while_it_is_entered_and_by_their_weights(everywhere: list[tuple[int, ...]]) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))
    inputs = torch.randn(3, 256)
    wanted = model(inputs)
    assert not everywhere
    with LayerProducts():
        found = model(inputs)
    assert everywhere == [(256, 256)]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    everywhere.clear()
    with LayerProducts(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(inputs).dtype == torch.bfloat16
    with LayerProducts():
        assert model(inputs[:0]).shape == (0, 8)
        model.double()(inputs.double())
    assert not everywhere


def test_a_model_gives_the_same_and_one_that_computes_again_is_left_alone(
    tmp_path: Path, everywhere: list[tuple[int, ...]]
) -> None:
    make_tiny_model(tmp_path, seed=0, num_layers=2, hidden_size=256, intermediate_size=512)
    ids, positions = torch.arange(3, 12)[None], torch.arange(9)[None]
    targets = torch.arange(4, 13)

    def grads(config: ModelConfig) -> tuple[Tensor, Tensor]:
        model = load_model(config, device="cpu")
        everywhere.clear()
        context = PackedAttention([Segment(start=0, length=9)], device=model.device)
        log_probs, _ = model.head.log_probs(model.hidden(ids, positions, context), targets, temperature=1.0)
        log_probs.sum().backward()
        grad = model.module.get_parameter("model.layers.0.mlp.up_proj.weight").grad
        assert grad is not None
        return log_probs.detach(), grad

    path = str(tmp_path)
    wanted = grads(ModelConfig(path=path, dtype="float32", gradient_checkpointing=True))
    assert not everywhere
    found = grads(ModelConfig(path=path, dtype="float32"))
    assert len(everywhere) > 10
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("capability", "vendor", "is_faster"),
    [("AVX512", "AuthenticAMD", True), ("AVX2", "AuthenticAMD", False), ("AVX512", "GenuineIntel", False)],
)
def test_it_is_a_matter_of_the_processor(
    capability: str, vendor: str, is_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\n")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(cpu_products, "CPU_INFO", tmp_path / "cpuinfo")
    cpu_products.is_onednn_faster.cache_clear()
    try:
        assert cpu_products.is_onednn_faster() is is_faster
        assert has_large([nn.Parameter(torch.zeros(256, 256))]) is is_faster
        assert not has_large([nn.Parameter(torch.zeros(255, 256)), nn.Parameter(torch.zeros(1 << 17))])
    finally:
        cpu_products.is_onednn_faster.cache_clear()


def test_on_a_device_no_parameter_is_looked_at(
    tiny: Callable[..., CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on a GPU has hundreds, in every decode step."""
    model, seen = tiny("qwen3", dtype="float32"), []
    monkeypatch.setattr(causal_lm, "layer_products", lambda parameters: seen.append(1) or nullcontext())
    with model.precision():
        assert seen == [1]
    monkeypatch.setattr(model, "device", torch.device("cuda"))
    with model.precision():
        assert seen == [1]
