"""Where guests join the core for a command: what they know, the core asks through its registries."""

from __future__ import annotations

from collections.abc import Sequence


def join() -> None:
    """Let the migration tables say what a key of verl or TRL is called here; they are read when a key is unknown."""
    from strop.config.schema import other_names

    if _name_here not in other_names:
        other_names.append(_name_here)


def join_run() -> None:
    """Let a run's environments be inspected before its first step."""
    from strop.checks.environments_of_run import certify_environments
    from strop.trainer.preflight import before_first_steps

    if certify_environments not in before_first_steps:
        before_first_steps.append(certify_environments)


def _name_here(key: str) -> tuple[Sequence[str], str]:
    from strop.compat.migration.names import name_here

    return name_here(key)
