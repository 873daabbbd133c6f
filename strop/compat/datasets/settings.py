"""Classes of the user's own that make training rows, among the settings of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any

from strop.base.sections import section


def _check_named(section: str, path: str, name: str) -> None:
    """Refuse a class without its file, and a file without its class."""
    if bool(path) != bool(name):
        given, value, missing = ("path", path, "name") if path else ("name", name, "path")
        raise ValueError(
            f"{section}.{given} is {value!r}, but {section}.{missing} is empty; set both, or none"
        )


@section("data.dataset_class")
class DatasetClassConfig:
    """A class of your own that makes the rows of training and validation, {path: my_data.py, name: MyDataset}. It is
    called as MyDataset(data_files, tokenizer, config, processor=None, max_samples=-1) and gives a row by its number."""

    path: str = ""
    """Python file with the class, relative to the current directory. Empty: rows are read from the files as they
    are."""
    name: str = ""
    """Name of the class in that file."""

    def __post_init__(self) -> None:
        _check_named("data.dataset_class", self.path, self.name)

    @property
    def is_on(self) -> bool:
        """There is one."""
        return bool(self.path)

    def code_named(self) -> Iterator[tuple[str, str, str]]:
        """The file, which is imported."""
        if self.path:
            yield "path", self.path, self.path


@section("data.datagen")
class DatagenConfig:
    """A class of your own that makes more rows before the first step and after each one, {path: my_rows.py, name:
    MyGenerator}; they are visited from the next epoch on."""

    path: str = ""
    """Python file with the class, relative to the current directory. Empty: no rows are made."""
    name: str = ""
    """Name of the class in that file, which derives from AbstractDataGenerator."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further settings, which the class is given."""

    def __post_init__(self) -> None:
        _check_named("data.datagen", self.path, self.name)

    @property
    def is_on(self) -> bool:
        """There is one."""
        return bool(self.path)

    def code_named(self) -> Iterator[tuple[str, str, str]]:
        """The file, which is imported."""
        if self.path:
            yield "path", self.path, self.path
