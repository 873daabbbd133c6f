"""Trace of a forward and a backward pass without numbers: the model's own code on tensors that have a shape alone.

`FakeTensorMode` of torch runs every operation for its shapes. A dispatch mode sees each one and keeps count of the
bytes that are alive and of the work: products, attention and all else, forward and backward, as the engines run them.
Families, adapters and checkpointing need no formula of their own here.

Concurrency: none; global state of torch is entered and left by context managers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "addmm": 1, "baddbmm": 1}
"""Operators that multiply matrices, and which argument is the left one."""
_ATTENTION = "attention"
_EMPTY = ("empty", "new_empty", "empty_like", "empty_strided")


@dataclass(frozen=True)
class Work:
    """Floating-point operations of products and attention, bytes that all else reads and writes, and operators."""

    product_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    """By operators that are neither: norms, activations, copies."""
    weight_bytes: float = 0.0
    """Read and written by products."""
    num_calls: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(a + b for a, b in zip(self.parts, other.parts, strict=True)))

    def __mul__(self, factor: float) -> Work:
        return Work(*(part * factor for part in self.parts))

    def __sub__(self, other: Work) -> Work:
        return self + other * -1.0

    @property
    def parts(self) -> tuple[float, float, float, float, float]:
        """The five numbers."""
        return (
            self.product_flops, self.attention_flops, self.moved_bytes, self.weight_bytes, self.num_calls,
        )  # fmt: skip


@dataclass(frozen=True)
class Mark:
    """Point of a trace: bytes alive and work so far."""

    live: int
    work: Work
    num_events: int
    """Of storages."""


@dataclass
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes alive and work of every operator that runs while it is entered."""

    live: int = 0
    """Bytes of the tensors that were made inside and are still there."""
    peak: int = 0
    """Most of them since `reset_peak`."""
    work: Work = field(default_factory=Work)
    events: list[tuple[int, int]] = field(default_factory=list)
    """Number of a storage, and its bytes; 0 where it is given back."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._num_storages = 0

    def mark(self) -> Mark:
        """Now."""
        return Mark(self.live, self.work, len(self.events))

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and count it."""
        if func is torch.ops.prim.device.default:  # two thirds of all calls: where an argument is
            (tensor,) = args
            return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device
        kwargs = kwargs or {}
        out = _run(func, args, kwargs)
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        num_new = 0
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage not in self._storages:
                self._storages[storage] = True
                num_new += 1
                self.live += storage.nbytes()
                self._num_storages += 1
                if storage.nbytes():
                    self.events.append((self._num_storages, storage.nbytes()))
                    weakref.finalize(storage, self._drop, storage.nbytes(), self._num_storages)
        self.peak = max(self.peak, self.live)
        if num_new or func._schema.is_mutable:
            self.work += _work_of(func, args, kwargs, out, made)
        return out

    def _drop(self, num_bytes: int, number: int) -> None:
        self.live -= num_bytes
        self.events.append((number, 0))


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The operator's result; shapes of grouped products are known in bfloat16 alone."""
    if func._schema.name != "aten::_grouped_mm" or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    narrow = [arg.bfloat16() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args]
    return func(*narrow, **kwargs).to(args[0].dtype)


def _work_of(func: Any, args: Any, kwargs: Mapping[str, Any], out: Any, made: list[Tensor]) -> Work:
    """Work of one operator."""
    name = func._schema.name.partition("::")[2]
    if name in _EMPTY:
        return Work()
    read = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]
    num_bytes = float(sum(tensor.numel() * tensor.element_size() for tensor in (*read, *made)))
    if name in _PRODUCTS:
        flops = 2.0 * made[0].numel() * args[_PRODUCTS[name]].shape[-1]
        if (
            name == "_grouped_mm" and made[0].dim() == 3 and args[0].dim() == 2
        ):  # a gradient of stacked weights:
            flops /= len(made[0])  # each row is in one of them
        return Work(product_flops=flops, weight_bytes=num_bytes, num_calls=1)
    if _ATTENTION in name:
        has_mask = kwargs.get("attn_mask") is not None
        flops = _attention_flops(name, read)
        return Work(attention_flops=flops if has_mask else flops / 2, num_calls=1)
    return Work(moved_bytes=num_bytes, num_calls=1)


def _attention_flops(name: str, read: list[Tensor]) -> float:
    """Operations of fused attention over all pairs: two products forward, five backward."""
    is_backward = "backward" in name
    query, key, value = read[1:4] if is_backward else read[:3]
    b, heads, q, dim = query.shape
    k, value_dim = key.shape[2], value.shape[3]
    pairs = 2.0 * b * heads * q * k
    return pairs * (3 * dim + 2 * value_dim) if is_backward else pairs * (dim + value_dim)


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Inside, tensors that are made have shapes alone, and are counted."""
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        yield
