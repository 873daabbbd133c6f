"""The one weight map of a model: which tensors it has, under which names, and how they come out.

Sync to a rollout engine, export and step fingerprints read the weights through this module, so they agree on
names, shapes, order and tied tensors.

Names are those of the model's own `state_dict`; what wrappers add to them (activation checkpointing, compilation,
PEFT) is taken off. Persistent buffers belong to the weights, because a copy of the model needs them too.

Concurrency: the digests of a sharded model are collectives over the ranks of its mesh, called
by all of them in the same order. They read the shards; parameters that were left gathered go back to their shards
first, as `state_dict` of torch does, so they are not called inside TrainEngine.full_parameters().
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from strop.engines.digest import WORD_BYTES, finish, word_sum
from strop.engines.gradients import full, local, meeting_device

_WRAPPERS = re.compile(r"(_checkpoint_wrapped_module|_orig_mod|_fsdp_wrapped_module|base_layer)\.")
_PEFT_PREFIX = "base_model.model."
_ADAPTER = re.compile(r"\.(lora_|modules_to_save\.)")


@dataclass(frozen=True, kw_only=True)
class TensorMetadata:
    """One tensor of a model, without its values."""

    name: str
    """Hugging Face name; of tied tensors the first one."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    """Further names of the same tensor, for example a head tied to the embedding."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the full tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class WeightsMetadata:
    """All weights of a model, each once, in the order in which they travel."""

    weights: tuple[TensorMetadata, ...]

    def __post_init__(self) -> None:
        names = [name for weight in self.weights for name in weight.names]
        repeated = (
            {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
        )
        if repeated:
            raise ValueError(f"the weight map names {min(repeated)} twice; every name stands for one tensor")

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[TensorMetadata]:
        return iter(self.weights)

    @cached_property
    def by_name(self) -> Mapping[str, TensorMetadata]:
        """The weight of every name, aliases included."""
        return {name: weight for weight in self.weights for name in weight.names}

    @property
    def num_bytes(self) -> int:
        """Bytes of all full tensors."""
        return sum(weight.num_bytes for weight in self.weights)


def hugging_face_name(name: str) -> str | None:
    """A parameter's name without what wrappers added to it; None for parameters of an adapter.

    `base_model.model.lm_head._orig_mod.base_layer.weight` is `lm_head.weight`.
    """
    if _ADAPTER.search(name):
        return None
    return _WRAPPERS.sub("", name.removeprefix(_PEFT_PREFIX))


def named_weights(module: nn.Module, *, with_adapter: bool = False) -> dict[str, Tensor]:
    """All parameters and persistent buffers by Hugging Face name, tied ones under each of their names.

    The tensors are the live ones: shards (DTensor) of a sharded model. Parameters of adapters are left out, or
    follow under their own names.
    """
    state = module.state_dict(keep_vars=True)
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    names = {name: hugging_face_name(name) for name in tensors}
    held = {plain: tensors[name] for name, plain in names.items() if plain is not None}
    if with_adapter:
        held |= {name: tensors[name] for name, plain in names.items() if plain is None}
    return held


def check_present(name: str, tensor: Tensor) -> None:
    """Raise a ValueError where the values of a weight are elsewhere."""
    own = local(tensor)
    if own.numel() and own.untyped_storage().nbytes() == 0:
        raise ValueError(f"{name} is offloaded; bring the weights back to the device before they are read")


def weights_metadata(
    module: nn.Module, *, dtype: torch.dtype | None = None, with_adapter: bool = False
) -> WeightsMetadata:
    """The weights of a model, in the order of its `state_dict`; tied ones once, with their aliases.

    Args:
        module: plain or sharded; of a sharded model the shapes are the full ones.
        dtype: what floating-point weights are delivered in, instead of the dtype they are held in.
        with_adapter: list an adapter's parameters too, under their own names, after all others.
    """
    names: dict[int, list[str]] = {}
    tensors = named_weights(module, with_adapter=with_adapter)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return WeightsMetadata(
        tuple(
            TensorMetadata(
                name=first,
                shape=tuple(tensors[first].shape),
                dtype=_delivered(tensors[first].dtype, dtype),
                aliases=tuple(aliases),
            )
            for first, *aliases in names.values()
        )
    )


def weight_digests(module: nn.Module) -> dict[str, int]:
    """`digest_tensor` of every full weight by name (tied ones once, an adapter's too), without gathering them.

    Each rank reads its own shards and the sums are added up in one small reduction per mesh axis. All ranks of a
    sharded model call this and get the same numbers.
    """
    tensors = named_weights(module, with_adapter=True)
    held = weights_metadata(module, with_adapter=True)
    totals: dict[str, Tensor] = {}
    shared: dict[dist.ProcessGroup, list[str]] = {}
    for weight in held:
        tensor = tensors[weight.name].detach()
        check_present(weight.name, tensor)
        shard = _row_shard(tensor)
        if shard is None:
            totals[weight.name] = word_sum(full_weight(tensor, weight.dtype))
        else:
            totals[weight.name] = word_sum(shard.rows, first_byte=shard.first_byte)
            shared.setdefault(shard.group, []).append(weight.name)
    for group, names in shared.items():
        # The sums wrap around modulo 2^64 here as they do inside of one rank.
        added = torch.stack([totals[name] for name in names]).to(meeting_device(tensors[names[0]]))
        dist.all_reduce(added, group=group)
        totals.update(zip(names, added.unbind(), strict=True))
    numbers = _to_ints([totals[weight.name] for weight in held])
    return {
        weight.name: finish(number, weight.num_bytes) for weight, number in zip(held, numbers, strict=True)
    }


def combine_digests(held: WeightsMetadata, digests: Mapping[str, int]) -> str:
    """One digest of a whole model: SHA-256 over names, shapes, dtypes and digests of its weights, as 64 hex digits.

    Tied weights enter under their first name only, so that a model says the same whether the tie is known or not.
    """
    state = hashlib.sha256()
    for weight in held:
        line = f"{weight.name} {list(weight.shape)} {dtype_name(weight.dtype)} {digests[weight.name]:016x}\n"
        state.update(line.encode())
    return state.hexdigest()


def digest_weights(module: nn.Module) -> str:
    """`combine_digests` of a model's weights: equal for a sharded and an unsharded model with the same bits.

    An adapter's parameters enter beside the weights it is added to, so every optimizer step shows.
    """
    return combine_digests(weights_metadata(module, with_adapter=True), weight_digests(module))


@torch.no_grad()
def full_weight(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor in this dtype, gathered from its shards where there are any; live memory where possible."""
    return full(tensor.detach().to(dtype))


@dataclass(frozen=True, kw_only=True)
class _RowShard:
    """This rank's rows of a tensor that is sharded by rows over one mesh axis."""

    rows: Tensor
    first_byte: int
    group: dist.ProcessGroup


def _row_shard(tensor: Tensor) -> _RowShard | None:
    """What this rank holds, if the sums over shards can be added up; None for tensors that are read whole.

    That is a decision about shapes and placements only, so all ranks come to the same one.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh, placements = tensor.device_mesh, tensor.placements
    axes = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if len(axes) != 1 or type(placements[axes[0]]) is not Shard or not placements[axes[0]].is_shard(0):
        return None
    # As torch.chunk cuts: all shards but the last ones have this many rows.
    rows_per_rank = -(-tensor.shape[0] // mesh.size(axes[0]))
    bytes_per_rank = rows_per_rank * tensor.shape[1:].numel() * tensor.element_size()
    if bytes_per_rank % WORD_BYTES:
        return None
    first_row = min(rows_per_rank * mesh.get_local_rank(axes[0]), tensor.shape[0])
    own = tensor.to_local()
    if own.shape[0] != min(rows_per_rank, tensor.shape[0] - first_row):
        raise RuntimeError(
            f"a shard of {list(tensor.shape)} has {own.shape[0]} rows, but {rows_per_rank} are dealt out at a time"
        )
    first_byte = min(bytes_per_rank * mesh.get_local_rank(axes[0]), tensor.numel() * tensor.element_size())
    if own.numel() == 0:
        first_byte = 0
    return _RowShard(rows=own, first_byte=first_byte, group=mesh.get_group(axes[0]))


def _to_ints(scalars: Sequence[Tensor]) -> list[int]:
    """The values of many scalars in one transfer per device."""
    values: dict[int, int] = {}
    devices = dict.fromkeys(scalar.device for scalar in scalars)
    for device in devices:
        here = [index for index, scalar in enumerate(scalars) if scalar.device == device]
        values.update(zip(here, torch.stack([scalars[i] for i in here]).tolist(), strict=True))
    return [values[index] for index in range(len(scalars))]


def _delivered(held: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and held.is_floating_point else held


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")
