"""Transport of batches and tensors through Ray's object store.

Ray's own way with a tensor copies its whole storage into a pickle, also for a view of a few rows, and copies
it back; a jagged column takes milliseconds. Here the memory of a tensor is handed to the store as a buffer
(one copy) and read in place (none). What is read in place belongs to all readers on the node: a worker must
not write into a batch it was given, and is found out when it does.

A batch that a worker returns stays in the object store of its node. Its light columns are one object, each
heavy column is one of its own, so that whoever wants a few columns moves these alone.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.util.serialization import register_serializer
from tensordict import TensorDict
from torch import Tensor

from strop.controller.ray.future import BatchSummary, DataProtoFuture
from strop.protocol import DataProto, flat, from_flat, is_jagged
from strop.protocol.columns import copied, parts, share_offsets

HEAVY_BYTES = 64 * 1024
"""Columns and arguments of this size get an object of their own: below it, an object costs more time (about
0.3 ms) than the bytes do."""
_NUMBER_BYTES = 8
_LONG = 64
"""Of a list this long, every 64th part is looked at: where these are numbers, all are taken for numbers."""

_TensorState = tuple[NDArray[np.uint8], str, tuple[int, ...]]


def register_serializers() -> None:
    """Let this process send and receive batches and tensors this way; once after Ray has started.

    Tensors arrive on the CPU and without their graph.
    """
    register_serializer(Tensor, serializer=_tensor_state, deserializer=_tensor)
    register_serializer(DataProto, serializer=_batch_state, deserializer=_batch)


@dataclass(frozen=True, kw_only=True)
class BatchRefs:
    """A batch in the object store, column by column."""

    contents: BatchSummary
    """Summary of the batch."""
    light: Any
    """Reference to the batch without its heavy columns and its facts."""
    heavy: Mapping[str, Any]
    """For each heavy column, a reference to a batch of this column alone."""

    @classmethod
    def of(
        cls, data: DataProto, *, store: Callable[[DataProto], Any] = ray.put, max_heavy: int | None = None
    ) -> BatchRefs:
        """Store a batch in this process's node.

        Args:
            data: the batch.
            store: stores a part of it, and gives what takes the place of its reference.
            max_heavy: limit of the heavy columns that get an object of their own; None: no limit.
        """
        contents = BatchSummary.of(data)
        tensors, others = contents.tensors, contents.others
        heavy: dict[str, Any] = {}
        for name in [*tensors, *others]:
            column = data.select([name], [], []) if name in tensors else data.select([], [name], [])
            if payload_bytes(column) >= HEAVY_BYTES and len(heavy) != max_heavy:
                heavy[name] = store(column)
        light = data.select([n for n in tensors if n not in heavy], [n for n in others if n not in heavy], [])
        return cls(contents=contents, light=store(light), heavy=heavy)

    def located(self, objects: Sequence[Any]) -> BatchRefs:
        """The same batch, whose parts were numbered, with the references of these numbers."""
        heavy = {name: objects[number] for name, number in self.heavy.items()}
        return dataclasses.replace(self, light=objects[self.light], heavy=heavy)

    def read(
        self,
        tensors: Sequence[str],
        others: Sequence[str],
        get: Callable[[list[Any]], list[Any]],
    ) -> DataProto:
        """These columns of the batch, with all its facts.

        Args:
            tensors: names of tensor columns.
            others: names of other columns.
            get: fetches objects; answers for the deadline.
        """
        heavy_names = [name for name in [*tensors, *others] if name in self.heavy]
        light, *columns = get([self.light, *(self.heavy[name] for name in heavy_names)])
        heavy: dict[str, DataProto] = dict(zip(heavy_names, columns, strict=True))
        columns_by_name = {name: heavy.get(name, light).tensors()[name] for name in tensors}
        arrays = {name: heavy.get(name, light).non_tensor_batch[name] for name in others}
        data = DataProto.from_dict(share_offsets(columns_by_name), arrays, self.contents.facts)
        if not columns_by_name and light.batch is not None:
            data.batch = TensorDict({}, batch_size=[self.contents.num_rows])
        return data


def payload_bytes(value: object) -> int:
    """Approximate size of a value in bytes: the content of its tensors, arrays and texts.

    Numbers count eight bytes; references to what is stored elsewhere, and objects that are neither containers
    nor data classes, count nothing.
    """
    if isinstance(value, Tensor):
        return flat(value).nbytes + 8 * (len(value) + 1) if value.is_nested else value.nbytes
    if isinstance(value, np.ndarray):
        return sum(map(payload_bytes, value.tolist())) if value.dtype.hasobject else int(value.nbytes)
    if isinstance(value, str | bytes | bytearray):
        return len(value)
    if isinstance(value, bool | int | float | complex | np.generic):
        return _NUMBER_BYTES
    if isinstance(value, DataProtoFuture):
        return sum(map(payload_bytes, value.local_batches()))
    if isinstance(value, DataProto):
        columns = [*value.tensors().values(), *value.non_tensor_batch.values(), value.meta_info]
        return sum(map(payload_bytes, columns))
    if isinstance(value, Mapping):
        return sum(payload_bytes(key) + payload_bytes(item) for key, item in value.items())
    if (
        isinstance(value, list | tuple)
        and len(value) >= _LONG
        and _are_numbers(value[:: len(value) // _LONG])
    ):
        return _NUMBER_BYTES * len(value)
    if isinstance(value, list | tuple | set | frozenset):
        return sum(map(payload_bytes, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return sum(payload_bytes(getattr(value, each.name)) for each in dataclasses.fields(value))
    return 0


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def detached_from_store(data: DataProto) -> DataProto:
    """The same batch with tensors in memory of its own, which its owner may write into."""
    if data.batch is None:
        return data
    columns = share_offsets({name: copied(column) for name, column in data.tensors().items()})
    return DataProto(TensorDict(columns, batch_size=[len(data)]), data.non_tensor_batch, data.meta_info)


# ---------------------------------------------------------------- what Ray calls


def _tensor_state(tensor: Tensor) -> _TensorState:
    contiguous = tensor.detach().cpu().contiguous()
    return (
        contiguous.reshape(-1).view(torch.uint8).numpy(),
        str(contiguous.dtype).removeprefix("torch."),
        tuple(contiguous.shape),
    )


def _tensor(state: _TensorState) -> Tensor:
    memory, dtype, shape = state
    _accept_memory_in_place()
    if not len(memory):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.from_numpy(memory).view(getattr(torch, dtype)).reshape(shape)


@cache
def _accept_memory_in_place() -> None:
    """Have torch give its warning about memory that must not be written to; it gives it once per process."""
    memory = np.zeros(1)
    memory.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(memory)


def _batch_state(data: DataProto) -> tuple[Any, ...]:
    """Values of the columns; jagged ones refer to their row lengths, which several may share."""
    distinct_offsets: list[Tensor] = []
    columns: list[tuple[str, _TensorState, int | None]] = []
    for name, column in share_offsets(data.tensors()).items():
        if not is_jagged(column):
            columns.append((name, _tensor_state(column), None))
            continue
        values, offsets = parts(column)
        number = next(
            (number for number, entry in enumerate(distinct_offsets) if entry is offsets),
            len(distinct_offsets),
        )
        if number == len(distinct_offsets):
            distinct_offsets.append(offsets)
        columns.append((name, _tensor_state(values), number))
    rows = None if data.batch is None else len(data)
    lengths = [_tensor_state(offsets.diff()) for offsets in distinct_offsets]
    return rows, columns, lengths, data.non_tensor_batch, data.meta_info


def _batch(state: tuple[Any, ...]) -> DataProto:
    rows, columns, lengths, arrays, facts = state
    row_counts = [_tensor(each) for each in lengths]
    tensors = {
        name: _tensor(values) if number is None else from_flat(_tensor(values), row_counts[number])
        for name, values, number in columns
    }
    writable = {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}
    data = DataProto.from_dict(share_offsets(tensors), writable, facts)
    if data.batch is None and rows is not None:
        data.batch = TensorDict({}, batch_size=[rows])
    return data
