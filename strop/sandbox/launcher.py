"""Launcher process: waits for a program, runs it in a fresh sandbox, watches it, and answers.

One program at a time. It waits in one place for: the driver (whose end of the socket closes when the driver dies,
however it dies; then the sandbox is ended and the launcher exits), the pipes of the program, and the nearest limit.
A sandbox lives at most as long as its launcher: the kernel sees to it (init_process.py).

The program never runs in this process, nor in one that has more in memory than the program itself.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import json
import os
import select
import signal
import socket
import traceback
from collections.abc import Mapping
from typing import Any

from strop.sandbox import bubblewrap, cgroups, framing, init_process, kernel
from strop.sandbox.supervisor import Supervisor
from strop.sandbox.usage import Meter

_OUTER_ID = 65534
"""User and group that the program has outside, when the launcher is root: nobody."""
_MAX_FDS = 64
"""Most open files of a launcher."""
_IDLE_S = 2.0
"""Interval at which an idle launcher checks that its driver is still its parent, in seconds."""


def main(socket_fd: int) -> None:
    """Serve until the driver closes the socket."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    codecs.lookup("ascii")  # loaded here, as inside a sandbox there may be no Python library
    os.umask(0o022)
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            os.setgroups([])
    cgroups.remove_left_over()
    driver = os.getppid()
    with socket.socket(fileno=socket_fd) as connection:
        while True:
            while not select.select([connection], [], [], _IDLE_S)[0]:
                if os.getppid() != driver:
                    return
            job = framing.receive(connection)
            if job is None:
                return
            try:
                answer = _serve(job, connection)
            except Exception as error:  # noqa: BLE001 (the driver is told; this launcher ends)
                traceback.print_exc()
                answer = {
                    "outcome": "infrastructure",
                    "error": f"{type(error).__name__}: {error}",
                    "is_broken": True,
                }
            if answer is None:
                return
            framing.send(connection, answer)
            if answer.get("is_broken"):
                return


def _serve(job: Mapping[str, Any], connection: socket.socket) -> dict[str, Any] | None:
    """Run one program; None where the driver went away meanwhile."""
    limits = job["limits"]
    group = None
    if job["uses_groups"]:
        group = cgroups.Group.create(
            job["name"], memory_bytes=limits["memory_mib"] << 20, max_processes=limits["max_processes"] + 1
        )
    try:
        pid, first, outer = _start(job, group)
        meter = Meter(first, group)
        try:
            supervisor = Supervisor(
                pid=pid,
                ends=outer,
                limits=limits,
                group=group,
                meter=meter,
                stdin=base64.b64decode(job["stdin"]),
            )
            supervisor.run(connection)
        finally:
            meter.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            for fd in (outer.go, outer.status, outer.stdin, outer.stdout, outer.stderr):
                with contextlib.suppress(OSError):
                    os.close(fd)
        return supervisor.answer()
    finally:
        if group is not None:
            group.remove()


def _start(job: Mapping[str, Any], group: cgroups.Group | None) -> tuple[int, int, init_process.Ends]:
    """The process to wait for, the first process of a sandbox, waiting in it, and the outer ends of its pipes."""
    go, stdin, stdout, stderr = (os.pipe() for _ in range(4))
    status = tuple(end.detach() for end in socket.socketpair())
    inner = init_process.Ends(go=go[0], status=status[1], stdin=stdin[0], stdout=stdout[1], stderr=stderr[1])
    outer = init_process.Ends(go=go[1], status=status[0], stdin=stdin[1], stdout=stdout[0], stderr=stderr[0])
    if job["bubblewrap"]:
        pid, first = bubblewrap.start(job, inner, has_group=group is not None)
    else:
        pid = first = kernel.fork_into_namespaces()
    if pid == 0:
        inner_fds = {inner.go, inner.status, inner.stdin, inner.stdout, inner.stderr}
        for fd in set(range(3, _MAX_FDS)) - inner_fds:  # the driver's socket is among them
            with contextlib.suppress(OSError):
                os.close(fd)
        init_process.live(job, inner, has_group=group is not None)
    for fd in (inner.go, inner.status, inner.stdin, inner.stdout, inner.stderr):
        os.close(fd)
    for fd in (outer.status, outer.stdin, outer.stdout, outer.stderr):
        os.set_blocking(fd, False)
    try:
        if group is not None:
            group.add(first)
        with contextlib.suppress(OSError):  # should the machine run out of memory, the program goes first
            _write(f"/proc/{first}/oom_score_adj", "1000")
        if job["bubblewrap"]:
            _write_all(outer.go, json.dumps(job).encode("ascii") + b"\n")
        else:
            _map_ids(pid)
            os.write(outer.go, b"g")
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return pid, first, outer


def _map_ids(pid: int) -> None:
    """Map the users inside to users outside.

    A launcher of root builds the sandbox as root and hands the program an identity without any rights outside. Every
    other launcher can give only its own, and so can root where it may not use a second one.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        lines = f"0 0 1\n{init_process.INSIDE_ID} {_OUTER_ID} 1\n"
        with contextlib.suppress(PermissionError):
            _write(f"/proc/{pid}/uid_map", lines)
            _write(f"/proc/{pid}/gid_map", lines)
            return
    _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/uid_map", f"{init_process.INSIDE_ID} {uid} 1\n")
    _write(f"/proc/{pid}/gid_map", f"{init_process.INSIDE_ID} {gid} 1\n")


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # it ended; its pipes say why
        while data:
            data = data[os.write(fd, data) :]


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode("ascii"))
    finally:
        os.close(fd)
