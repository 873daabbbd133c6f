"""Classes of the user's own that make training rows, among the settings of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, ClassVar

from strop.config.sections import section
from strop.utils.user_files import divide_named_file


class _NamedClass:
    """A class of the user's own, by its file and its name."""

    KEY: ClassVar[str]
    """Full key of the section."""
    path: str
    name: str

    def __post_init__(self) -> None:
        divide_named_file(self)
        if bool(self.path) != bool(self.name):
            key, value, missing = ("path", self.path, "name") if self.path else ("name", self.name, "path")
            raise ValueError(
                f"{self.KEY}.{key} is {value!r}, but {self.KEY}.{missing} is empty; set both, or none"
            )

    @property
    def is_on(self) -> bool:
        """True if there is one."""
        return bool(self.path)

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """The file, which is imported."""
        if self.path:
            yield "path", self.path, self.path


@section("data.dataset_class")
class DatasetClassConfig(_NamedClass):
    """A class of your own that makes the rows of training and validation, {path: my_data.py, name: MyDataset}. It is
    called as MyDataset(data_files, tokenizer, config, processor=None, max_samples=-1) and gives a row by its number."""

    KEY: ClassVar[str] = "data.dataset_class"
    path: str = ""
    """Python file with the class, relative to the current directory. Empty: rows are read from the files as they
    are."""
    name: str = ""
    """Name of the class in that file; the path may name it too, FILE.py:CLASS."""


@section("data.datagen")
class DatagenConfig(_NamedClass):
    """A class of your own that makes more rows before the first step and after each one, {path: my_rows.py, name:
    MyGenerator}; they are visited from the next epoch on."""

    KEY: ClassVar[str] = "data.datagen"
    path: str = ""
    """Python file with the class, relative to the current directory. Empty: no rows are made."""
    name: str = ""
    """Name of the class in that file, which derives from AbstractDataGenerator."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further settings, which the class is given."""
