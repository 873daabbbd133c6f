"""The inline runtime: the workers live in the controller's process and run one after another.

Nothing is sent anywhere, so a debugger steps from the controller into a worker, and an error arrives with
its whole traceback at the call. No call waits for another; a non-blocking one has its result at once.
Because a worker runs to its end before the next one starts, a group of several workers can run methods
without collectives only; and nothing interrupts a call, so `WorkerGroup.call_timeout_s` has no effect here.
Workers get batches of their own whose tensors share memory with the caller's; a worker that writes into
them is found out, because on another runtime the write would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from strop.controller.call import Pending, WorkerCall
from strop.controller.group import WorkerGroup
from strop.controller.mesh import Mesh
from strop.controller.roles import RoleSpec, meshes_on
from strop.controller.runtime import Runtime
from strop.controller.worker import Placement, Worker, close_all

W = TypeVar("W", bound=Worker)


class InlineWorkerGroup(WorkerGroup[W]):
    """Workers of one role in this process."""

    def __init__(self, workers: Sequence[W], mesh: Mesh) -> None:
        super().__init__(type(workers[0]), mesh)
        self.workers = list(workers)
        """The workers themselves, in rank order; for tests and debugging."""

    def submit(self, calls: Sequence[WorkerCall]) -> list[Pending[Any]]:
        """Run the methods now; an error is raised here, not when the result is asked for."""
        started: list[Pending[Any]] = []
        for call in calls:
            future: Future[Any] = Future()
            future.set_result(call.run(self.workers[call.rank]))
            started.append(future)
        return started


class InlineRuntime(Runtime):
    """Makes worker groups whose workers live in this process; every pool is this process."""

    def __init__(self) -> None:
        super().__init__()
        self._processes: list[dict[str, Worker]] = []

    def groups(
        self, roles: Mapping[str, RoleSpec[Any]], *, pool: str = "main", is_elastic: bool = False
    ) -> dict[str, WorkerGroup[Any]]:
        """The worker groups of these roles; the workers of one rank see each other.

        There is one worker of each role, or as many as the roles' meshes have: several stand for as many
        processes, one after another, and cannot run collectives.

        Raises:
            ValueError: there is no role, or the meshes differ in their number of workers.
        """
        sizes = {spec.mesh.world_size for spec in roles.values() if spec.mesh is not None} or {1}
        meshes = meshes_on(pool, max(sizes), roles)
        workers_of_role: dict[str, list[Worker]] = {name: [] for name in roles}
        for rank in range(max(sizes)):
            process: dict[str, Worker] = {}
            self._processes.append(process)
            for name, spec in roles.items():
                placement = Placement(
                    rank=rank, mesh=meshes[name], local_rank=rank, local_world_size=max(sizes), role=name
                )
                workers_of_role[name].append(spec.make(placement, process))
        return {name: InlineWorkerGroup(workers, meshes[name]) for name, workers in workers_of_role.items()}

    def close(self) -> None:
        """Close all workers, last made first; an error of one is raised after all were closed."""
        processes, self._processes = self._processes, []
        with self._ending:
            close_all([worker for process in processes for worker in process.values()])
        for process in processes:
            process.clear()
