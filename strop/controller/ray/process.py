"""A worker process: one Ray actor that holds a worker of each role placed in it.

Calls run one after another, in the order in which the controller gave them; nothing else happens in the
process between them. Two waits exist here: for arguments that other workers still compute, with the deadline
that the controller set, and whatever a worker's own method waits for. The controller answers for the latter:
it asks the process to write down where it stands (`DUMP_SIGNAL`) and ends it.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import RayError

from strop.controller import call
from strop.controller.call import BatchAndMetrics, WorkerCall
from strop.controller.errors import FollowerLost
from strop.controller.ray.cluster import this_address
from strop.controller.ray.members import GroupInfo
from strop.controller.ray.messages import CallResponse, MethodRaised, ProcessInfo, RaisedReport
from strop.controller.ray.private import remember_token
from strop.controller.ray.transport import BatchRefs, register_serializers
from strop.controller.roles import RoleSpec
from strop.controller.store_server import Rendezvous, RendezvousServer
from strop.controller.worker import Follower, FollowerAddress, Placement, Worker, close_all
from strop.protocol import DataProto
from strop.run.heartbeat import heartbeat
from strop.utils import timeline
from strop.utils.activity import activity
from strop.utils.ports import free_port
from strop.utils.sanitize import remember_named

T = TypeVar("T")

DUMP_SIGNAL = signal.SIGUSR1
"""A worker process writes the stacks of its threads into its log when it gets this signal."""


class Shared(Generic[T]):
    """An argument that several workers get, stored once."""

    def __init__(self, reference: object) -> None:
        self.reference = reference
        """Reference to the value in the object store."""


class WorkerProcess:
    """The workers of one process. The methods are called by the controller, through Ray."""

    def __init__(self, log_path: str, folder: str) -> None:
        """Send the output of the process to a file from here on.

        Args:
            log_path: the file, on this process's node; its folder is made.
            folder: where the controller works; relative paths start there here too, if it exists.
        """
        _write_output_to(Path(log_path))
        remember_named(os.environ)
        remember_token()
        if Path(folder).is_dir():
            os.chdir(folder)
        register_serializers()
        self._workers: dict[str, Worker] = {}
        self._rendezvous_server: RendezvousServer | None = None
        self._info: GroupInfo | None = None
        self._heartbeat = heartbeat(Path(log_path))
        self._heartbeat.__enter__()

    def process_info(self) -> ProcessInfo:
        """Process ids and a free port, for the placement of workers here."""
        return ProcessInfo(
            pid=os.getpid(),
            parent_pid=os.getppid(),
            free_port=free_port(),
        )

    def start_rendezvous(self) -> Rendezvous:
        """Start the rendezvous server of the pool's processes on this node's address in the cluster."""
        self._rendezvous_server = RendezvousServer(this_address())
        return self._rendezvous_server.rendezvous

    def remember(self, info: GroupInfo) -> None:
        """Store the information that another controller needs to attach to the group."""
        self._info = info

    def info(self) -> GroupInfo | None:
        """The information stored by `remember`; None before the group has finished its start."""
        return self._info

    def make(self, spec: RoleSpec[Any], placement: Placement, *followers: FollowerAddress) -> CallResponse:
        """Make the worker of a role, whose rank has these followers on other nodes."""
        os.environ["MASTER_ADDR"] = placement.master_addr
        os.environ["MASTER_PORT"] = str(placement.master_port)

        def run() -> None:
            with activity("the start of a worker"):
                spec.make(replace(placement, followers=followers), self._workers)

        return _respond(run)

    def make_follower(self, spec: RoleSpec[Any], placement: Placement) -> FollowerAddress:
        """Make the follower of a role on this node; its address."""

        def run() -> FollowerAddress:
            follower = spec.make(placement, self._workers)
            assert isinstance(follower, Follower), "RoleSpec.follower is one"
            return follower.address()

        address: FollowerAddress = _respond(run).value
        return address

    def call(self, role: str, order: WorkerCall, wait_s: float) -> CallResponse:
        """Run a worker's method; `wait_s` is the deadline for arguments that others compute."""
        return self._call(role, order, wait_s, BatchRefs.of)

    def call_with_objects(
        self, role: str, order: WorkerCall, wait_s: float, num_objects: int
    ) -> tuple[Any, ...]:
        """As `call`; the parts of a batch are values beside the response, so many in all, None where there are fewer.

        They belong to the caller, so that the end of this process costs none of them.
        """
        objects: list[Any] = []

        def store(part: DataProto) -> int:
            objects.append(part)
            return len(objects) - 1

        refs_of = partial(BatchRefs.of, store=store, max_heavy=num_objects - 1)
        response = self._call(role, order, wait_s, refs_of)
        return response, *objects, *[None] * (num_objects - len(objects))

    def _call(
        self, role: str, order: WorkerCall, wait_s: float, refs_of: Callable[[DataProto], BatchRefs]
    ) -> CallResponse:
        def local(arg: object) -> Any:
            if not isinstance(arg, Shared):
                return arg
            (value,) = fetch([arg.reference], wait_s, "an argument of several workers")
            return value

        def run() -> Any:
            worker = self._workers[role]
            with (
                timeline.on_track(worker.timeline_track),
                timeline.span("waits for shared arguments", "wait"),
            ):
                kwargs = {name: local(arg) for name, arg in order.kwargs.items()}
                args = [local(arg) for arg in order.args]
            return replace(order, args=args, kwargs=kwargs).run(worker)

        with activity(f"{role}.{order.method}"):
            return _respond(run, refs_of)

    def close(self) -> CallResponse:
        """Close the workers, last made first; all of them, whatever one of them raises."""

        def run() -> None:
            try:
                close_all(list(self._workers.values()))
            finally:
                self._workers.clear()
                if self._rendezvous_server is not None:
                    self._rendezvous_server.close()
                self._heartbeat.__exit__(None, None, None)

        return _respond(run)


def fetch(references: list[Any], wait_s: float, label: str) -> list[Any]:
    """The values of references in a worker, in time.

    Raises:
        TimeoutError: they did not come within `wait_s` seconds.
    """
    try:
        return list(ray.get(references, timeout=wait_s))
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"{label} did not arrive within {wait_s:g} s") from None


def _respond(
    run: Callable[[], Any], refs_of: Callable[[DataProto], BatchRefs] = BatchRefs.of
) -> CallResponse:
    """Response of a call, with a batch stored by `refs_of`; an error is raised as a `MethodRaised`, which can always be
    pickled."""
    try:
        value, metrics = run(), None
        if isinstance(value, BatchAndMetrics):
            metrics, value = value.metrics, value.batch
        stored = refs_of(value) if isinstance(value, DataProto) else None
    except BaseException as error:  # noqa: BLE001  whatever ends a method is reported, SystemExit too
        raise MethodRaised(_report(error)) from None
    return CallResponse(
        value=value if stored is None else None,
        stored=stored,
        metrics=metrics,
        peak_memory_bytes=_peak_memory_bytes(),
    )


def _report(error: BaseException) -> RaisedReport:
    kind, frames = type(error), error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, call.__file__):
        frames = frames.tb_next  # the frames of the way to the worker's method say nothing about it
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return RaisedReport(
        exception_type=f"{module}{kind.__qualname__}",
        message=str(error),
        traceback="".join(traceback.format_exception(kind, error, frames)),
        at=time.time(),
        peak_memory_bytes=_peak_memory_bytes(),
        is_consequence=isinstance(error, RayError),
        ends_worker=isinstance(error, FollowerLost),
        facts=_facts_of(error),
    )


def _facts_of(error: BaseException) -> dict[str, int]:
    """Numbers that an error has; those of a library may be anything, and must travel."""
    facts = getattr(error, "facts", None)
    if not isinstance(facts, dict):
        return {}
    return {name: value for name, value in facts.items() if type(name) is str and type(value) is int}


def _write_output_to(path: Path) -> None:
    """Standard output and error of this process, of its libraries too, and the stacks when it crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", encoding="utf-8", buffering=1)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # Ray's are strict: a log may fail on no text
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.register(DUMP_SIGNAL, log, all_threads=True)


def _peak_memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
