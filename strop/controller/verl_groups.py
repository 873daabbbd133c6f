"""Worker groups with processes of their own, under verl's names; also detached ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, Self, TypeVar, Unpack

from strop.controller.ray.detached import NAMESPACE, Attached, DetachedName
from strop.controller.ray.group import RoleGroup, role_groups
from strop.controller.ray.pending import Traffic
from strop.controller.ray.pool import RayResourcePool
from strop.controller.ray.runtime import CLOSE_S, PoolsRuntime, RuntimeOptions
from strop.controller.roles import RoleSpec
from strop.controller.worker import Worker

W = TypeVar("W", bound=Worker)
T = TypeVar("T")


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
        """Workers of each process, in the order of their creation."""


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs[Any] | RoleSpec[Any]],
) -> ColocatedClass:
    """Worker classes by role, for one group whose processes hold a worker of each; see `spawn`."""
    return ColocatedClass({name: _spec(spec) for name, spec in class_dict.items()})


class RayWorkerGroup(RoleGroup[W]):
    """Worker processes of its own with one worker in each, or one of each role of a colocated class."""

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: RayClassWithInitArgs[W] | RoleSpec[W] | ColocatedClass,
        name_prefix: str = "",
        *,
        detached: bool = False,
        name: str = "",
        namespace: str = NAMESPACE,
        **options: Unpack[RuntimeOptions],
    ) -> None:
        """Start the processes and make the workers.

        Args:
            resource_pool: places for the processes.
            ray_cls_with_init: what to make in each.
            name_prefix: what messages and logs call the group; empty: the name of the pool.
            detached: the processes outlive this one, on a cluster that does so too; they end by `destroy`, here or
                in any program that attaches, or with the cluster.
            name: of a detached group, by which `attach` finds it; unique in its namespace.
            namespace: where the name of a detached group lives.
            options: address, call_timeout_s, start_timeout_s, log_dir and env, as of PoolsRuntime.

        Raises:
            NotEnoughDevices: the cluster does not have what the pool needs.
            WorkerFailed: a process died, or a constructor raised an error.
            CallTimeout: processes or constructors took too long.
            ValueError: a detached group has no name, one that is taken, or a pool that other groups use.
        """
        if detached and not name:
            raise ValueError("a detached group needs a name by which it is found again; pass name=...")
        label = name_prefix or resource_pool.name
        roles = _roles(ray_cls_with_init, label)
        runtime = PoolsRuntime(
            {label: resource_pool},
            detached=DetachedName(name=name, namespace=namespace) if detached else None,
            **options,
        )
        try:
            groups = runtime.groups(roles, pool=label)
        except BaseException:
            runtime.close()
            raise
        self._set_groups(
            groups,
            runtime.call_timeout_s,
            close=runtime.leave if detached else runtime.close,
            destroy=runtime.close,
        )

    @classmethod
    def attach(
        cls,
        name: str,
        worker_class: type[W] | Mapping[str, type[Any]],
        *,
        address: str | None = None,
        namespace: str = NAMESPACE,
        call_timeout_s: float = 1800.0,
        start_timeout_s: float = 60.0,
    ) -> RayWorkerGroup[W]:
        """A detached group that another process made on the same cluster.

        Args:
            name: what it was named.
            worker_class: the class of its workers; of a colocated group, the classes by role.
            address: of the cluster; None: what this process is connected to.
            namespace: where the name lives.
            call_timeout_s: deadline of a call, unless the group's own `call_timeout_s` is set.
            start_timeout_s: how long its processes may take to answer.

        Raises:
            ValueError: there is no such group, it has other roles, or a part of it is gone; then the rest is ended.
            TimeoutError: it has not answered; it goes on.
        """
        attached = Attached(
            DetachedName(name=name, namespace=namespace), address=address, timeout_s=start_timeout_s
        )
        roles = list(attached.info.meshes)
        classes = (
            worker_class if isinstance(worker_class, Mapping) else dict.fromkeys(roles[:1], worker_class)
        )
        if set(classes) != set(roles):
            attached.leave()
            raise ValueError(
                f"group {name!r} has the roles {', '.join(roles)}; pass the worker class of each, as a dictionary"
            )
        groups = role_groups(
            classes,
            attached.info.meshes,
            manager=attached.manager,
            members=attached.manager.members,
            call_timeout_s=call_timeout_s,
            traffic=Traffic(),
        )
        group: RayWorkerGroup[W] = cls.__new__(cls)
        group._set_groups(
            groups, call_timeout_s, close=attached.leave, destroy=lambda: attached.close(CLOSE_S)
        )
        return group

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
        """Close the workers and end their processes; a detached group goes on without this controller."""
        self._close()

    def destroy(self) -> None:
        """Close the workers and end their processes, also those of a detached group."""
        self._destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _set_groups(
        self,
        groups: Mapping[str, Any],
        call_timeout_s: float,
        *,
        close: Callable[[], None],
        destroy: Callable[[], None],
    ) -> None:
        """Be the first of these groups, which share processes, and their owner."""
        self._groups = dict(groups)
        self._close = close
        self._destroy = destroy
        first: RoleGroup[Any] = next(iter(self._groups.values()))
        super().__init__(
            first._worker_class,
            first.mesh,
            role=first.role,
            manager=first.manager,
            members=first.members,
            call_timeout_s=call_timeout_s,
            traffic=first.traffic,
        )


def _roles(
    worker_classes: RayClassWithInitArgs[Any] | RoleSpec[Any] | ColocatedClass, label: str
) -> dict[str, RoleSpec[Any]]:
    return (
        worker_classes.roles if isinstance(worker_classes, ColocatedClass) else {label: _spec(worker_classes)}
    )


def _spec(worker_class: RayClassWithInitArgs[Any] | RoleSpec[Any]) -> RoleSpec[Any]:
    return worker_class.spec if isinstance(worker_class, RayClassWithInitArgs) else worker_class


def named_roles(prefix_set: Collection[str], entries: Mapping[str, T]) -> dict[str, T]:
    """Entries of the named roles of a colocated group, in the order of creation (as `spawn` does).

    Raises:
        ValueError: a name is no role of the group; the message has the roles.
    """
    unknown = sorted(set(prefix_set) - set(entries))
    if unknown:
        raise ValueError(f"no role {unknown[0]!r} in this group; its roles: {', '.join(entries) or 'none'}")
    return {name: entry for name, entry in entries.items() if name in prefix_set}
