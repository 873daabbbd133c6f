"""Buckets of weights, and a model's weights as a stream of them: full tensors, gathered one after the other for an
engine beside the model. To other processes weights leave from their shards (shards.py, pieces.py).

Concurrency: `parameter_stream` of a sharded model is a collective over the ranks of its mesh, called by all of them in
the same order. It reads the shards; parameters that were left gathered go back to their shards first, as `state_dict`
of torch does, so it is not called inside TrainEngine.full_parameters().
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from strop.engines.checksum.models import check_present, dtype_name
from strop.engines.parallel.pipeline import whole_weight
from strop.engines.weight_parts import Runs
from strop.engines.weights import (
    TensorMetadata,
    WeightsMetadata,
    hugging_face_name,
    named_weights,
    weights_metadata,
)
from strop.rollout.weight_sync.delta import ChangedPart

BUCKET_BYTES = 256 << 20
"""Size of a bucket where nothing else is asked for: large enough for full bandwidth, small beside a model."""
ALIGNMENT = 64
"""Tensors start at multiples of this many bytes in a bucket, so that every dtype can be viewed in place."""


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """Contents of a bucket: some full tensors, one behind the other."""

    entries: tuple[tuple[TensorMetadata, int], ...]
    """Each weight with the byte where it starts."""
    num_bytes: int
    """Size of the whole bucket."""
    start: int | None = None
    """First byte of the one weight of which this is a part; None: all weights are whole, or changes."""
    changes: Mapping[str, tuple[ChangedPart, ...]] = field(default_factory=dict)
    """Of the weights that are here as the changes of their parts alone (delta.py)."""
    pieces: tuple[tuple[Runs, ...], ...] = ()
    """Places in the bucket that each rank of the sender gives, one behind the other; (): all lies together."""


@dataclass(frozen=True, kw_only=True)
class Bucket(Announcement):
    """Some full tensors in one piece of memory. Read only: it may be the model's own."""

    data: Tensor
    """[num_bytes] uint8 on the model's device, or in memory that is shared with the receivers."""

    def tensors(self) -> Iterator[tuple[TensorMetadata, Tensor]]:
        """The weights, which are whole, with their values: views of `data`."""
        for weight, offset in self.entries:
            yield weight, tensor_at(self.data, weight, offset)


def tensor_at(data: Tensor, weight: TensorMetadata, offset: int) -> Tensor:
    """The view of bytes [n] uint8 from `offset` on as this weight."""
    return data[offset : offset + weight.num_bytes].view(weight.dtype).view(weight.shape)


def parameter_stream(
    module: nn.Module,
    *,
    bucket_bytes: int = BUCKET_BYTES,
    dtypes: Mapping[str, torch.dtype] | None = None,
    weights: Iterable[tuple[str, Tensor]] | None = None,
) -> Iterator[Bucket]:
    """All weights as full tensors in the order of `weights_metadata(module)`, packed into buckets.

    Memory beside the model: the bucket being filled and one gathered tensor, so with the bucket that the caller
    still holds at most two buckets and one tensor. A tensor larger than a bucket is a bucket of its own and is
    not copied once more.

    Args:
        module: plain, or sharded over ranks that all make this call and use up the iterator.
        bucket_bytes: limit of a bucket.
        dtypes: deliver floating-point weights of these names in other dtypes than they are held in; they are cast
            before they are gathered.
        weights: the tensors to deliver instead of the module's own, for example with an adapter merged into
            them: the names of the metadata in their order, made one at a time.

    Raises:
        ValueError: `weights` are others than those of the metadata, or the module has an adapter and no merged
            weights are given, or the weights are offloaded.
    """
    if bucket_bytes < 1:
        raise ValueError(f"a bucket of {bucket_bytes} bytes holds nothing; use at least 1")
    metadata = weights_metadata(module, dtypes=dtypes)
    source = iter(own_weights(module, metadata)) if weights is None else iter(weights)
    for group in groups(metadata, bucket_bytes):
        entries, size = placed(group)
        data: Tensor | None = None
        for weight, offset in entries:
            tensor = whole_weight(module, weight.name, next_weight(source, weight), weight.dtype)
            if len(group) == 1:
                data = tensor.contiguous().view(-1).view(torch.uint8)
                break
            if data is None:
                data = torch.empty(size, dtype=torch.uint8, device=tensor.device)
            tensor_at(data, weight, offset).copy_(tensor)
            del tensor
        assert data is not None, "a group has weights"
        yield Bucket(entries=entries, data=data, num_bytes=len(data))
        del data
    if extra := next(source, None):
        raise ValueError(f"the weights go on with {extra[0]} after the last one of the model's own")


def weight_as_json(weight: TensorMetadata) -> list[Any]:
    """As plain JSON: name, shape, dtype, aliases."""
    return [weight.name, list(weight.shape), dtype_name(weight.dtype), list(weight.aliases)]


def weight_from_json(value: object) -> TensorMetadata:
    """The weight that `weight_as_json` wrote, every field checked.

    Raises:
        ValueError: the value has another form, or names an unknown dtype.
    """
    match value:
        case [str(name), list(shape), str(dtype), list(aliases)] if (
            all(type(size) is int and size >= 0 for size in shape)
            and all(isinstance(alias, str) for alias in aliases)
            and isinstance(torch_dtype := getattr(torch, dtype, None), torch.dtype)
        ):
            return TensorMetadata(name=name, shape=tuple(shape), dtype=torch_dtype, aliases=tuple(aliases))
    raise ValueError(f"not the description of a weight: {str(value)[:200]}")


def weights_from_json(value: object) -> WeightsMetadata:
    """The weights that `weight_as_json` wrote.

    Raises:
        ValueError: the value has another form.
    """
    if not isinstance(value, list):
        raise ValueError(f"not a list of weights: {str(value)[:200]}")
    return WeightsMetadata(tuple(map(weight_from_json, value)))


def own_weights(module: nn.Module, metadata: WeightsMetadata) -> Iterator[tuple[str, Tensor]]:
    """The module's own tensors. Raises before the first one what is wrong with any."""
    adapter = next(
        (name for name in module.state_dict(keep_vars=True) if hugging_face_name(name) is None), None
    )
    if adapter is not None:
        raise ValueError(
            f"the model has an adapter ({adapter}), which its own weights do not contain; give the merged weights"
        )
    tensors = named_weights(module)
    for weight in metadata:
        check_present(weight.name, tensors[weight.name])
    return ((weight.name, tensors[weight.name]) for weight in metadata)


def next_weight(source: Iterator[tuple[str, Tensor]], weight: TensorMetadata) -> Tensor:
    name, tensor = next(source, ("nothing", None))
    if tensor is None or name != weight.name or tuple(tensor.shape) != weight.shape:
        got = name if tensor is None else f"{name} {list(tensor.shape)}"
        raise ValueError(
            f"expected {weight.name} {list(weight.shape)} next in the stream of weights, got {got}; give the weights "
            f"of weights_metadata(module) in its order, each once"
        )
    return tensor


def groups(metadata: WeightsMetadata, bucket_bytes: int) -> Iterator[list[TensorMetadata]]:
    """The weights in order, cut where a bucket is full."""
    group: list[TensorMetadata] = []
    for weight in metadata:
        if group and placed([*group, weight])[1] > bucket_bytes:
            yield group
            group = []
        group.append(weight)
    if group:
        yield group


def placed(group: Sequence[TensorMetadata]) -> tuple[tuple[tuple[TensorMetadata, int], ...], int]:
    """The weights of a bucket with their offsets, and the bucket's size."""
    entries, end = [], 0
    for weight in group:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        entries.append((weight, offset))
        end = offset + weight.num_bytes
    return tuple(entries), end
