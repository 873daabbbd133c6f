"""First process of a sandbox: builds it from inside, gives up every right, runs the program, reports.

It is a fork of the launcher in fresh namespaces, so it is the `init` of the sandbox: signals from inside do not reach
it, orphans come to it, and when it ends the kernel ends everything else in the sandbox. The kernel ends it when the
launcher ends. It waits for the launcher once, and then only for its children.

Its reports go down a socket that the program does not have, as JSON lines: {"proc": 1} with a handle on /proc;
{"begins": t} before there is a program, {"started": t} once it runs, then {"exit": code, "files": {...}}. {"failed":
sentence} is an error of this process. Once the program has begun, an end without report is the program's doing.

The program's limits are those of the program alone: nothing that limits a process holds for this one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from strop.sandbox import kernel, layout, seccomp

INSIDE_ID = 1000
"""User and group of the program, inside."""
_NICE = 5
"""Niceness of the program, which yields to training and to its watchers."""
_NOT_FOUND = 127
_SPACE, _SPACE_BYTES = 2, 256 << 20
"""Address space of a process without a control group: so many times its memory, and so much more."""


@dataclass(frozen=True, kw_only=True)
class Ends:
    """The inner ends of the pipes between the launcher and a sandbox; `status` is a socket."""

    go: int
    status: int
    stdin: int
    stdout: int
    stderr: int


def live(job: Mapping[str, Any], ends: Ends, *, has_group: bool, is_built: bool = False) -> NoReturn:
    """Body of the first process of the sandbox.

    Args:
        job: the program, as the driver describes it.
        ends: pipes of this process.
        has_group: a control group limits memory.
        is_built: namespaces and file system exist already, and the launcher has given its signal (bubblewrap.py).
    """
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # signals without a handler do not reach a first process
        if is_built:
            _drop_privileges()
        else:
            _build(job, ends.go, has_group=has_group)
        _send_proc_handle(ends.status)
        _run(job, ends, has_group=has_group)
        code = 0
    except BaseException as error:  # noqa: BLE001 (whatever it was, the launcher reports it)
        _report(ends.status, {"failed": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def _build(job: Mapping[str, Any], go_fd: int, *, has_group: bool) -> None:
    """Build file system and identity, once the launcher has mapped this process to users outside."""
    kernel.die_with_parent()
    if os.read(go_fd, 1) != b"g":
        raise OSError("the launcher went away")
    disk_bytes = job["limits"]["disk_mib"] << 20
    layout.build_root(
        visible=job["visible"],
        hidden=job["hidden"],
        disk_bytes=disk_bytes,
        uid=INSIDE_ID,
        has_group=has_group,
    )
    kernel.drop_capabilities_for_ever()
    if os.getuid() != INSIDE_ID:
        os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
        os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    _drop_privileges()
    kernel.die_with_parent()  # the change of identity has cleared it
    if select.select([go_fd], [], [], 0)[0]:  # the other end is closed only by the end of the launcher
        raise OSError("the launcher went away")


def _drop_privileges() -> None:
    """Give up capabilities and the way back to them."""
    if os.getuid() != INSIDE_ID:
        raise OSError(f"the identity inside is {os.getuid()}, not {INSIDE_ID}")
    kernel.drop_capabilities()
    kernel.forbid_new_privileges()
    os.umask(0o022)


def _send_proc_handle(status: int) -> None:
    """Give the launcher a handle on /proc, where there is one."""
    with contextlib.suppress(OSError):
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        os.stat("1/stat", dir_fd=proc)
        with socket.socket(fileno=os.dup(status)) as connection:
            socket.send_fds(connection, [b'{"proc": 1}\n'], [proc])
        os.close(proc)


def _run(job: Mapping[str, Any], ends: Ends, *, has_group: bool) -> None:
    limits = job["limits"]
    _write_files(job["files"])
    kernel.install_filter(seccomp.filter_for(kernel.MACHINE, has_group=has_group))
    _report(ends.status, {"begins": time.monotonic()})
    try:
        program = subprocess.Popen(
            job["argv"], env=job["env"], cwd=layout.BOX, stdin=ends.stdin, stdout=ends.stdout, stderr=ends.stderr,
            start_new_session=True, preexec_fn=lambda: _limit(limits, has_group=has_group),
        )  # fmt: skip
    except OSError as error:
        _report(ends.status, {"started": time.monotonic()})
        _report(ends.status, {"exit": _NOT_FOUND, "files": {}, "note": f"{job['argv'][0]}: {error.strerror}"})
        return
    _report(ends.status, {"started": time.monotonic()})
    for fd in (ends.stdin, ends.stdout, ends.stderr):
        os.close(fd)
    program.returncode = _wait_for(program.pid)
    _kill_all_others()
    files = _read_files(job["fetch"], limits["file_mib"] << 20)
    _report(ends.status, {"exit": program.returncode, "files": files})


def _report(fd: int, message: Mapping[str, Any]) -> None:
    data = memoryview(json.dumps(message).encode("ascii") + b"\n")
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


def _write_files(files: Mapping[str, str]) -> None:
    for name, content in files.items():
        path = Path(layout.BOX, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(content))


def _limit(limits: Mapping[str, Any], *, has_group: bool) -> None:
    """In the program's process, before it becomes the program."""
    os.nice(_NICE)
    cpu_s = int(limits["cpu_s"]) + 1
    values = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_FSIZE: limits["file_mib"] << 20,
        resource.RLIMIT_NOFILE: limits["max_open_files"],
        resource.RLIMIT_NPROC: limits["max_processes"] + 1,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if not has_group:
        # More than the limit, which is measured (usage.py). This one bounds the memory between two measurements.
        values[resource.RLIMIT_AS] = _SPACE * (limits["memory_mib"] << 20) + _SPACE_BYTES
    for limit, value in values.items():
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def _wait_for(pid: int) -> int:
    """Exit code of the program, negative for a signal; buries the orphans meanwhile."""
    while True:
        ended, status = os.wait()
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _kill_all_others() -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all but this one
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _read_files(names: Sequence[str], max_bytes: int) -> dict[str, str]:
    """Regular files below the work folder; nothing else runs any more, so a file stays as it was checked."""
    contents, bytes_left = {}, max_bytes
    for name in names:
        path = Path(layout.BOX, name)
        if not Path(os.path.realpath(path)).is_relative_to(layout.BOX):
            continue
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(path.stat().st_mode) or path.stat().st_size > bytes_left:
                continue
            data = path.read_bytes()
            contents[name] = base64.b64encode(data).decode("ascii")
            bytes_left -= len(data)
    return contents
