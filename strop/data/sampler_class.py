"""Samplers as classes, in verl's form: made once per run, asked for an order at each epoch's start.

    class Mine(AbstractCurriculumSampler):
        def __init__(self, data_source, data_config): ...
        def __iter__(self): ...                       positions in data_source, each once
        def update(self, batch): ...                  after each step; not of an AbstractSampler
        def state_dict(self): ...                     plain values: part of every checkpoint
        def load_state_dict(self, state): ...

The last two are required here: without them a resumed run would go on in another order.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from typing import Any

from strop.algorithms.verl_config import VerlConfig
from strop.data.config import DataConfig
from strop.protocol import DataProto


class AbstractSampler(ABC):
    """Base class of sampler classes of verl."""

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Mapping[str, Any]) -> None:
        """data_source: the row numbers of the training prompts; data_config: the section data, read as an object or a
        mapping."""

    @abstractmethod
    def __iter__(self) -> Iterator[int]:
        """Positions in data_source, each once, in the order of their visits in an epoch."""


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that learns from what was sampled."""

    @abstractmethod
    def update(self, batch: DataProto) -> None:
        """The samples of a step that were trained on or could have been, as `on_batch_end` of a dataset gets them."""


def check_sampler_class(sampler: str, cls: type[Any]) -> None:
    """Refuse a class whose state no checkpoint can hold.

    Raises:
        ValueError: methods are missing.
    """
    missing = [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(cls, name)]
    if missing:
        raise ValueError(
            f"sampler {sampler!r}: {cls.__qualname__} has no {' and no '.join(missing)}, so a run that is resumed "
            f"would go on in another order: add state_dict(), which returns plain values, and "
            f"load_state_dict(state), or write a function order(rows, results, *, epoch, seed)"
        )


class VerlSampler:
    """One sampler object of a run, with what goes wrong told by its class's name."""

    def __init__(self, name: str, cls: type[Any], data_source: Sized, data: DataConfig) -> None:
        self._name = f"sampler {name!r}: {cls.__qualname__}"
        self._object: Any = cls(data_source, VerlConfig(dataclasses.asdict(data)))

    @property
    def learns(self) -> bool:
        """True if it has a method `update`."""
        return hasattr(self._object, "update")

    def positions(self) -> list[int]:
        """The order of the next epoch."""
        return list(self._object)

    def update(self, batch: DataProto) -> None:
        """Pass it the batch of a step."""
        self._object.update(batch)

    def state(self) -> dict[str, Any]:
        """State for the manifest of a checkpoint.

        Raises:
            ValueError: it cannot be written as JSON.
        """
        state = self._object.state_dict()
        try:
            restored: dict[str, Any] = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{self._name}.state_dict returned what a checkpoint cannot hold ({error}): return plain numbers, "
                f"strings, lists, and mappings with strings as keys"
            ) from error
        if restored != state:
            raise ValueError(
                f"{self._name}.state_dict returned values that JSON changes (tuples, or keys that are no strings): "
                f"return plain numbers, strings, lists, and mappings with strings as keys"
            )
        return restored

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self._object.load_state_dict(dict(state))
