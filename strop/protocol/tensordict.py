"""Between a batch and a TensorDict that carries its non-tensor columns and facts too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from strop.protocol.columns import BatchError
from strop.protocol.merging import object_array


def tensordict_from_columns(
    tensors: Mapping[str, Tensor], others: Mapping[str, NDArray[Any]], facts: Mapping[str, Any], length: int
) -> TensorDict:
    """Tensors as they are, other columns as NonTensorStack, facts as NonTensorData."""
    names = [*tensors, *others, *facts]
    for name in names:
        if names.count(name) > 1:
            raise BatchError(
                f"{name!r} names two things (a tensor, another column, a fact), and a TensorDict has one "
                f"place for it; rename or pop one"
            )
    converted: dict[str, Any] = dict(tensors)
    for name, array in others.items():
        converted[name] = NonTensorStack(*[NonTensorData(item) for item in array])
    for name, fact in facts.items():
        converted[name] = NonTensorData(fact, batch_size=[length])
    return TensorDict(converted, batch_size=[length])


def columns_from_tensordict(
    tensordict: TensorDict,
) -> tuple[dict[str, Tensor], dict[str, NDArray[Any]], dict[str, Any]]:
    """The inverse of `tensordict_from_columns`."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, NDArray[Any]] = {}
    facts: dict[str, Any] = {}
    for name in tensordict.keys():  # noqa: SIM118 - iterating a TensorDict gives its rows
        item: Any = tensordict.get(name)
        if isinstance(item, Tensor):
            tensors[str(name)] = item
        elif isinstance(item, NonTensorStack):
            others[str(name)] = object_array([row.data for row in item])
        elif isinstance(item, NonTensorData):
            facts[str(name)] = item.data
        else:
            raise BatchError(
                f"column {name!r} of the TensorDict is a {type(item).__name__}; a batch holds tensors, "
                f"NonTensorStack columns and NonTensorData facts, and no nested TensorDict"
            )
    return tensors, others, facts
