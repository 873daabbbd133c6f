"""Settings that do not go with dynamic sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.algorithms.registry import FILTERS

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse a filter that there is not, and a run whose groups are filtered, and that has nothing to compare.

    Raises:
        ValueError: the sentence says which setting, and what to do.
    """
    settings = config.algorithm.filter_groups
    if settings.filter:
        FILTERS[settings.filter]  # an unknown name fails here, with the known ones
    if settings.enable and config.rollout.samples_per_prompt < 2:
        raise ValueError(
            "algorithm.filter_groups compares the samples of a prompt: set rollout.samples_per_prompt to at "
            "least 2"
        )
