"""Bytes that this process sends to other ranks, counted at torch's collectives while they run.

Counted is what a rank has to send by the usual algorithms, whichever a backend takes: in a ring an all-gather of W
ranks passes W - 1 parts on, a reduce-scatter as many, an all-reduce both. parallel.py compares the count with the
formulas of traffic.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.engines.parallel.traffic import all_gather, all_reduce, all_to_all, reduce_scatter

_NAMESPACES = ("c10d", "_c10d_functional")
_NOTHING = ("barrier", "wait_tensor", "_wrap_tensor_autograd", "recv_")


class SentBytes:
    """Bytes sent by this rank, by operation."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}

    @property
    def total(self) -> float:
        """All operations together."""
        return sum(self.of.values())


@contextlib.contextmanager
def sent_bytes() -> Iterator[SentBytes]:
    """Bytes that this thread's collectives send inside; its backward passes count where they run on the CPU.

    Raises:
        ValueError: an operation whose bytes are not known.
    """
    counted = SentBytes()
    with _Counter(counted):
        yield counted


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counted: SentBytes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations on this rank's part come here next
        if func.namespace in _NAMESPACES:
            name = func._opname
            if name not in _NOTHING:
                self._counted.of[name] = self._counted.of.get(name, 0.0) + _sent(name, args)
        return func(*args, **(kwargs or {}))


def _sent(name: str, args: tuple[Any, ...]) -> float:
    """Bytes that one call of an operation makes this rank send."""
    group = _group(args)
    ranks = group.size()
    match name:
        case "allgather_":
            return all_gather(_size(args[1]), ranks)
        case "_allgather_base_":
            return all_gather(_size(args[1]), ranks)
        case "all_gather_into_tensor":
            return all_gather(_size(args[0]), ranks)
        case "reduce_scatter_" | "_reduce_scatter_base_":
            return reduce_scatter(_size(args[0]), ranks)
        case "reduce_scatter_tensor":
            return reduce_scatter(_size(args[0]) / ranks, ranks)
        case "allreduce_" | "all_reduce" | "all_reduce_":
            return all_reduce(_size(args[0]), ranks)
        case "alltoall_base_":
            rows, counts = args[1], args[4]
            if not counts:
                return all_to_all(_size(rows), ranks)
            others: int = sum(counts) - counts[group.rank()]
            return others * _size(rows) / max(1, len(rows))
        case "send" | "broadcast_":  # each passes on what it has
            return _size(args[0])
    raise ValueError(f"bytes that {name} sends are not known; add it to benchmarks/sent_bytes.py")


def _size(tensors: Any) -> float:
    """Bytes of a tensor, or of all in a list."""
    if isinstance(tensors, Tensor):
        return float(tensors.numel() * tensors.element_size())
    return sum(_size(tensor) for tensor in tensors)


def _group(args: tuple[Any, ...]) -> ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group: ProcessGroup = ProcessGroup.unbox(arg)
            return group
    return _resolve_process_group(args[-1])
