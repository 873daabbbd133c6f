"""A CUDA device without a card: programs run on it as they would, and nothing is computed.

Tensors on it are fake tensors of torch (`torch._subclasses.fake_tensor`): each operation goes through its meta kernel,
which gives a result of the right shape, dtype and device, and refuses operands of two devices. Tensors in host memory
are real. A number that is read from the device, by itself or in a copy, is 1 (True).

What waits for the device is counted, by line of strop. A wait is a read, that is its numbers in Python, its copy in
host memory, and operations whose shape depends on numbers, which also end the program, since there are none; and a copy
to the device from memory that is not pinned, of Python's numbers too. A copy to the host that is begun and not waited
for (`non_blocking`) is none, and waiting for it (an event) is one where nothing was waited for since it was begun.

It stops at kernels that are no operations of torch: those of Triton, which are launched and do nothing (an interpreter
runs them, and Triton compiles them for a card: `make triton`); CUDA graphs, for which a function that captures nothing
stands; torch.compile; NCCL; and memory of CUDA that other processes open.

A process has the card that has loaded a driver before torch (card_driver.py): `card_process`.
"""

from __future__ import annotations

import contextlib
import linecache
import multiprocessing
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import card_driver
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.engines import attention, gate_kernels, head_kernels, norm_kernels, rotary_kernels, varlen
from strop.engines.model_support import parity
from strop.rollout.native import cuda_graph, decode_kernel, decode_steps, layer_kernels, sample_kernel
from strop.utils import triton as triton_module

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")
COMPARISONS = {aten.allclose, aten.equal}
NUMBERS = {aten._local_scalar_dense, *COMPARISONS}
"""Operations whose result is one of Python's numbers."""
SHAPED_BY_NUMBERS = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount,
}  # fmt: skip
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index_put, aten._index_put_impl_}
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten._grouped_mm}
"""Their kernels take operands of one dtype; meta kernels take any."""
KERNELS = {
    head_kernels: ("_statistics", "_gradient"),
    rotary_kernels: ("_turn",),
    norm_kernels: ("_norm", "_norm_back"),
    gate_kernels: ("_gate", "_gate_back"),
    decode_kernel: ("_attend", "_join"),
    layer_kernels: ("_add_and_norm", "_turn_heads", "_gate_halves"),
    sample_kernel: ("_block_sums", "_draw"),
}
"""Kernels of Triton by module."""
ALLOCATIONS = {
    aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.set_, aten.resize_,
    aten._unsafe_view,
}  # fmt: skip
"""Operations without a kernel, beside views."""
FREE_BYTES = 1 << 30
LIMIT_S = 200
"""Of a call, the start of the process included."""


class Card(TorchDispatchMode):
    """The device, while the context lasts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned: dict[int, torch.UntypedStorage] = {}  # kept, so that no address comes twice
        self.lines: Counter[str] = Counter()
        """Waits by line of strop."""
        self.operations: Counter[str] = Counter()
        """Operations of the device by name."""
        self.launches: Counter[str] = Counter()
        """Those of them that launch a kernel, or several, and kernels of Triton."""
        self.num_attentions = 0
        """Calls of FlashAttention."""
        self.num_begun = self._num_done = 0

    @property
    def count(self) -> int:
        """Waits."""
        return self.lines.total()

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor lies in pinned memory."""
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = storage
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """It does."""
        return tensor.untyped_storage()._cdata in self._pinned

    def note(self) -> None:
        """A wait for all that the device was given, at the innermost line of strop."""
        self._num_done = self.num_begun
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and "/strop/" not in frame.f_code.co_filename:
            frame = frame.f_back
        line = "outside"
        if frame is not None:
            file, number = frame.f_code.co_filename, frame.f_lineno
            line = f"{file.rpartition('/strop/')[2]}:{number} {linecache.getline(file, number).strip()}"
        self.lines[line] += 1

    def note_copy(self, number: int) -> None:
        """A wait for a copy, and so for those that were begun before it; none where it is there."""
        if number > self._num_done:
            self.note()
            self._num_done = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        target = kwargs.get("device")
        goes_here = target is not None and torch.device(target).type == "cuda"
        if not goes_here and not any(isinstance(leaf, FakeTensor) for leaf in given):
            return func(*args, **kwargs)
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode nothing has divided it before
                return func.decompose(*args, **kwargs)
        name = func.overloadpacket
        self.operations[str(name)] += 1
        if not func.is_view and name not in ALLOCATIONS:
            self.launches[str(name)] += 1
        if name in NUMBERS:
            self.note()
            return name in COMPARISONS or torch.ones((), dtype=args[0].dtype).item()
        if name is aten._to_copy and target is not None and not goes_here:
            return self._to_host(
                torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype), kwargs
            )
        if name is aten.copy_ and not isinstance(args[0], FakeTensor):
            return self._to_host(args[0].fill_(1), kwargs, *args[2:])
        if name in (aten._to_copy, aten.copy_):
            source = args[1] if name is aten.copy_ else args[0]
            is_async = _is_async(kwargs, *args[2:]) and self.is_pinned(source)
            if not isinstance(source, FakeTensor) and not is_async:
                self.note()
        elif self._reads(name, args, kwargs):
            self.note()
        # The sum and what is added to it may have the wider precision of the result.
        factors = args[1:3] if func is aten.addmm.dtype_out else given
        if name in PRODUCTS and len({leaf.dtype for leaf in factors if leaf.is_floating_point()}) > 1:
            raise RuntimeError(f"{name} of {', '.join(str(leaf.dtype) for leaf in given)}")
        if name is aten._grouped_mm and given[0].dtype != torch.bfloat16:
            self.note()  # one product after the other, whose sizes are read
            return given[0].new_empty(given[0].shape[0], given[1].shape[-1])
        with self._fake:
            return func(*args, **kwargs)

    def _to_host(self, copy: Tensor, kwargs: Any, *rest: Any) -> Tensor:
        if _is_async(kwargs, *rest):
            self.num_begun += 1
        else:
            self.note()
        return copy

    def _reads(self, name: Any, args: Any, kwargs: Any) -> bool:
        """The shape of the result depends on numbers, or an index is in host memory."""
        if name is aten.repeat_interleave:
            return kwargs.get("output_size") is None
        if name in INDEXED:
            index = [leaf for leaf in tree_leaves(args[1]) if leaf is not None]
            return any(leaf.dtype == torch.bool or not isinstance(leaf, FakeTensor) for leaf in index)
        return name in SHAPED_BY_NUMBERS


def _is_async(kwargs: Any, *rest: Any) -> bool:
    """Of a copy, whose third argument it is."""
    return bool(kwargs.get("non_blocking", rest[0] if rest else False))


class _Event:
    """As torch.Event."""

    def __init__(self, card: Card) -> None:
        self._card, self._number = card, 0

    def record(self, stream: object = None) -> None:
        self._number = self._card.num_begun

    def synchronize(self) -> None:
        self._card.note_copy(self._number)


class _Stream:
    """As torch.Stream; all work of the card is in order."""

    def __init__(self, card: Card) -> None:
        self._card = card

    def __enter__(self) -> _Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record_event(self) -> _Event:
        event = _Event(self._card)
        event.record()
        return event


class _Triton:
    """Of the module, what is asked for beside a kernel's launch."""

    @staticmethod
    def cdiv(number: int, divisor: int) -> int:
        return -(-number // divisor)

    @staticmethod
    def next_power_of_2(number: int) -> int:
        return 1 << (number - 1).bit_length()


class _Kernel:
    """A kernel of Triton, whose tensors lie on the card."""

    def __init__(self, card: Card, name: str) -> None:
        self._card, self._name = card, name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 1 << 31 for size in grid), grid
        assert all(size < 1 << 16 for size in grid[1:]), grid  # of CUDA's second and third axis
        return self._launch

    def _launch(self, *args: object, **options: object) -> None:
        for arg in args:
            assert not isinstance(arg, Tensor) or isinstance(arg, FakeTensor), f"{self._name} of host memory"
        self._card.launches[self._name] += 1


def _empty(
    card: Card, plain: Callable[..., Tensor], *sizes: Any, pin_memory: bool = False, **options: Any
) -> Tensor:
    """As torch.empty, which pins nothing in a build for a CPU."""
    tensor = plain(*sizes, **options)
    return card.pin(tensor) if pin_memory else tensor


def _swap(plain: Callable[[Tensor, Tensor], None], one: Tensor, other: Tensor) -> None:
    """Nothing for a parameter that is moved to where it is, which torch refuses."""
    if not (isinstance(one, FakeTensor) and isinstance(other, FakeTensor) and one.dtype == other.dtype):
        plain(one, other)


def _device_of(storage: torch.UntypedStorage, plain: Any) -> torch.device:
    device: torch.device = plain.__get__(storage)
    return DEVICE if device.type == "meta" else device


@contextlib.contextmanager
def card_process() -> Iterator[Callable[..., Any]]:
    """A process with a card; gives what calls a function of the card and other arguments in it. Tests are skipped
    where torch's build has a driver of its own, and where ours cannot be compiled."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("torch's build has a driver of its own")
    if shutil.which("g++") is None:
        pytest.skip("the driver of the card is compiled by g++")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), card_driver.load) as process:
        yield lambda function, *args: process.submit(_call, function, args).result(LIMIT_S)


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    with fake_card() as card:
        return function(card, *args)


@contextlib.contextmanager
def fake_card() -> Iterator[Card]:
    """The card of this process."""
    card = Card()

    def capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        before = card.count
        logits = function()
        assert card.count == before, f"nothing is waited for while a step is captured: {card.lines}"
        return lambda: None, logits

    stream = _Stream(card)
    flash_attention, of_storage = varlen.flash_attention, torch.UntypedStorage.device

    def kernel() -> Any:
        torch_kernel = flash_attention()  # whose meta kernel takes what the kernel itself refuses

        def call(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
            assert query.dtype == key.dtype == value.dtype, "one dtype"
            assert query.dtype in varlen.HALF, f"FlashAttention has no {query.dtype}"
            assert {end.dtype for end in rest[:2]} == {torch.int32}, "ends are int32"
            card.num_attentions += 1
            return torch_kernel(query, key, value, *rest, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strop.utils.device._num_devices", lambda name: int(name in ("cpu", "cuda")))
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(torch.accelerator, "current_stream", lambda *_: stream)
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
        patch.setattr(torch.accelerator, "get_memory_info", lambda *_: (FREE_BYTES, FREE_BYTES))
        patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda *_: 1.0)
        patch.setattr(torch.accelerator, "memory_reserved", lambda *_: 0)
        patch.setattr(torch.accelerator, "memory_allocated", lambda *_: 0)
        patch.setattr(torch, "empty", partial(_empty, card, torch.empty))
        patch.setattr(Tensor, "pin_memory", lambda tensor: card.pin(tensor.clone()))
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        patch.setattr(FakeTensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata)
        patch.setattr(FakeTensor, "tolist", lambda tensor: tensor.cpu().tolist())
        patch.setattr(torch, "Stream", lambda *_: stream)
        patch.setattr(torch, "Event", lambda *_: _Event(card))
        for name in ("PROBE_TOLERANCE", "_LARGE_TOLERANCE"):  # of numbers that are not there
            patch.setattr(parity, name, float("inf"))
        patch.setattr(decode_steps, "TOLERANCE", dict.fromkeys((*varlen.HALF, torch.float32), float("inf")))
        patch.setattr(torch.utils, "swap_tensors", partial(_swap, torch.utils.swap_tensors))
        # A fake tensor has its storage on the meta device.
        patch.setattr(
            torch.UntypedStorage, "device", property(lambda storage: _device_of(storage, of_storage))
        )
        for module in (varlen, attention):
            patch.setattr(module, "runs_on", lambda device: device.type == "cuda")
        patch.setattr(varlen, "flash_attention", kernel)
        patch.setattr(cuda_graph, "cuda_graphs", lambda: capture)
        patch.setattr(triton_module, "triton", _Triton)
        patch.setattr(triton_module, "_launches", lambda: True)
        for module, names in KERNELS.items():
            patch.setattr(module, "triton", _Triton, raising=False)
            for name in names:
                patch.setattr(module, name, _Kernel(card, f"{module.__name__.rpartition('.')[2]}.{name}"))
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # Python's numbers are a tensor in host memory first
        try:
            with card:
                yield card
        finally:
            torch._C._set_only_lift_cpu_tensors(before)
