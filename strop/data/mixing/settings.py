"""How often the rows of each data source are visited, among the settings of data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strop.base.field_types import NonNegativeFloat
from strop.base.sections import section_on
from strop.data.mixing import entry_names


@dataclass(frozen=True, kw_only=True)
class MixtureSettings:
    source_weights: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """How often the training rows of a data source are visited per epoch, by its name: 2 is twice, 0.5 in every
    other epoch, 0 never. 1 for sources that are not named. Where no row has a data source of these names, they are
    those of the files: the last part without its suffix; where several have it, the path from the folder that has them
    all. The whole entry of train_files names it too."""
    source_shares: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """In place of weights: the share that each source has of all visits, {math: 0.7, code: 0.3}, whatever they add up
    to. The source with the smallest share for its number of rows is visited once per epoch, others more often."""

    def __post_init__(self) -> None:
        data: Any = self
        check_mixture(data, "data")
        mixture = "source_weights" if self.source_weights else "source_shares"
        if not getattr(self, mixture):
            return
        if section_on(data, "datagen") is not None:
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


def check_mixture(data: Any, section: str) -> None:
    """Call sources that are named by a whole entry of train_files as `entry_names` does, which holds wherever the files
    are named from.

    Raises:
        ValueError: weights and shares of sources together, or two for one source.
    """
    if data.source_weights and data.source_shares:
        raise ValueError(
            f"{section}.source_weights and {section}.source_shares both say how often the rows of a source are "
            f"visited: set one of the two"
        )
    for key in ("source_weights", "source_shares"):
        given: dict[str, float] = getattr(data, key)
        if not given.keys() & set(data.train_files):
            continue
        called = entry_names(data.train_files)
        named = {called.get(name, name): weight for name, weight in given.items()}
        if len(named) < len(given):
            raise ValueError(
                f"{section}.{key} names a source twice, by its name and by its entry: {', '.join(given)}"
            )
        object.__setattr__(data, key, named)
