"""Rows that are made while a run goes on, in verl's form.

    class Mine(AbstractDataGenerator):
        def __init__(self, config): ...               the section data.datagen
        def generate(self, dataset): ...              a datasets.Dataset, a DataFrame or a list of rows

`generate` is called before the first step and after each one, with an object that has the rows so far (`len`, `[i]`,
`dataframe`) and the samples of the step (`batch`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from strop.algorithms.verl_config import VerlConfig
from strop.data.dataset_class_config import DatagenConfig
from strop.data.rows import columns_of
from strop.protocol import DataProto
from strop.utils.user_files import load_user_file


class AbstractDataGenerator(ABC):
    """Base class of generators of rows."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: object) -> Any:
        """Rows to be added: a datasets.Dataset, a DataFrame or a list of dictionaries."""


class RowsSoFar(Sequence[Mapping[str, Any]]):
    """The rows so far and the last batch, as a generator gets them."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], batch: DataProto | None) -> None:
        self._rows, self.batch = rows, batch

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._rows[index]

    @property
    def dataframe(self) -> Any:
        """The rows as a datasets.Dataset."""
        from datasets import Dataset  # takes a second

        return Dataset.from_dict(columns_of(self._rows))


class GeneratedRows:
    """The rows of a generator."""

    def __init__(self, config: DatagenConfig, rows: Sequence[Mapping[str, Any]]) -> None:
        """Make the generator.

        Raises:
            ValueError: the file has no such class, or making it failed.
        """
        self._label = f"data.datagen {config.name} of {config.path}"
        self._rows: list[Mapping[str, Any]] = list(rows)
        module = load_user_file(config.path, setting="data.datagen.path")
        generator_class = getattr(module, config.name, None)
        if not isinstance(generator_class, type) or not hasattr(generator_class, "generate"):
            raise ValueError(
                f"{self._label}: the file has no class of that name with a method generate(dataset)"
            )
        settings = VerlConfig({"path": config.path, "name": config.name, **config.kwargs})
        try:
            self._generator: Any = generator_class(settings)
        except Exception as error:
            raise ValueError(
                f"{self._label} cannot be made: {type(error).__name__}: {error}; it is called as "
                f"{config.name}(config)"
            ) from error

    def restore(self, added: Sequence[Mapping[str, Any]]) -> None:
        """Restore rows that were added earlier."""
        self._rows += added

    def new_rows(self, batch: DataProto | None) -> list[dict[str, Any]]:
        """The next rows.

        Raises:
            ValueError: generate failed, or returned something else.
        """
        try:
            returned = self._generator.generate(RowsSoFar(self._rows, batch))
        except Exception as error:
            raise ValueError(
                f"{self._label}: generate failed with {type(error).__name__}: {error}"
            ) from error
        rows = _to_rows(returned)
        if rows is None:
            raise ValueError(
                f"{self._label}: generate returned a {type(returned).__name__}; it returns a datasets.Dataset, a "
                f"DataFrame or a list of rows"
            )
        self._rows += rows
        return rows


def _to_rows(returned: Any) -> list[dict[str, Any]] | None:
    if returned is None:
        return []
    if hasattr(returned, "to_dict") and hasattr(returned, "columns"):  # a DataFrame
        returned = returned.to_dict("records")
    elif hasattr(returned, "to_list"):
        returned = returned.to_list()
    is_rows = isinstance(returned, list | tuple) and all(isinstance(row, Mapping) for row in returned)
    return [dict(row) for row in returned] if is_rows else None
