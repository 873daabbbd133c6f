from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from strop.controller import (
    Dispatch,
    InlineRuntime,
    Mesh,
    RoleSpec,
    Runtime,
    Worker,
    WorkerGroup,
    as_list,
    meshes_on,
    register,
    role,
)


class Actor(Worker):
    """Holds a number that others read."""

    def __init__(self, number: int, *, scale: int = 1) -> None:
        self.number = number * scale + self.rank
        self.made_before = list(self.colocated)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get(self) -> int:
        return self.number


class Rollout(Worker):
    """Uses the actor of its process."""

    def __init__(self, closed: list[str] | None = None) -> None:
        actor = self.colocated["actor"]
        assert isinstance(actor, Actor)
        self.actor = actor
        self.made_before = list(self.colocated)
        self.closed = closed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def read(self) -> int:
        return self.actor.number * 100

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def names(self) -> list[str]:
        return list(self.colocated)

    def close(self) -> None:
        if self.closed is not None:
            self.closed.append(f"{self.placement.role} {self.rank}")


class Stubborn(Rollout):
    def close(self) -> None:
        super().close()
        raise OSError(f"{self.placement.role} cannot close")


def test_colocated_roles_see_those_made_before_them_and_later_all() -> None:
    runtime: Runtime = InlineRuntime()
    groups = runtime.groups({"actor": role(Actor, 5, scale=2), "rollout": role(Rollout)})
    actor: WorkerGroup[Actor] = groups["actor"]
    rollout: WorkerGroup[Rollout] = groups["rollout"]
    assert as_list(actor.call.get()) == [10]
    assert as_list(rollout.call.read()) == [1000]
    assert as_list(rollout.call.names()) == [["actor", "rollout"]]
    (actor_worker,), (rollout_worker,) = actor.workers, rollout.workers  # type: ignore[attr-defined]
    assert (actor_worker.made_before, rollout_worker.made_before) == ([], ["actor"])
    assert actor_worker.colocated["rollout"] is rollout_worker
    assert actor_worker.colocated["actor"] is actor_worker
    place = rollout_worker.placement
    assert (place.role, place.rank, place.local_rank, place.local_world_size) == ("rollout", 0, 0, 1)
    assert (rollout_worker.master_addr, rollout_worker.master_port) == ("127.0.0.1", 0)


def test_several_workers_stand_for_several_processes() -> None:
    with InlineRuntime() as runtime:
        groups = runtime.groups({"actor": role(Actor, 5).on(Mesh(dp=2, tp=2)), "rollout": role(Rollout)})
        assert as_list(groups["rollout"].call.read()) == [500, 600, 700, 800]
        assert groups["rollout"].mesh == Mesh(dp=4)
        worker = groups["actor"].workers[3]  # type: ignore[attr-defined]
        assert (worker.local_rank, worker.local_world_size, worker.dp_rank) == (3, 4, 1)
        other = runtime.groups({"actor": role(Actor, 1)}, pool="other")
        assert as_list(other["actor"].call.get()) == [1]


def test_workers_are_closed_once_the_last_one_first() -> None:
    closed: list[str] = []
    with InlineRuntime() as runtime:
        runtime.groups(
            {
                "actor": role(Actor, 1).on(Mesh(dp=2)),
                "first": role(Rollout, closed),
                "second": role(Rollout, closed),
            }
        )
        runtime.groups({"actor": role(Actor, 1), "third": role(Rollout, closed)})
    runtime.close()
    assert closed == ["third 0", "second 1", "first 1", "second 0", "first 0"]


def test_an_error_while_closing_is_raised_after_all_are_closed() -> None:
    closed: list[str] = []
    runtime = InlineRuntime()
    runtime.groups(
        {"actor": role(Actor, 1), "first": role(Rollout, closed), "second": role(Stubborn, closed)}
    )
    with pytest.raises(OSError, match="second cannot close"):
        runtime.close()
    assert closed == ["second 0", "first 0"]
    runtime.close()


def test_workers_made_before_one_that_failed_are_closed_too() -> None:
    closed: list[str] = []
    runtime = InlineRuntime()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        runtime.groups(
            {"actor": role(Actor, 1), "first": role(Rollout, closed), "bad": RoleSpec(Rollout, (), {"no": 1})}
        )
    runtime.close()
    assert closed == ["first 0"]


def test_closed_workers_are_not_kept_alive() -> None:
    runtime = InlineRuntime()
    groups = runtime.groups({"actor": role(Actor, 1), "rollout": role(Rollout)})
    alive = weakref.ref(groups["rollout"].workers[0])  # type: ignore[attr-defined]
    gc.disable()
    try:
        runtime.close()
        del groups
        assert alive() is None  # at once, without the garbage collector: models are large
    finally:
        gc.enable()


def test_a_worker_made_alone_has_itself_for_company() -> None:
    worker = Actor(3)
    assert worker.made_before == [""]
    assert dict(worker.colocated) == {"": worker}
    assert (worker.local_rank, worker.local_world_size, worker.master_port) == (0, 1, 0)
    worker.close()


def test_meshes_fit_the_pool() -> None:
    runtime = InlineRuntime()
    roles = {"actor": role(Actor, 1).on(Mesh(dp=4)), "rollout": role(Rollout).on(Mesh(dp=2))}
    with pytest.raises(
        ValueError, match="role 'rollout' has a mesh of 2 workers, but pool 'main' has 4 proc"
    ):
        runtime.groups(roles)
    with pytest.raises(ValueError, match="no role was given for pool 'left'"):
        runtime.groups({}, pool="left")
    assert meshes_on("left", 3, {"actor": role(Actor, 1)}) == {"actor": Mesh(dp=3)}


def test_a_role_is_a_worker_class_and_its_arguments() -> None:
    spec = role(Actor, 1, scale=3)
    assert (spec.worker_class, spec.args, spec.kwargs, spec.mesh) == (Actor, (1,), {"scale": 3}, None)
    assert spec.on(Mesh(dp=2)).mesh == Mesh(dp=2)
    not_a_worker: Any = dict
    with pytest.raises(TypeError, match="a subclass of strop.controller.Worker, got <class 'dict'>"):
        RoleSpec(not_a_worker)
    function: Any = lambda: Actor(1)  # noqa: E731
    with pytest.raises(TypeError, match="a subclass of strop.controller.Worker, got <function"):
        role(function)


def test_one_process_has_one_worker_of_a_role() -> None:
    spec = role(Actor, 1)
    first = spec.make(Actor(1).placement, process := {})
    assert process == {"": first}
    with pytest.raises(ValueError, match="this process has a worker of role '' already"):
        spec.make(first.placement, process)
