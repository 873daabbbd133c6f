"""The one weight map of a model: which tensors it has, under which names, and how they come out.

Sync to a rollout engine, export and digests read the weights through this module, so they agree on names, shapes, order
and tied tensors.

Names are those of the model's own `state_dict`; what wrappers add to them (activation checkpointing, compilation,
PEFT) is taken off. Persistent buffers belong to the weights, because a copy of the model needs them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

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
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype of every name, aliases included."""
        return {name: weight.dtype for weight in self.weights for name in weight.names}

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
    named = {plain: tensors[name] for name, plain in names.items() if plain is not None}
    if with_adapter:
        named |= {name: tensors[name] for name, plain in names.items() if plain is None}
    return named


def weights_metadata(
    module: nn.Module, *, dtypes: Mapping[str, torch.dtype] | None = None, with_adapter: bool = False
) -> WeightsMetadata:
    """The weights of a model, in the order of its `state_dict`; tied ones once, with their aliases.

    Args:
        module: plain or sharded; of a sharded model the shapes are the full ones.
        dtypes: what floating-point weights of these names are delivered in, instead of the dtype they are held in.
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
                dtype=_delivered(tensors[first].dtype, [first, *aliases], dtypes or {}),
                aliases=tuple(aliases),
            )
            for first, *aliases in names.values()
        )
    )


def matrix_names(module: nn.Module) -> set[str]:
    """Names of the weights that products read in half precision where a model computes in it: those of linear layers,
    embeddings, convolutions and experts. Norms, biases and routers' own parameters are not among them.

    Args:
        module: plain or sharded, also on the meta device.
    """
    matrices = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, nn.Linear | nn.Embedding)
        for parameter in part.parameters(recurse=False)
        if parameter.dim() == 2
    }
    return {
        name
        for name, tensor in named_weights(module).items()
        if id(tensor) in matrices or (tensor.dim() == 3 and tensor.is_floating_point())
    }


def _delivered(
    stored: torch.dtype, names: Sequence[str], requested: Mapping[str, torch.dtype]
) -> torch.dtype:
    if not stored.is_floating_point:
        return stored
    return next((requested[name] for name in names if name in requested), stored)
