"""Waits of the host for a device, counted on a CPU: tensors that would lie on a device are followed.

A tensor is on the device if it is a weight, was sent there (`strop.utils.device.sent`), or comes from such a tensor. A
wait is a read, that is its numbers in Python or numpy, its copy in host memory, and operations whose shape depends on
numbers; and a copy to the device by another way than `sent`, from memory that is not pinned: `to` with a device or with
a tensor on it (also with `non_blocking`), `copy_`, and an index. A copy to the host that is begun and not waited for
(`non_blocking`) is none, and waiting for it (`HostCopy.wait`) is one where neither was anything read since it was
begun, nor a copy waited for that was begun later. Tensors that are made with `device=` may lie on either; copies of
Python's numbers by that way are not seen.
"""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.utils import device as device_module
from strop.utils.host_copy import HostCopy

aten = torch.ops.aten
SHAPED_BY_NUMBERS = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.equal,
    aten.bincount,
}  # fmt: skip
INDEXED = {aten.index, aten.index_put, aten.index_put_}
TO_HOST = {Tensor.cpu, Tensor.tolist, Tensor.numpy, Tensor.to}


class DeviceReads(TorchDispatchMode):
    """Counts waits by line of strop."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}  # kept, so that no address comes twice
        self._on_either: dict[int, Any] = {}
        self.lines: Counter[str] = Counter()
        self.num_begun = self.num_done = 0
        """Copies to the host, and those that are there for certain, since later work of the device was waited for."""
        for weight in weights:
            self.place(weight)

    @property
    def count(self) -> int:
        return self.lines.total()

    def place(self, tensor: Tensor) -> None:
        """The tensor lies on the device."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def place_on_either(self, tensor: Tensor) -> None:
        """The tensor lies on the device or in host memory."""
        storage = tensor.untyped_storage()
        self._on_either[storage._cdata] = storage

    def has(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata in self._storages

    def note(self) -> None:
        """A wait for all that the device was given, at the innermost line of strop."""
        self.num_done = self.num_begun
        self._note_line()

    def note_copy(self, number: int) -> None:
        """A wait for a copy, and so for those that were begun before it; none where it is there."""
        if number > self.num_done:
            self.num_done = number
            self._note_line()

    def _note_line(self) -> None:
        frames = [
            f for f in traceback.extract_stack() if "/strop/" in f.filename and "/tests/" not in f.filename
        ]
        frame = frames[-1] if frames else traceback.extract_stack()[0]
        self.lines[f"{frame.filename.rpartition('/strop/')[2]}:{frame.lineno} {frame.line}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_placed = any(map(self.has, given))
        if is_placed and (self._reads(name, args, kwargs) or self._sends(name, args, kwargs)):
            self.note()
        results = func(*args, **kwargs)
        if is_placed and name is not aten._local_scalar_dense:
            for leaf in tree_leaves(results):
                if isinstance(leaf, Tensor):
                    self.place(leaf)
        return results

    def _reads(self, name: Any, args: Any, kwargs: Any) -> bool:
        """An operation with tensors of the device brings numbers to the host."""
        if name is aten.copy_:
            return not self.has(args[0]) and not _is_async(args, kwargs)
        if name is aten.repeat_interleave:
            return kwargs.get("output_size") is None
        if name in INDEXED:
            return any(leaf.dtype == torch.bool for leaf in tree_leaves(args[1]) if leaf is not None)
        return name is aten._local_scalar_dense or name in SHAPED_BY_NUMBERS

    def _sends(self, name: Any, args: Any, kwargs: Any) -> bool:
        """An operation with tensors of the device brings some of host memory there, and waits."""
        if name is aten.copy_:
            return not self.has(args[1]) and not _is_async(args, kwargs)
        return name in INDEXED and any(
            not self.has(leaf) and leaf.untyped_storage()._cdata not in self._on_either
            for leaf in tree_leaves(args[1])
            if leaf is not None
        )


def _is_async(args: Any, kwargs: Any) -> bool:
    """Of a copy into a tensor."""
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


class _Transfers(TorchFunctionMode):
    """Copies between the host and the device, which on a CPU are the tensors themselves."""

    def __init__(self, reads: DeviceReads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in TO_HOST and self._reads.has(args[0]):
            return self._from_device(func, args, kwargs)
        results = func(*args, **kwargs)
        if func is Tensor.to and self._is_device((*args[1:], *kwargs.values())):
            self._reads.note()
            results = _copied(results)
            self._reads.place(results)
        elif isinstance(results, Tensor) and isinstance(kwargs.get("device"), torch.device):
            self._reads.place_on_either(results)
        return results

    def _from_device(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is Tensor.to:
            if "cpu" not in (args[1:] + tuple(kwargs.values())):
                return func(*args, **kwargs)
            if not kwargs.get("non_blocking"):
                self._reads.note()
            return _copied(args[0])
        self._reads.note()
        return _copied(args[0]) if func is Tensor.cpu else func(*args, **kwargs)

    def _is_device(self, given: tuple[Any, ...]) -> bool:
        """One of the arguments of `to` is a device, or lies on it."""
        return any(isinstance(one, torch.device) or self._reads.has(one) for one in given)


def _copied(tensor: Tensor) -> Tensor:
    """As it would lie in host memory."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach().clone()


@contextmanager
def device_reads(weights: Iterable[Tensor]) -> Iterator[DeviceReads]:
    """Count the waits of what is computed with these weights."""
    reads = DeviceReads(weights)

    def sent(tensor: Tensor, device: torch.device) -> Tensor:
        copy = _copied(tensor)
        reads.place(copy)
        return copy

    begun: dict[int, tuple[HostCopy, int]] = {}
    begin, wait = HostCopy.__init__, HostCopy.wait

    def noted_begin(copies: HostCopy, tensors: Any) -> None:
        is_placed = any(map(reads.has, tensors.values()))
        reads.num_begun += is_placed
        begun[id(copies)] = copies, reads.num_begun if is_placed else 0
        begin(copies, tensors)

    def noted_wait(copies: HostCopy) -> dict[str, Tensor]:
        if id(copies) in begun:
            reads.note_copy(begun[id(copies)][1])
        else:  # begun before
            reads._note_line()
        return wait(copies)

    plain = device_module.sent
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostCopy, "__init__", noted_begin)
        patch.setattr(HostCopy, "wait", noted_wait)
        for module in list(sys.modules.values()):
            if vars(module).get("sent") is plain:
                patch.setattr(module, "sent", sent)
        with _Transfers(reads), reads:
            yield reads
