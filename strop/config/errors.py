"""The one error of configuration, which may report several problems at once."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says which key, which value, and what to do."""


def report(problems: Sequence[str]) -> ConfigError:
    """The error for these problems: a single one keeps its own message unchanged."""
    if len(problems) == 1:
        return ConfigError(problems[0])
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in the configuration:\n{listed}")
