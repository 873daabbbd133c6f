"""Checks of the settings data.source_weights and data.source_shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.sections import where_on
from strop.data.mixture import entry_names

if TYPE_CHECKING:
    from strop.data.config import DataConfig
    from strop.data.sft.config import SftDataConfig


def check_sources(data: DataConfig) -> None:
    """Refuse weights and shares of sources that do not go together, or not with rows that come later.

    Raises:
        ValueError: the sentence says which, and what to do.
    """
    check_mixture(data, "data")
    mixture = "source_weights" if data.source_weights else "source_shares"
    if not getattr(data, mixture):
        return
    if where_on(data.datagen) is not None:
        raise ValueError(
            f"data.datagen adds rows while the run goes on, and data.{mixture} wants to know all of them before: "
            f"use one of the two"
        )
    if data.streaming:
        raise ValueError(
            f"data.{mixture} counts the rows of every data source before the first visit, but "
            "data.streaming=true reads a row when it is visited: leave the weights out and repeat or thin out "
            "files instead, or set data.streaming=false"
        )


def check_mixture(data: DataConfig | SftDataConfig, section: str) -> None:
    """Rename sources that are named by a whole entry of train_files as `entry_names` does, which holds wherever the
    files are named from.

    Raises:
        ValueError: weights and shares of sources together, or two for one source.
    """
    if data.source_weights and data.source_shares:
        raise ValueError(
            f"{section}.source_weights and {section}.source_shares both say how often the rows of a source are "
            f"visited: set one of the two"
        )
    for key in ("source_weights", "source_shares"):
        numbers: dict[str, float] = getattr(data, key)
        if not numbers.keys() & set(data.train_files):
            continue
        names = entry_names(data.train_files)
        renamed = {names.get(name, name): number for name, number in numbers.items()}
        if len(renamed) < len(numbers):
            raise ValueError(
                f"{section}.{key} names a source twice, by its name and by its entry: {', '.join(numbers)}"
            )
        object.__setattr__(data, key, renamed)
