"""Keys that were renamed: for one version the old name is taken as the new one, and a sentence says so."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

RENAMED = {"reward.policies": "reward.on_failure"}
"""Full keys of 0.1, each with its name since 0.2, in the same section. An entry leaves with 0.3."""


def current_key(key: str) -> str:
    """The full key, with the name that it has now; what is below a renamed key is renamed with it."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            logger.warning(f"{old} is called {new} since 0.2; it was taken as that")
            return new + key[len(old) :]
    return key
