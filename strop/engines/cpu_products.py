"""Products of layers on a CPU, by what is fastest there.

In float32 torch multiplies by MKL. oneDNN, which torch brings for its compiler, and the functions of cpu/products.c are
up to twice as fast on AMD processors with AVX-512; the latter most of all at gradients by weights, which read both
sides by their columns (benchmarks/RESULTS.md). A measurement chooses each, once for a machine and a version: rollout
and training, all ranks and a resumed run must multiply alike, since results differ in their last bits. Small weights
stay with torch, where a call costs more than the product. What is taken depends on the weight alone: a token's numbers
come from the same library, however many tokens are beside it.

In bfloat16 torch takes oneDNN itself where the processor multiplies such numbers, and elsewhere a loop that is many
times slower than a product in float32: there rounded numbers are multiplied in float32. What several products read is
rounded once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from strop.engines.cpu.library import are_plain, product_library
from strop.utils.machine_choice import machine_choice

MIN_NUMBERS = 1 << 14
"""Of a weight."""
WORTH_TAKING = 1.04
"""By how much something else must be faster than torch's first choice."""
FEW_ROWS = 4
"""For fewer rows MKL and oneDNN add up in another order (seen on Zen 4): a token's numbers would depend on how many are
beside it."""
HALF_NUMBERS = 1 << 20
"""Of rounded rows, inputs or outputs, that are multiplied in float32 at a time. Fewer leave less of the heap free, and
take up to a sixth longer (benchmarks/RESULTS.md)."""
LEAST_ROWS = 128
"""At a time, where columns are many: the weight is read again for each part."""
_TOKENS, _WIDE, _NARROW, _TRIES = 1024, 512, 256, 8
"""Of the products that are timed, and how many of each: about 50 ms."""


@cache
def is_onednn_faster() -> bool:
    """True on a machine where it was measured, in this process or an earlier one."""
    return bool(torch._C._has_mkldnn) and machine_choice("onednn", onednn_speedup, at_least=WORTH_TAKING)


@cache
def is_compiled_faster() -> bool:
    """The same of the functions of products.c: products, gradients by weights and feed-forward parts go together.
    Other sources are measured anew."""
    library = product_library()
    return library is not None and machine_choice(
        f"compiled-{Path(library._name).stem}", compiled_speedup, at_least=WORTH_TAKING
    )


@cache
def is_half_faster() -> bool:
    """True on a machine where products of bfloat16 are not slower than those of the same numbers in float32."""
    return machine_choice("bfloat16", half_speedup, at_least=1.0)


def onednn_speedup() -> float:
    """Speed of oneDNN's product of tokens and a weight over that of torch's first choice."""
    inputs, weight = torch.ones(_TOKENS, _NARROW), torch.ones(_WIDE, _NARROW)
    return _speedup(lambda: F.linear(inputs, weight), lambda: _product(inputs, weight))


def compiled_speedup() -> float:
    """Speed of products.c over what is taken otherwise, at a product and a gradient by a weight together."""
    inputs, weight, rows = (
        torch.ones(_TOKENS, _NARROW),
        torch.ones(_WIDE, _NARROW),
        torch.ones(_TOKENS, _WIDE),
    )
    other = _product if is_onednn_faster() else F.linear
    return _speedup(
        lambda: (other(inputs, weight), rows.T @ inputs),
        lambda: (compiled_product(inputs, weight), _compiled_gradient(rows, inputs)),
    )


def half_speedup() -> float:
    """Speed of torch's product of bfloat16 over that of float32, as it is multiplied here."""
    inputs, weight = torch.ones(_TOKENS, _NARROW), torch.ones(_WIDE, _NARROW)
    half_inputs, half_weight = inputs.bfloat16(), weight.bfloat16()
    return _speedup(lambda: linear(inputs, weight), lambda: F.linear(half_inputs, half_weight))


def _speedup(first: Callable[[], object], other: Callable[[], object]) -> float:
    """Of the other function; of each the fastest of a few calls counts, in turn, behind one that warms up."""
    seconds: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad(), torch.autocast("cpu", enabled=False):  # whoever asks first
        for _ in range(_TRIES + 1):
            for function, taken in zip((first, other), seconds, strict=True):
                start = time.perf_counter()
                function()
                taken.append(time.perf_counter() - start)
    before, after = (min(taken[1:]) for taken in seconds)
    return before / after


def has_large(parameters: Iterable[nn.Parameter]) -> bool:
    """True if one of these is multiplied by another library than torch's first choice."""
    return any(_is_taken(parameter) for parameter in parameters)


def operands(
    input: Tensor,  # noqa: A002  (torch's name)
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Operands of `torch.nn.functional.linear`, given by place or by its names."""
    return input, weight, bias


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """inputs [..., K] times weight [N, K] transposed, plus bias [N]: as `torch.nn.functional.linear`."""
    is_plain = inputs.dtype == torch.float32 and inputs.numel() and not torch.is_autocast_enabled("cpu")
    if not is_plain or inputs.dim() < 2 or not _is_taken(weight) or not _fits(inputs, weight, bias):
        return _by_torch(inputs, weight, bias)
    if not torch.is_grad_enabled():
        return _taken_product(inputs, weight, bias)
    product: Tensor = _Linear.apply(inputs, weight, bias)  # type: ignore[no-untyped-call]
    return product


def _by_torch(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`; of plain tensors without gradients, few rows have the numbers that they have
    beside others."""
    is_batched = not torch.is_grad_enabled() and weight.dim() == 2 and are_plain(inputs, weight)
    return _beside_zeros(F.linear, inputs, weight, bias) if is_batched else F.linear(inputs, weight, bias)


def _beside_zeros(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """A product of inputs [..., K] and a weight [N, K], made with rows of zeros where there are few."""
    count = inputs.shape[:-1].numel()
    if not 0 < count < FEW_ROWS:
        return product(inputs, weight, bias)
    # A copy, not a view: a view that a function of autograd returns cannot be written to.
    whole = product(with_zeros(inputs.reshape(count, -1)), weight, bias)
    return whole[:count].reshape(*inputs.shape[:-1], len(weight)).clone()


def with_zeros(rows: Tensor) -> Tensor:
    """Rows [M, K] with rows of zeros behind them where there are few."""
    if not 0 < len(rows) < FEW_ROWS:
        return rows
    whole = rows.new_zeros(FEW_ROWS, rows.shape[1])
    whole[: len(rows)] = rows
    return whole


def _fits(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """False for what torch is to refuse, or to repeat: functions in C would read past a tensor."""
    return inputs.shape[-1] == weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])


def _is_taken(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.dim() == 2
        and weight.numel() >= MIN_NUMBERS
        and type(weight) in (Tensor, nn.Parameter)
        and (is_onednn_faster() or is_compiled(weight))
    )


def is_compiled(weight: Tensor) -> bool:
    """True for a weight whose rows and columns are whole vectors, where products.c is faster."""
    library = product_library()
    return library is not None and not any(n % library.lanes() for n in weight.shape) and is_compiled_faster()


def _taken_product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if is_compiled(weight) and are_plain(inputs, weight, *([] if bias is None else [bias])):
        return compiled_product(inputs, weight, bias)
    return _beside_zeros(_product if is_onednn_faster() else F.linear, inputs, weight, bias)


def _product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return product


def compiled_product(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, by products.c, where it was compiled; sides of the weight are whole vectors."""
    library = product_library()
    assert library is not None, "asked only where there is one"
    rows, (width, depth) = inputs.reshape(-1, inputs.shape[-1]).contiguous(), weight.shape
    product, threads = torch.empty(*inputs.shape[:-1], width), torch.get_num_threads()
    if weight.T.is_contiguous() and bias is None:  # of a gradient by inputs
        of_rows, of_weight, of_product = (tensor.data_ptr() for tensor in (rows, weight, product))
        library.linear_back(of_rows, of_weight, of_product, len(rows), depth, width, threads)
        return product
    parts = rows, weight.contiguous(), None if bias is None else bias.contiguous(), product
    addresses = [None if part is None else part.data_ptr() for part in parts]
    library.linear(*addresses, len(rows), width, depth, threads)
    return product


def _weight_gradient(rows: Tensor, inputs: Tensor) -> Tensor:
    """rows [M, N] transposed times inputs [M, K]."""
    return _compiled_gradient(rows, inputs) if _is_compiled_gradient(rows, inputs) else rows.T @ inputs


def add_weight_gradient(total: Tensor, rows: Tensor, inputs: Tensor) -> None:
    """Add the same to a sum [N, K] of its precision, in place."""
    is_large = total.numel() >= MIN_NUMBERS and total.is_contiguous()
    if is_large and _is_compiled_gradient(rows, inputs, total):
        _compiled_gradient(rows, inputs, total)
    else:
        total.addmm_(rows.T, inputs)


def _is_compiled_gradient(rows: Tensor, inputs: Tensor, *total: Tensor) -> bool:
    library = product_library() if rows.dtype == torch.float32 and are_plain(rows, inputs, *total) else None
    is_whole = library is not None and not inputs.shape[1] % library.lanes()
    return is_whole and is_compiled_faster()


def _compiled_gradient(rows: Tensor, inputs: Tensor, total: Tensor | None = None) -> Tensor:
    """The product; added to a sum if there is one."""
    library = product_library()
    assert library is not None, "asked only where there is one"
    rows, inputs = rows.contiguous(), inputs.contiguous()
    (count, width), depth = rows.shape, inputs.shape[1]
    gradient = torch.empty(width, depth) if total is None else total
    addresses = [tensor.data_ptr() for tensor in (rows, inputs, gradient)]
    library.weight_gradient(*addresses, count, width, depth, total is not None, torch.get_num_threads())
    return gradient


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = inputs.shape
        return _taken_product(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        inputs, weight = ctx.saved_tensors
        rows, needs = grad.flatten(0, -2), ctx.needs_input_grad
        return (
            _taken_product(rows, weight.T).view(ctx.shape) if needs[0] else None,
            _weight_gradient(rows, inputs.flatten(0, -2)) if needs[1] else None,
            rows.sum(0) if needs[2] else None,
        )


class HalfProducts(TorchFunctionMode):
    """While it is entered, beside autocast to bfloat16, layers multiply numbers rounded to it, as autocast lets them:
    what several layers read is rounded once, and a rounded weight is kept for the backward pass alone."""

    def __init__(self, *kinds: type[Tensor]) -> None:
        """Args:
        kinds: of the weights, beside plain tensors and parameters.
        """
        super().__init__()
        self._kinds = (Tensor, nn.Parameter, *kinds)
        self._last: tuple[Tensor, int, Tensor] | None = None
        """Inputs, their version, and the same rounded."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Result of a function of torch."""
        kwargs = kwargs or {}
        return self._linear(*operands(*args, **kwargs)) if func is F.linear else func(*args, **kwargs)

    def _linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        is_plain = inputs.dtype in (torch.float32, torch.bfloat16) and torch.is_autocast_enabled("cpu")
        if not is_plain or type(weight) not in self._kinds or weight.dim() != 2 or inputs.dim() < 2:
            return F.linear(inputs, weight, bias)
        half = self._rounded(inputs)
        product: Tensor = _HalfLinear.apply(inputs, half, weight, bias)  # type: ignore[no-untyped-call]
        return product

    def _rounded(self, inputs: Tensor) -> Tensor:
        """These inputs rounded; those of the layer before are not rounded again, unless they were written to."""
        if inputs.is_inference():  # has no version
            return inputs.to(torch.bfloat16)
        if self._last is None or self._last[0] is not inputs or self._last[1] != inputs._version:
            self._last = inputs, inputs._version, inputs.detach().to(torch.bfloat16)
        return self._last[2]


class _HalfLinear(torch.autograd.Function):
    """Product in bfloat16 of inputs [..., K], which are also there rounded, and a weight [N, K]; inputs are kept for
    the gradient of the weight alone."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, half: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        half_weight = weight.to(torch.bfloat16)
        ctx.save_for_backward(half if ctx.needs_input_grad[2] else None, half_weight)
        ctx.shape = inputs.shape
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (inputs, weight, bias)]
        half_bias = None if bias is None else bias.to(torch.bfloat16)
        with torch.autocast("cpu", enabled=False):
            return _half_product(half, half_weight, half_bias, dtype=torch.bfloat16)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        half, weight = ctx.saved_tensors
        rows = grads[0].flatten(0, -2).to(torch.bfloat16)
        needs, dtypes = ctx.needs_input_grad, ctx.dtypes
        return (
            _half_product(rows, weight.T, dtype=dtypes[0]).view(ctx.shape) if needs[0] else None,
            None,
            _weight_gradient(_factor(rows), _factor(half).flatten(0, -2)).to(dtypes[1]) if needs[2] else None,
            rows.sum(0, dtype=torch.float32).to(dtypes[2]) if needs[3] else None,
        )


def _factor(half: Tensor) -> Tensor:
    """Numbers of bfloat16 in the precision in which they are multiplied."""
    return half if is_half_faster() else half.float()


def _half_product(
    inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype
) -> Tensor:
    """Inputs [..., K] times a weight [N, K] transposed, plus bias [N], of bfloat16: [..., N] of this precision."""
    if is_half_faster():
        return linear(inputs, weight, bias).to(dtype)
    wide_weight, wide_bias = weight.float(), None if bias is None else bias.float()
    product = inputs.new_empty(*inputs.shape[:-1], len(weight), dtype=dtype)
    # Wide numbers of all rows would lie in the heap between what is kept.
    count = max(LEAST_ROWS, HALF_NUMBERS // max(weight.shape))
    parts = (torch.split(tensor.flatten(0, -2), count) for tensor in (inputs, product))
    for part, result in zip(*parts, strict=True):
        result.copy_(linear(part.float(), wide_weight, wide_bias))
    return product


def layer_products(parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[object]:
    """While it is entered, layers multiply by `linear`; with gradients nothing changes where none of their parameters
    is taken."""
    return LayerProducts() if has_large(parameters) else steady_rows()


def steady_rows() -> contextlib.AbstractContextManager[object]:
    """While it is entered, linear layers multiply by torch, without gradients so that a few tokens have the numbers
    that they have beside others: generation batches what happens to run. Experts, and layers that are no
    `torch.nn.functional.linear` are left as they are; adapters see to it themselves (lora/products.py)."""
    return contextlib.nullcontext() if torch.is_grad_enabled() else LayerProducts(_by_torch)


class LayerProducts(TorchFunctionMode):
    """While it is entered, layers multiply by a function in place of `torch.nn.functional.linear`."""

    def __init__(self, product: Callable[..., Tensor] = linear) -> None:
        """Args:
        product: has the operands of `torch.nn.functional.linear`.
        """
        super().__init__()
        self.product = product

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Result of a function of torch."""
        if func is F.linear:
            return self.product(*operands(*args, **(kwargs or {})))
        return func(*args, **kwargs) if kwargs else func(*args)  # hundreds in a pass
