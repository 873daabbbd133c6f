"""Norms, gates and rotations in C: the numbers and gradients of the model's own, and only where they are plain."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import BitNetConfig, Gemma2Config, LlamaConfig, Qwen3Config
from transformers.models.bitnet.modeling_bitnet import BitNetMLP
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.idefics2.modeling_idefics2 import Idefics2MLP
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from strop.engines import cpu_products
from strop.engines.cpu import layers, library
from strop.engines.cpu.layers import gated, use_cpu_layers
from strop.engines.cpu.library import library_for, product_library, update_library
from strop.engines.cpu_products import LayerProducts
from strop.engines.parallel.weight_gradients import WeightGradients
from strop.engines.plain_gates import is_plain_gate
from strop.engines.rotary_kernels import rotate, with_kernel

pytestmark = pytest.mark.skipif(update_library() is None, reason="needs gcc")
SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 37,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def random_weights(part: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in part.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return part


def results(part: nn.Module, hidden: Tensor) -> list[Tensor]:
    """Output, and gradients by input and weights."""
    hidden = hidden.detach().requires_grad_()
    output = part(hidden)
    weights = torch.cos(torch.arange(float(output.numel()))).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), [hidden, *part.parameters()])]


@pytest.mark.parametrize(
    "own",
    [
        LlamaRMSNorm(24, eps=1e-5),
        Qwen3RMSNorm(24),
        LlamaMLP(LlamaConfig(**SIZES)),
        Qwen3MLP(Qwen3Config(**SIZES)),
    ],
    ids=lambda part: type(part).__name__,
)
@pytest.mark.parametrize("rows", [1, 7, 600])
def test_numbers_and_gradients_are_those_of_the_models_own(own: nn.Module, rows: int) -> None:
    own = random_weights(own)
    ours = deepcopy(own)
    assert sum(use_cpu_layers(nn.ModuleList([ours]))) == 1
    hidden = torch.randn(2, rows, 24, generator=torch.Generator().manual_seed(1))
    for tensor, expected in zip(results(ours, hidden), results(own, hidden), strict=True):
        torch.testing.assert_close(tensor, expected, atol=1e-3 * float(expected.abs().max()), rtol=1e-4)


def test_float64_and_traced_tensors_go_the_models_own_way() -> None:
    own = random_weights(LlamaRMSNorm(24)).double()
    ours = deepcopy(own)
    use_cpu_layers(nn.ModuleList([ours]))
    hidden = torch.randn(5, 24, dtype=torch.float64)
    assert torch.equal(ours(hidden), own(hidden))
    with torch.device("meta"):
        assert library_for(torch.empty(3)) is None
    assert library_for(torch.empty(3), torch.empty(3, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize(
    "own", [LlamaRMSNorm(24, eps=1e-5), LlamaMLP(LlamaConfig(**SIZES))], ids=["norm", "gate"]
)
def test_in_bfloat16_only_what_goes_in_and_comes_out_is_rounded(own: nn.Module) -> None:
    ours = deepcopy(random_weights(own))
    assert sum(use_cpu_layers(nn.ModuleList([ours]))) == 1
    ours.bfloat16()
    exact = deepcopy(own).bfloat16().double()
    hidden = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = results(ours, hidden)
    assert {tensor.dtype for tensor in found} == {torch.bfloat16}
    for tensor, expected in zip(found, results(exact, hidden.double()), strict=True):
        error = (tensor.double() - expected).norm() / expected.norm()
        assert error < 2**-7  # a number is rounded by 2^-9 of it at most, a few times


@pytest.mark.parametrize("has_compiler", [True, False])
def test_a_norm_has_the_precision_of_its_states(has_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under autocast: the weight in float32, the states in bfloat16."""
    if not has_compiler:
        monkeypatch.setattr(layers, "library_for", lambda *states: None)
        monkeypatch.setattr(layers, "update_library", lambda *dtype: None)
    ours = random_weights(Qwen3RMSNorm(24))
    exact = deepcopy(ours).double()
    assert use_cpu_layers(nn.ModuleList([ours])) == (1, 0)
    hidden = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = results(ours, hidden)
    assert [tensor.dtype for tensor in found] == [torch.bfloat16, torch.bfloat16, torch.float32]
    for tensor, expected in zip(found, results(exact, hidden.double()), strict=True):
        assert (tensor.double() - expected).norm() < 2**-7 * expected.norm()


def test_numbers_are_rounded_to_the_nearest_as_torch_rounds_them() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1, 1, 50, 64, generator=generator).bfloat16()
    ones = torch.ones(1, 50, 64)
    angles = torch.randn(1, 50, 64, generator=generator)
    assert torch.equal(rotate(states, ones, torch.zeros_like(ones)), states)
    rotated = rotate(states, angles, torch.zeros_like(ones))
    assert torch.equal(rotated, (states.float() * angles).bfloat16())
    states[0, 0, 3, 7] = float("nan")
    assert rotate(states, ones, torch.zeros_like(ones)).isnan().sum() == 2  # and the other number of the pair
    gates = torch.tensor([float("nan"), *range(40)], dtype=torch.bfloat16)
    ours = gated(gates, torch.ones_like(gates))
    assert torch.equal(ours.isnan(), gates.isnan())
    torch.testing.assert_close(ours[1:], nn.functional.silu(gates[1:].float()).bfloat16(), rtol=2**-8, atol=0)


def test_under_autocast_rotations_and_gates_stay_in_the_precision_of_products() -> None:
    part = random_weights(LlamaMLP(LlamaConfig(**SIZES)))
    use_cpu_layers(nn.ModuleList([part]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = part(torch.randn(5, 24))
    assert output.dtype == torch.bfloat16
    names = []
    node = output.grad_fn
    while node is not None:
        names.append(type(node).__name__)
        node = next((parent for parent, _ in node.next_functions if parent is not None), None)
    assert any("Gate" in name for name in names)


def test_another_activation_and_a_changed_layer_stay_as_they_are() -> None:
    gelu = Gemma2MLP(Gemma2Config(**SIZES))
    assert not is_plain_gate(gelu)

    class ScaledMLP(LlamaMLP):
        def forward(self, hidden: Tensor) -> Tensor:
            output: Tensor = 2 * super().forward(hidden)
            return output

    assert is_plain_gate(LlamaMLP(LlamaConfig(**SIZES)))
    assert not is_plain_gate(ScaledMLP(LlamaConfig(**SIZES)))
    assert use_cpu_layers(nn.ModuleList([gelu])) == (0, 0)


class AddedMLP(LlamaMLP):
    """Takes what is added to the result."""

    def forward(self, hidden: Tensor, added: Tensor | None = None) -> Tensor:
        output: Tensor = super().forward(hidden)
        return output if added is None else output + added


class ScaledOnceMLP(LlamaMLP):
    """Has a scale of its own, which training changes."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.scale * super().forward(hidden)
        return output


class CheckedMLP(LlamaMLP):
    """Refuses what is not of its width."""

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.shape[-1] != self.hidden_size:
            raise ValueError(f"{hidden.shape[-1]} numbers, not {self.hidden_size}")
        output: Tensor = super().forward(hidden)
        return output


@pytest.mark.parametrize(
    "part",
    [
        BitNetMLP(BitNetConfig(**SIZES)),
        AddedMLP(LlamaConfig(**SIZES)),
        ScaledOnceMLP(LlamaConfig(**SIZES)),
        CheckedMLP(LlamaConfig(**SIZES)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_a_part_with_more_to_it_stays_as_it_is(part: nn.Module) -> None:
    assert not is_plain_gate(part)
    before = part.forward
    use_cpu_layers(nn.ModuleList([part]))
    assert part.forward == before


@pytest.mark.parametrize("own", [LlamaRMSNorm(24), LlamaMLP(LlamaConfig(**SIZES))], ids=["norm", "gate"])
def test_a_gradient_of_a_gradient_is_refused(own: nn.Module) -> None:
    use_cpu_layers(nn.ModuleList([own]))
    hidden = torch.randn(2, 24, requires_grad=True)
    (grad,) = torch.autograd.grad(own(hidden).square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    first = random_weights(LlamaMLP(LlamaConfig(**SIZES)))
    use_cpu_layers(nn.ModuleList([first]))
    second = deepcopy(first)
    nn.init.zeros_(second.get_parameter("down_proj.weight"))
    assert not second(torch.randn(2, 24)).any()


def test_gates_far_from_zero_neither_overflow_nor_become_no_number() -> None:
    gates = torch.tensor([-200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0], requires_grad=True)
    ups = torch.ones(7, requires_grad=True)
    ours = gated(gates, ups)
    wanted = nn.functional.silu(gates.double()) * ups
    torch.testing.assert_close(ours.double(), wanted, atol=1e-6, rtol=1e-5)
    (grad,) = torch.autograd.grad(ours.sum(), gates)
    (expected,) = torch.autograd.grad(wanted.sum(), gates)
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-5)
    assert gated(torch.tensor([float("nan")]), torch.ones(1)).isnan().all()


def test_rotations_are_those_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 9, heads, 32, generator=generator).transpose(1, 2) for heads in (4, 2))
    angles = torch.randn(1, 9, 32, generator=generator)
    cosines, sines = angles.cos(), angles.sin()
    both: list[list[Tensor]] = []
    for function in (with_kernel(apply_rotary_pos_emb), apply_rotary_pos_emb):
        inputs = [query.clone().requires_grad_(), key.clone().requires_grad_()]
        rotated = function(*inputs, cosines, sines)
        total = sum((torch.cos(torch.arange(float(x.numel()))).view_as(x) * x).sum() for x in rotated)
        both.append([*rotated, *torch.autograd.grad(total, inputs)])
    assert "Rotation" in type(both[0][0].grad_fn).__name__  # else both are the model's own
    for tensor, expected in zip(*both, strict=True):
        torch.testing.assert_close(tensor, expected, atol=1e-6, rtol=1e-5)


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor where products in C are the fastest."""
    monkeypatch.setattr(cpu_products, "is_compiled_faster", lambda: True)


@pytest.fixture
def of_eight_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a processor without AVX-512."""
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-mno-avx512f"))
    product_library.cache_clear()
    yield
    product_library.cache_clear()


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def whole_part(frozen: tuple[str, ...] = ()) -> Any:
    part = random_weights(LlamaMLP(LlamaConfig(hidden_size=96, intermediate_size=176)))
    for name in frozen:
        part.get_parameter(f"{name}.weight").requires_grad_(False)
    use_cpu_layers(nn.ModuleList([part]))
    return part


@pytest.mark.parametrize("rows", [1, 130, 1100])
@pytest.mark.parametrize("frozen", [(), ("gate_proj", "down_proj"), ("gate_proj", "up_proj"), ("hidden",)])
@pytest.mark.usefixtures("in_c")
def test_a_whole_feed_forward_part_has_the_bits_of_its_layers(rows: int, frozen: tuple[str, ...]) -> None:
    check_whole_part(rows, frozen)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a flag of gcc for it")
@pytest.mark.usefixtures("in_c", "of_eight_lanes")
def test_it_has_them_in_vectors_of_eight_too() -> None:
    found = product_library()
    assert found is not None
    assert found.lanes() == 8
    check_whole_part(1100, ())


def check_whole_part(rows: int, frozen: tuple[str, ...]) -> None:
    part = whole_part(tuple(name for name in frozen if name != "hidden"))
    hidden = torch.randn(1, rows, 96, generator=torch.Generator().manual_seed(1))
    weights = torch.cos(torch.arange(hidden.numel())).view_as(hidden)
    every: list[list[Tensor]] = []
    for is_whole, threads in ((True, 1), (True, 3), (False, 1)):
        given = hidden.clone().requires_grad_("hidden" not in frozen)
        with LayerProducts(), num_threads(threads):
            output = (
                part(given) if is_whole else part.down_proj(gated(part.gate_proj(given), part.up_proj(given)))
            )
            with torch.no_grad():
                assert torch.equal(part(given), output)
        assert ("FeedForward" in type(output.grad_fn).__name__) is is_whole
        inputs = [tensor for tensor in (given, *part.parameters()) if tensor.requires_grad]
        with num_threads(threads):
            every.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    output, *grads = every[0]
    assert all(torch.equal(one, other) for one, other in zip(every[0], every[1], strict=True))
    assert torch.equal(output, every[2][0])
    for grad, expected in zip(grads, every[2][1:], strict=True):
        error = float((grad - expected).norm() / expected.norm())
        assert error < 1e-6  # torch adds the gradients by both products of the input in another order
    given = hidden.double().requires_grad_("hidden" not in frozen)
    exact = deepcopy(part).double()
    inputs = [tensor for tensor in (given, *exact.parameters()) if tensor.requires_grad]
    output = exact(given)
    wanted = [output, *torch.autograd.grad((output * weights).sum(), inputs)]
    for one, other in zip(every[0], wanted, strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.usefixtures("in_c")
def test_frozen_gates_keep_no_hidden_states() -> None:
    part, kept = whole_part(("gate_proj", "up_proj")), list[Tensor]()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one)
    with hooks, LayerProducts():
        part(torch.randn(3, 96, requires_grad=True))
    assert [tuple(one.shape) for one in kept] == [(176, 96), (176, 96), (96, 176), (3, 176), (3, 176)]


@pytest.mark.usefixtures("in_c")
def test_sizes_that_do_not_fit_one_another_are_left_to_the_layers() -> None:
    part, hidden = random_weights(Idefics2MLP(96, 176, 128, "silu")), torch.randn(3, 96)
    wanted = part(hidden)
    assert use_cpu_layers(nn.ModuleList([part])) == (0, 1)
    with LayerProducts():
        torch.testing.assert_close(part(hidden), wanted, atol=1e-3 * float(wanted.abs().max()), rtol=1e-4)
        with pytest.raises(RuntimeError):  # twice as many tokens of 96 numbers
            whole_part()(torch.randn(3, 192))


@pytest.mark.usefixtures("in_c")
def test_layers_of_a_part_are_called_one_by_one_where_somebody_looks_at_them() -> None:
    part, hidden = whole_part(), torch.randn(3, 96)

    def is_whole() -> bool:
        return "FeedForward" in type(part(hidden).grad_fn).__name__

    assert not is_whole()
    with LayerProducts():
        assert is_whole()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not is_whole()
        handle = part.up_proj.register_forward_hook(lambda *given: None)
        assert not is_whole()
        handle.remove()
        assert is_whole()
        handle = register_module_forward_hook(lambda *given: None)
        assert not is_whole()
        handle.remove()
        part.up_proj.bias = nn.Parameter(torch.zeros(176))
        assert not is_whole()
        part.up_proj.bias = None
        kept = WeightGradients([part])
        part(hidden.requires_grad_()).sum().backward()
        assert len(kept.take()) == 3
