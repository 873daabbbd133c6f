"""Test of a local sandbox's isolation: each property is tried from inside, before the first program of a process.

A property that does not hold makes the sandbox unavailable. There is no mode without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from strop.sandbox.config import Limits
from strop.sandbox.errors import SandboxUnavailable
from strop.sandbox.program import ENVIRONMENT, Program, SandboxResult

Run = Callable[[Program], SandboxResult]

_lock = threading.Lock()
_proved: set[Hashable] = set()

_INSPECTION = """
import ctypes, errno, fcntl, json, os, resource, socket, sys
port, secret, marker = int(sys.argv[1]), sys.argv[2], sys.argv[3]
found = {}

def works(action):
    try:
        action()
    except (OSError, ValueError):
        return False
    return True

def connect():
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        connection.settimeout(1)
        connection.connect(("127.0.0.1", port))

def send():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.sendto(b"x", ("127.0.0.1", port))

def fork_many():
    children = []
    try:
        for _ in range(64):
            pid = os.fork()
            if pid == 0:
                while True:
                    os.read(pipe[0], 1)
            children.append(pid)
    finally:
        for pid in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)

def refused(name, *arguments):
    ctypes.set_errno(0)
    return getattr(libc, name)(*arguments) == -1 and ctypes.get_errno() == errno.EPERM

libc = ctypes.CDLL(None, use_errno=True)
pipe = os.pipe()
found["network"] = not works(connect) and not works(send)
found["files"] = not os.path.exists(secret) and not works(lambda: open("/etc/shadow").close())
found["environment"] = marker not in os.environ
found["root"] = not works(lambda: open("/written", "w").close()) and not works(
    lambda: open("/usr/written", "w").close())
found["work folder"] = works(lambda: open("written", "w").close()) and works(lambda: open("/tmp/written", "w").close())
found["identity"] = 0 not in os.getresuid() + os.getresgid() and not works(lambda: os.setuid(0))
found["privileges"] = libc.prctl(39, 0, 0, 0, 0) == 1
found["filter"] = libc.prctl(21, 0, 0, 0, 0) == 2 and libc.unshare(0x10000000) == -1
found["namespaces"] = os.getpid() < 100 and not os.path.exists("/proc/%s/environ" % sys.argv[4])
found["processes"] = not works(fork_many)
found["first process"] = not (
    works(lambda: resource.prlimit(1, resource.RLIMIT_CPU, (60, 60))) or works(lambda: os.sched_setaffinity(1, {0}))
    or works(lambda: os.setpriority(os.PRIO_PROCESS, 1, 19)) or works(lambda: os.setpriority(os.PRIO_USER, 0, 19)))
found["allowances"] = refused("inotify_init1", 0) and not works(lambda: fcntl.fcntl(pipe[1], 1031, 1 << 20))
print(json.dumps(found))
"""
_FAILURES = {
    "network": "the network can be reached",
    "files": "files of the host can be read",
    "environment": "the host's environment is visible",
    "root": "the system's folders can be written",
    "work folder": "its own work folder cannot be written",
    "identity": "programs keep the identity of root",
    "privileges": "programs may gain privileges",
    "filter": "system calls are not filtered",
    "namespaces": "processes of the host are visible",
    "processes": "the number of processes is not limited",
    "first process": "programs can limit or slow the process that watches them",
    "allowances": "programs can use up what the user's other programs need (inotify, pipe buffers)",
    "time": "a program that never ends is not ended",
    "processor": "processor time is not limited",
    "memory": "memory is not limited",
    "shared memory": "anonymous shared memory is not counted",
    "socket buffers": "the buffers of sockets are not counted",
    "page tables": "page tables are not counted",
}
_SET_BY_SHELLS = {"LC_CTYPE", "PWD", "OLDPWD", "SHLVL", "_"}
_HINT = (
    "sandboxes need user namespaces and seccomp: on the host, sysctl user.max_user_namespaces above 0 and (Ubuntu) "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that allows unshare and mount "
    "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined). Or set "
    "reward.sandbox.backend to sandbox_fusion or e2b. Programs are never run without isolation"
)
_GREEDY = {
    "memory": "kept = []\nwhile True:\n    kept.append(bytearray(b'x' * (8 << 20)))\n",
    "shared memory": """
import mmap
kept = []
while True:
    try:
        kept.append(mmap.mmap(-1, 8 << 20))
    except PermissionError:
        print("refused")
        break
    for at in range(0, 8 << 20, 4096):
        kept[-1][at] = 1
    kept[-1].madvise(mmap.MADV_DONTNEED)  # out of the process, not out of memory
""",
    "socket buffers": """
import os, socket, time
os.fork(), os.fork()
kept = []
while len(kept) < 200:
    pair = socket.socketpair()
    kept += pair
    for one in pair:
        one.setblocking(False)
        try:
            while True:
                one.send(bytes(1 << 16))
        except BlockingIOError:
            pass
time.sleep(60)
""",
    "page tables": """
import ctypes, time
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_long]
for number in range(20_000):  # private, anonymous, at this address; a page that is read has no memory of its own
    ctypes.string_at(libc.mmap((1 << 44) + (number << 30), 4096, 1, 0x100022, -1, 0), 1)
time.sleep(60)
""",
}
"""Programs that take more than 32 MiB, or print that they were refused."""
_REAPED_BY_KERNEL = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children, so the kernel forgets what they used
while True:
    if os.fork() == 0:
        until = time.monotonic() + 0.01
        while time.monotonic() < until:
            pass
        os._exit(0)
    time.sleep(0.01)
"""


@dataclass(frozen=True, kw_only=True)
class Property:
    """One property of the isolation and whether it holds."""

    name: str
    holds: bool
    detail: str
    """Consequence where it does not hold."""


def require(run: Run, *, key: Hashable) -> None:
    """Check once per process and key.

    Raises:
        SandboxUnavailable: a property does not hold; nothing may be run.
    """
    with _lock:
        if key in _proved:
            return
        failures = [failure.detail for failure in check(run) if not failure.holds]
        if failures:
            raise SandboxUnavailable(
                f"programs cannot be isolated here: {'; '.join(failures)}. What to do: {_HINT}"
            )
        _proved.add(key)


def check(run: Run) -> list[Property]:
    """Try every property with programs that would break it."""
    with ThreadPoolExecutor(3) as threads, _baits() as (port, secret, was_reached):

        def ask(code: str, **limits: float) -> Future[SandboxResult]:
            program_limits = Limits(**{"wall_s": 20.0, "cpu_s": 20.0, "memory_mib": 64, **limits})  # type: ignore[arg-type]
            return threads.submit(run, Program(code=code, limits=program_limits))

        marker = _host_variable()
        inspection = threads.submit(
            run,
            Program(
                command=("python", "-B", "inspection.py", str(port), secret, marker, str(os.getpid())),
                files={"inspection.py": _INSPECTION.encode()},
                limits=Limits(wall_s=20.0, cpu_s=20.0, memory_mib=256, max_processes=24),
            ),
        )
        endless = ask("while True: pass", wall_s=0.2)
        unseen = ask(_REAPED_BY_KERNEL, cpu_s=0.3)
        greedy = {name: ask(code, memory_mib=32) for name, code in _GREEDY.items()}
        inspected = inspection.result()
        if inspected.outcome == "infrastructure":
            return [Property(name="start", holds=False, detail=inspected.error)]
        report: dict[str, object] = {}
        with contextlib.suppress(ValueError):
            report = json.loads(inspected.text)
        if not report:
            last_line = inspected.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            detail = (
                f"an interpreter does not start ({inspected.error}{': ' if last_line else ''}{last_line})"
            )
            return [Property(name="start", holds=False, detail=detail)]
        holds = {name: report.get(name) is True for name in _FAILURES}
        holds["network"] = holds["network"] and not was_reached()
        holds["time"] = endless.result().outcome == "timeout"
        holds["processor"] = "limits.cpu_s" in unseen.result().error
        for name, future in greedy.items():
            result = future.result()
            holds[name] = result.outcome == "memory" or result.text == "refused\n"
    return [Property(name=name, holds=holds[name], detail=detail) for name, detail in _FAILURES.items()]


def _host_variable() -> str:
    """The name of a variable of this process that neither a sandbox nor a shell in it sets by itself."""
    return next(
        (name for name in os.environ if name not in ENVIRONMENT and name not in _SET_BY_SHELLS), "STROP_NONE"
    )


@contextlib.contextmanager
def _baits() -> Iterator[tuple[int, str, Callable[[], bool]]]:
    """A listening port, a readable file, and a function that tells whether the port was reached."""
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.ExitStack() as at_end:
        listener.setblocking(False)
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(Path.home())
        file = Path(folder, f"strop-bait-{os.urandom(8).hex()}")
        file.touch(mode=0o644)
        at_end.callback(file.unlink)

        def was_reached() -> bool:
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                return False
            return True

        yield listener.getsockname()[1], str(file), was_reached
