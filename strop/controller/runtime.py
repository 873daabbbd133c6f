"""Runtime protocol: the interface of the inline and the Ray runtime, which make worker groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from strop.controller.group import WorkerGroup
from strop.controller.roles import RoleSpec


class Runtime(ABC):
    """Makes worker groups on named pools of processes, and ends them; as a context manager it is closed at its end."""

    def __init__(self) -> None:
        self._ending = ExitStack()

    @abstractmethod
    def groups(
        self, roles: Mapping[str, RoleSpec[Any]], *, pool: str = "main", is_elastic: bool = False
    ) -> dict[str, WorkerGroup[Any]]:
        """The worker groups of these roles, all in the same processes of one pool.

        In each process the workers are made in the order of `roles`; a worker finds those made before it,
        and later the others, in `Worker.colocated`.

        Args:
            roles: by name.
            pool: their processes.
            is_elastic: a runtime with processes of their own goes on without those that are lost, and replaces them
                (strop.controller.ray.elastic); of one role that has a pool for itself.

        Raises:
            ValueError: there is no such pool, or a role's mesh does not fit it.
        """

    @property
    def address(self) -> str:
        """Address of this process for the workers; empty where they live in it."""
        return ""

    def on_close(self, close: Callable[[], None]) -> None:
        """Call `close` at the end, after the workers have ended; last given first."""
        self._ending.callback(close)

    @abstractmethod
    def close(self) -> None:
        """Close all workers, last made first, and end their processes; more than once does no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
