"""Settings that do not go with dynamic sampling."""

from __future__ import annotations

from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse a run whose groups are filtered, and that has nothing to compare.

    Raises:
        ValueError: the sentence says which setting, and what to do.
    """
    if config.rollout.samples_per_prompt < 2:
        raise ValueError(
            "algorithm.filter_groups compares the samples of a prompt: set rollout.samples_per_prompt to at "
            "least 2"
        )
