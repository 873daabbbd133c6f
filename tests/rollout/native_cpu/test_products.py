"""Products by oneDNN and in C: the same numbers and gradients as torch's own, taken by the weight alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strop.data.tiny_model import make_tiny_model
from strop.engines import causal_lm, cpu_products
from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM
from strop.engines.config import ModelConfig
from strop.engines.cpu import library
from strop.engines.cpu.library import product_library
from strop.engines.cpu_products import (
    HALF_NUMBERS,
    HalfProducts,
    LayerProducts,
    has_large,
    layer_products,
    linear,
    steady_rows,
)
from strop.engines.model import load_model
from strop.engines.segments import Segment
from strop.trainer.plan.tracing import Recorder
from strop.utils.machine_choice import CPU_INFO


def machine_flags() -> set[str]:
    """What the processor has, as Linux says it."""
    return set(CPU_INFO.read_text(encoding="utf-8").split()) if CPU_INFO.is_file() else set()


NEEDS_GCC = pytest.mark.skipif(product_library() is None, reason="needs gcc")


def shapes_given_to(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Of the weights that this function of cpu_products will be called with."""
    taken: list[tuple[int, ...]] = []
    product = getattr(cpu_products, name)

    def noted(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        taken.append(tuple(weight.shape))
        result: Tensor = product(inputs, weight, bias)
        return result

    monkeypatch.setattr(cpu_products, name, noted)
    return taken


@pytest.fixture(params=["_product", pytest.param("compiled_product", marks=NEEDS_GCC)], ids=["onednn", "c"])
def everywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """As on a processor where oneDNN, or products.c, is the fastest; shapes of the weights that it was given."""
    monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(cpu_products, "is_compiled_faster", lambda: request.param == "compiled_product")
    return shapes_given_to(request.param, monkeypatch)


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
    assert everywhere == [(320, 256), (256, 320)]  # and the gradient by the weight otherwise


@pytest.mark.parametrize("mode", [LayerProducts, HalfProducts])
@pytest.mark.usefixtures("everywhere")
def test_operands_by_their_names_and_inputs_of_one_dimension(
    mode: Callable[[], LayerProducts | HalfProducts],
) -> None:
    is_half = mode is HalfProducts
    inputs, weight = torch.randn(3, 256), torch.randn(128, 256, requires_grad=True)
    wanted = F.linear(inputs, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half), mode():
        by_name = F.linear(input=inputs, weight=weight, bias=None)
        one = inputs[0].clone().requires_grad_()
        F.linear(one, weight=weight).float().sum().backward()
    torch.testing.assert_close(by_name.float(), wanted, rtol=0, atol=0.5 if is_half else 1e-4)
    assert type(by_name.grad_fn).__name__ == ("_HalfLinearBackward" if is_half else "_LinearBackward")
    assert one.grad is not None
    torch.testing.assert_close(one.grad, weight.sum(0), rtol=0, atol=0.5 if is_half else 1e-4)


@pytest.mark.parametrize("mode", [LayerProducts, HalfProducts])
@pytest.mark.usefixtures("everywhere")
def test_a_frozen_weight_gets_no_gradient_and_keeps_no_inputs(
    mode: Callable[[], LayerProducts | HalfProducts],
) -> None:
    is_half = mode is HalfProducts
    inputs, weight, kept = torch.randn(4, 256, requires_grad=True), torch.randn(256, 256), list[Tensor]()
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_half),
        mode(),
    ):
        product = F.linear(inputs, weight)
    product.float().sum().backward()
    assert [tuple(one.shape) for one in kept] == [(256, 256)]
    wanted = weight.sum(0).expand(4, -1)
    torch.testing.assert_close(inputs.grad, wanted, rtol=0, atol=0.5 if is_half else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "depth"), [(48, 32), (16, 32), (103, 128)])
def test_without_gradients_a_row_of_a_small_layer_is_the_same_beside_others(
    width: int, depth: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, depth, generator=generator).to(dtype)
    layer = nn.Linear(depth, width).to(dtype)
    for entered in (steady_rows, lambda: layer_products(layer.parameters())):
        with torch.no_grad(), entered():
            together = layer(inputs)
            for count in (1, 2, 3):
                assert torch.equal(layer(inputs[:count]), together[:count])
                assert torch.equal(layer(inputs[None, :count]), together[None, :count])
            assert torch.equal(layer(inputs[0]), together[0])
            assert layer(inputs[:0]).shape == (0, width)


@pytest.mark.usefixtures("everywhere")
def test_a_row_of_a_large_layer_is_the_same_beside_others() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (torch.randn(size, generator=generator) for size in ((4, 256), (320, 256)))
    for count in (1, 2, 3):
        assert torch.equal(linear(inputs[:count], weight), linear(inputs, weight)[:count])
        product = linear(inputs[:count], weight.requires_grad_())
        product.addmm_(torch.ones(count, 2), torch.ones(2, 320))  # an adapter's part
        product.sum().backward()


@NEEDS_GCC
@pytest.mark.parametrize(
    ("count", "width", "depth"), [(1, 1, 16), (3, 7, 32), (300, 20, 80), (700, 13, 48), (0, 3, 16)]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_compiled_gradients_are_those_of_float64(count: int, width: int, depth: int, threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, inputs = (torch.randn(size, count, generator=generator).T for size in (width, depth))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = cpu_products._compiled_gradient(rows, inputs)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.double(), rows.T.double() @ inputs.double(), rtol=0, atol=1e-4)
    assert torch.equal(found, cpu_products._compiled_gradient(rows, inputs))
    total = torch.ones(width, depth)
    cpu_products._compiled_gradient(rows, inputs, total)
    torch.testing.assert_close(total, found + 1, rtol=0, atol=1e-4)


SHAPES = [(1, 16, 16), (7, 80, 32), (400, 48, 528), (0, 16, 16)]


@NEEDS_GCC
@pytest.mark.parametrize(("count", "width", "depth"), SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_compiled_products_are_those_of_float64_whatever_is_beside_a_row(
    count: int, width: int, depth: int, has_bias: bool
) -> None:
    check_compiled_products(count, width, depth, has_bias)


@pytest.fixture
def for_zen_2(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As compiled for a processor for which gcc takes products and sums apart."""
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-march=haswell", "-mtune=znver2"))
    product_library.cache_clear()
    yield
    product_library.cache_clear()


@NEEDS_GCC
@pytest.mark.skipif("avx2" not in machine_flags(), reason="needs a processor with AVX2")
@pytest.mark.usefixtures("for_zen_2")
@pytest.mark.parametrize(("count", "width", "depth"), SHAPES)
def test_so_they_are_as_compiled_for_another_processor(count: int, width: int, depth: int) -> None:
    compiled = product_library()
    assert compiled is not None
    assert compiled.lanes() == 8
    check_compiled_products(count, width, depth, has_bias=False)


def check_compiled_products(count: int, width: int, depth: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias, grad = (
        torch.randn(size, generator=generator)
        for size in ((count, depth), (width, depth), (width,), (count, width))
    )
    sides: list[Any] = [(inputs, weight, bias if has_bias else None), (grad, weight.T)]
    before = torch.get_num_threads()
    every: list[tuple[Tensor, Tensor]] = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            one, other = (cpu_products.compiled_product(*side) for side in sides)
            every.append((one, other))
        finally:
            torch.set_num_threads(before)
    wanted = F.linear(inputs.double(), weight.double(), bias.double() if has_bias else None)
    for one, other, exact in zip(*every, (wanted, grad.double() @ weight.double()), strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=0, atol=1e-4)
        assert torch.equal(one, other)
    for some in [*range(1, 8), 300]:  # up to six take no copy of the weight
        alone, back = (cpu_products.compiled_product(x[-some:], *rest) for x, *rest in sides)
        assert torch.equal(alone, every[0][0][-some:])
        assert torch.equal(back, every[0][1][-some:])


@NEEDS_GCC
def test_weights_of_whole_vectors_are_multiplied_in_c_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_products, "is_compiled_faster", lambda: True)
    by_onednn, in_c = (shapes_given_to(name, monkeypatch) for name in ("_product", "compiled_product"))
    for onednn, taken in ((True, [(103, 256), (256, 103)]), (False, [])):
        monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda onednn=onednn: onednn)
        by_onednn.clear()
        in_c.clear()
        for width in (320, 103):
            weight, inputs = (torch.randn(n, 256, requires_grad=True) for n in (width, 5))
            linear(inputs, weight).sum().backward()
            torch.testing.assert_close(inputs.grad, weight.detach().sum(0).expand(5, -1), rtol=0, atol=1e-4)
        assert in_c == [(320, 256), (256, 320)]
        assert by_onednn == taken  # and what is left goes to torch


@pytest.mark.usefixtures("everywhere")
def test_operands_that_do_not_fit_are_refused() -> None:
    weight = torch.zeros(320, 256)
    for width in (128, 512):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            linear(torch.zeros(4, width), weight)
    assert torch.equal(linear(torch.zeros(4, 256), weight, torch.ones(1)), torch.ones(4, 320))


def test_a_gradient_of_a_gradient_is_refused(everywhere: list[tuple[int, ...]]) -> None:
    inputs, weight = torch.randn(4, 256, requires_grad=True), torch.randn(256, 256)
    (grad,) = torch.autograd.grad(linear(inputs, weight).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_gives_the_same_and_one_that_computes_again_is_left_alone(
    dtype: str, tmp_path: Path, everywhere: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 as on a processor without products of it, where oneDNN multiplies rounded numbers."""
    monkeypatch.setattr(cpu_products, "is_half_faster", lambda: False)
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
    wanted = grads(ModelConfig(path=path, dtype=dtype, gradient_checkpointing=True))
    assert all(103 in shape for shape in everywhere)  # the head at most: it is not computed again
    found = grads(ModelConfig(path=path, dtype=dtype))
    assert len(everywhere) > 10
    for one, other in zip(found, wanted, strict=True):
        error = float((one - other).norm() / other.norm())
        assert error < (1e-4 if dtype == "float32" else 2**-5)


@pytest.mark.parametrize("name", ["onednn", pytest.param("compiled", marks=NEEDS_GCC)])
@pytest.mark.parametrize(("speedup", "is_faster"), [(2.0, True), (1.1, True), (1.01, False), (0.5, False)])
def test_it_is_a_matter_of_a_measurement_that_is_taken_once(
    name: str, speedup: float, is_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = getattr(cpu_products, f"is_{name}_faster")
    other = "compiled" if name == "onednn" else "onednn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speedups = iter([speedup, 1.0 if is_faster else 2.0])
    monkeypatch.setattr(cpu_products, f"{name}_speedup", lambda: next(speedups))
    monkeypatch.setattr(cpu_products, f"is_{other}_faster", lambda: False)
    choice.cache_clear()
    try:
        for _ in range(2):  # the second is another process, which measures something else
            assert choice() is is_faster
            assert has_large([nn.Parameter(torch.zeros(256, 256))]) is is_faster
            assert not has_large([nn.Parameter(torch.zeros(127, 128)), nn.Parameter(torch.zeros(1 << 17))])
            choice.cache_clear()
    finally:
        choice.cache_clear()


def test_other_sources_are_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        for name, speedup in (("products-1", 2.0), ("products-2", 0.5), ("products-1", 0.5)):
            monkeypatch.setattr(
                cpu_products, "product_library", lambda name=name: SimpleNamespace(_name=f"/cache/{name}.so")
            )
            monkeypatch.setattr(cpu_products, "compiled_speedup", lambda speedup=speedup: speedup)
            cpu_products.is_compiled_faster.cache_clear()
            assert cpu_products.is_compiled_faster() is (name == "products-1")
    finally:
        cpu_products.is_compiled_faster.cache_clear()


def test_both_libraries_are_timed() -> None:
    assert 0.05 < cpu_products.onednn_speedup() < 20
    if product_library() is not None:
        assert 0.05 < cpu_products.compiled_speedup() < 20
    assert 0.001 < cpu_products.half_speedup() < 20


def test_a_speedup_is_of_the_fastest_calls() -> None:
    waits = {"first": iter([0.1, *[0.02] * 20]), "other": iter([0.0, 0.03, *[0.01] * 20])}
    first, other = (lambda name=name: time.sleep(next(waits[name])) for name in waits)
    assert 1.5 < cpu_products._speedup(first, other) < 2.5


def test_precisions_are_timed_as_they_are_within_autocast_too() -> None:
    seen: list[torch.dtype] = []
    inputs, weight = torch.ones(2, 3), torch.ones(4, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cpu_products._speedup(lambda: seen.append(F.linear(inputs, weight).dtype), lambda: None)
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("is_faster", [True, False])
def test_gradients_by_weights_are_in_c_where_rows_are_whole_vectors(
    is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    compiled = cpu_products._compiled_gradient
    monkeypatch.setattr(cpu_products, "is_onednn_faster", lambda: True)
    monkeypatch.setattr(cpu_products, "is_compiled_faster", lambda: is_faster)
    forward = shapes_given_to("_product", monkeypatch)
    monkeypatch.setattr(
        cpu_products, "_compiled_gradient", lambda *given: taken.append(1) or compiled(*given)
    )
    for depth in (256, 250):  # the second is not of whole vectors
        weight = torch.randn(300, depth, requires_grad=True)
        inputs = torch.randn(9, depth)
        linear(inputs, weight).sum().backward()
        torch.testing.assert_close(weight.grad, inputs.sum(0).expand(300, depth), rtol=1e-5, atol=1e-5)
    assert len(taken) == (1 if is_faster and product_library() is not None else 0)
    assert forward == [(300, 256), (300, 250)]  # whose columns are not


@pytest.mark.parametrize("is_faster", [True, False])
def test_products_in_half_precision_are_those_of_autocast_and_round_once(
    is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "is_half_faster", lambda: is_faster)
    generator = torch.Generator().manual_seed(0)
    layers = nn.ModuleList([nn.Linear(24, 40), nn.Linear(24, 16, bias=False)])
    inputs = torch.randn(2, 9, 24, generator=generator)
    every: list[list[Tensor]] = []
    for products in (HalfProducts(), nullcontext()):
        given = inputs.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16), products:
            outputs = [layer(given) for layer in layers]
        total = sum((output.float().square() * 0.5).sum() for output in outputs)
        every.append([*outputs, *torch.autograd.grad(total, [given, *layers.parameters()])])
    found, wanted = every
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() < 2**-8 * other.norm()
    mode, taken = HalfProducts(), []
    rounded = mode._rounded
    monkeypatch.setattr(mode, "_rounded", lambda given: taken.append(rounded(given)) or rounded(given))
    with torch.autocast("cpu", dtype=torch.bfloat16), mode:
        for layer in layers:
            layer(inputs)
        inputs.add_(1.0)
        layers[0](inputs)
    assert taken[0] is taken[1]
    assert torch.equal(taken[2], inputs.bfloat16())


@pytest.mark.parametrize("count", [0, 1, 4097])
def test_wide_numbers_of_many_rows_are_never_there_together(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where products are made in float32: 2,048 rows at a time here, and the last one by itself."""
    monkeypatch.setattr(cpu_products, "is_half_faster", lambda: False)
    layer, inputs = nn.Linear(512, 256, bias=False), torch.randn(1, count, 512).bfloat16()
    with torch.no_grad(), Recorder() as recorder, torch.autocast("cpu", dtype=torch.bfloat16), HalfProducts():
        output = layer(inputs)
    weights = layer.weight.numel() * (2 + 4)
    assert recorder.peak - recorder.live <= weights + 4 * HALF_NUMBERS * (1 + 256 / 512)
    expected = inputs.float() @ layer.weight.bfloat16().float().T
    torch.testing.assert_close(output, expected.bfloat16(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("is_faster", [True, False])
def test_what_is_kept_for_the_backward_pass_is_in_half_precision(
    is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "is_half_faster", lambda: is_faster)
    layers, inputs = nn.ModuleList([nn.Linear(24, 40), nn.Linear(24, 16)]), torch.randn(9, 24)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one),
        torch.autocast("cpu", dtype=torch.bfloat16),
        HalfProducts(),
    ):
        for layer in layers:
            layer(inputs)
    assert [tuple(one.shape) for one in kept] == [(9, 24), (40, 24), (9, 24), (16, 24)]
    assert {one.dtype for one in kept} == {torch.bfloat16}
    assert kept[0].data_ptr() == kept[2].data_ptr()  # of inputs once


def test_precisions_are_compared_with_the_product_in_float32_that_is_taken(
    everywhere: list[tuple[int, ...]],
) -> None:
    cpu_products.half_speedup()
    assert everywhere


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
