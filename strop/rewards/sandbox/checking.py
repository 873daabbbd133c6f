"""Proof that a local sandbox isolates: each property is tried from inside, before the first program of a process runs.

A property that does not hold makes the sandbox unavailable. There is no mode without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from strop.rewards.sandbox.config import Limits
from strop.rewards.sandbox.program import Program, SandboxResult, SandboxUnavailable

Run = Callable[[Program], SandboxResult]

_lock = threading.Lock()
_proved: set[Hashable] = set()

_INSPECTION = """
import ctypes, json, os, socket, sys
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
print(json.dumps(found))
"""
_MEANING = {
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
    "memory": "memory is not limited",
    "time": "a program that never ends is not ended",
}
_HINT = (
    "sandboxes need user namespaces and seccomp: on the host, sysctl user.max_user_namespaces above 0 and (Ubuntu) "
    "kernel.apparmor_restrict_unprivileged_userns=0; in a container, a seccomp profile that allows unshare and mount "
    "(docker run --security-opt seccomp=unconfined --security-opt systempaths=unconfined). Or set sandbox.backend to "
    "sandbox_fusion or e2b. Programs are never run without isolation"
)
_GREEDY = "kept = []\nwhile True:\n    kept.append(bytearray(b'x' * (8 << 20)))\n"


@dataclass(frozen=True, kw_only=True)
class Property:
    """One property of the isolation and whether it holds."""

    name: str
    holds: bool
    detail: str
    """What was seen where it does not hold."""


def require(run: Run, *, key: Hashable) -> None:
    """Check once per process and key.

    Raises:
        SandboxUnavailable: a property does not hold; nothing may be run.
    """
    with _lock:
        if key in _proved:
            return
        missing = [one for one in check(run) if not one.holds]
        if missing:
            raise SandboxUnavailable(
                f"programs cannot be isolated here: {'; '.join(one.detail for one in missing)}. What to do: {_HINT}"
            )
        _proved.add(key)


def check(run: Run) -> list[Property]:
    """Try every property with programs that would break it."""
    with ThreadPoolExecutor(3) as threads, _bait() as (port, secret, was_reached):
        marker = _own_variable()
        inspection = threads.submit(
            run,
            Program(
                command=("python", "-B", "inspection.py", str(port), secret, marker, str(os.getpid())),
                files={"inspection.py": _INSPECTION.encode()},
                limits=Limits(wall_s=20.0, cpu_s=20.0, memory_mib=256, max_processes=24),
            ),
        )
        greedy = threads.submit(
            run, Program(code=_GREEDY, limits=Limits(wall_s=20.0, cpu_s=20.0, memory_mib=64))
        )
        endless = threads.submit(
            run, Program(code="while True: pass", limits=Limits(wall_s=0.2, memory_mib=64))
        )
        seen = inspection.result()
        if seen.outcome == "infrastructure":
            return [Property(name="start", holds=False, detail=seen.error)]
        found: dict[str, object] = {}
        with contextlib.suppress(ValueError):
            found = json.loads(seen.text)
        if not found:
            said = seen.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            detail = f"an interpreter does not start ({seen.error}{': ' if said else ''}{said})"
            return [Property(name="start", holds=False, detail=detail)]
        holds = {name: found.get(name) is True for name in _MEANING}
        holds["network"] = holds["network"] and not was_reached()
        holds["memory"] = greedy.result().outcome == "memory"
        holds["time"] = endless.result().outcome == "timeout"
    return [Property(name=name, holds=holds[name], detail=meaning) for name, meaning in _MEANING.items()]


def _own_variable() -> str:
    """The name of a variable of this process that no sandbox sets."""
    ours = {"PATH", "HOME", "TMPDIR", "USER", "LANG", "LC_CTYPE", "PWD", "SHLVL", "_"}
    return next(
        (name for name in os.environ if name not in ours and not name.endswith("_NUM_THREADS")), "STROP_NONE"
    )


@contextlib.contextmanager
def _bait() -> Iterator[tuple[int, str, Callable[[], bool]]]:
    """A listening port, a readable file, and whether anybody came to the port."""
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
