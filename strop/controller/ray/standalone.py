"""Worker groups with processes of their own, under verl's names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from strop.controller.ray.group import RoleGroup
from strop.controller.ray.pool import RayResourcePool
from strop.controller.ray.runtime import PoolsRuntime
from strop.controller.roles import RoleSpec, named_roles
from strop.controller.worker import Worker

W = TypeVar("W", bound=Worker)


class RayClassWithInitArgs(Generic[W]):
    """A worker class and the arguments its workers are made with."""

    def __init__(self, cls: type[W] | Any, *args: Any, **kwargs: Any) -> None:
        """Remember them; a class that `ray.remote` has wrapped stands for the class inside."""
        metadata = getattr(cls, "__ray_metadata__", None)
        inner = cls if metadata is None else metadata.modified_class
        self.spec: RoleSpec[W] = RoleSpec(getattr(inner, "__ray_actor_class__", inner), args, kwargs)
        """The same as a role."""


class ColocatedClass:
    """Several worker classes whose workers share processes; made by `create_colocated_worker_cls`."""

    def __init__(self, roles: Mapping[str, RoleSpec[Any]]) -> None:
        self.roles = dict(roles)
        """What is made in each process, in this order."""


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs[Any] | RoleSpec[Any]],
) -> ColocatedClass:
    """Worker classes by role, for one group whose processes hold a worker of each; see `spawn`."""
    return ColocatedClass({name: _spec(one) for name, one in class_dict.items()})


class RayWorkerGroup(RoleGroup[W]):
    """Worker processes of its own with one worker in each, or one of each role of a colocated class."""

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs[W] | RoleSpec[W] | ColocatedClass,
        name_prefix: str = "",
        *,
        address: str | None = None,
        call_timeout_s: float = 1800.0,
        start_timeout_s: float = 300.0,
        log_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the processes and make the workers.

        Args:
            resource_pool: places for the processes.
            ray_cls_with_init: what to make in each.
            name_prefix: what messages and logs call the group; empty: the name of the pool.
            address: of an existing cluster; None: what this process is connected to, or a private one.
            call_timeout_s: deadline of a call, unless the group's own `call_timeout_s` is set.
            start_timeout_s: deadline of each phase of the start.
            log_dir: folder for the output of the processes, `<name_prefix>-<rank>.log`; None: a temporary one,
                kept only after a failure.
            env: environment variables of these processes alone.

        Raises:
            NotEnoughDevices: the cluster does not have what the pool needs.
            WorkerFailed: a process died, or a constructor raised an error.
            CallTimeout: processes or constructors took too long.
        """
        label = name_prefix or resource_pool.name
        roles = (
            ray_cls_with_init.roles
            if isinstance(ray_cls_with_init, ColocatedClass)
            else {label: _spec(ray_cls_with_init)}
        )
        self._runtime = PoolsRuntime(
            {label: resource_pool},
            address=address,
            call_timeout_s=call_timeout_s,
            start_timeout_s=start_timeout_s,
            log_dir=log_dir,
            env=env,
        )
        try:
            self._groups: dict[str, Any] = dict(self._runtime.groups(roles, pool=label))
        except BaseException:
            self._runtime.close()
            raise
        first: RoleGroup[Any] = next(iter(self._groups.values()))
        super().__init__(
            next(iter(roles.values())).worker_class,
            first.mesh,
            role=first.role,
            crew=first.crew,
            members=first.members,
            call_timeout_s=call_timeout_s,
            traffic=self._runtime.traffic,
        )

    def spawn(self, prefix_set: Collection[str]) -> dict[str, RoleGroup[Any]]:
        """A group for each of the named roles of a colocated class; they share the processes of this one.

        Raises:
            ValueError: a name is no role of the group.
        """
        return named_roles(prefix_set, self._groups)

    def bound(self, method_name: str) -> Callable[..., Any]:
        """The function that runs a registered method on the group; a colocated one is spawned first."""
        if len(self._groups) > 1:
            raise AttributeError(
                f"this group holds workers of several roles, so {method_name} has to be called on one of them: "
                f"group.spawn({{...}})[role].call.{method_name}; roles: {', '.join(self._groups)}"
            )
        return super().bound(method_name)

    def close(self) -> None:
        """Close the workers and end their processes; more than once does no harm."""
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _spec(one: RayClassWithInitArgs[Any] | RoleSpec[Any]) -> RoleSpec[Any]:
    return one.spec if isinstance(one, RayClassWithInitArgs) else one
