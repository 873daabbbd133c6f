"""Numbers of ranks that the engine of a role cannot have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.engines.config import EngineConfig

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse ranks that the engine of a role does not divide.

    Raises:
        ValueError: as `check_ranks`.
    """
    for role, engine in config.engines.items():
        check_ranks(role, engine, config.resources.apart.get(role, config.resources.ranks))


def check_ranks(role: str, engine: EngineConfig, ranks: int) -> None:
    """Raise a ValueError when the engine's groups of ranks do not divide those of the role.

    Args:
        role: section of the engine, `actor` for actor.engine.
        engine: of the role.
        ranks: of the role.
    """
    for key, size in (("sequence_parallel", engine.sequence_parallel), ("shard_size", engine.shard_size)):
        if size > 1 and ranks % size:
            raise ValueError(
                f"{role}.engine.{key} is {size}, which does not divide the {ranks} ranks of the {role}: "
                f"change it, or the number of ranks"
            )
