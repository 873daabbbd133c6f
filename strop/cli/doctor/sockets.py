"""`strop doctor RUN --sockets`: everything that a run listens on, on this machine, and who can speak there.

The processes of the run are found through its folder: the one that holds its lock and all that it started; those that
write into its logs, where Ray was there before; and Ray's own processes of the same cluster. What they listen on comes
from the system's tables, so nothing is left out because strop does not know of it. Nothing is changed or connected to.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from strop.cli.doctor.listing import PROC, Listener, is_reachable_by_others, listeners
from strop.controller import socket_notes
from strop.utils.terminal import UsageError

LOCK = "lock"
_MARK = "STROP_CLUSTER"
"""In the environment of the processes of a private Ray cluster (strop.controller.ray.reaper)."""
_SESSION = re.compile(r"/session_[0-9_-]+")
"""Part of the arguments of Ray's processes: the folder of their cluster."""
_RAY_SERVERS = ("/ray/core/src/ray/gcs/gcs_server", "/ray/core/src/ray/raylet/raylet")
"""How the names of Ray's servers end. A process can call itself whatever it likes, so its name alone says nothing."""
_KNOWN = {
    "strop.rewards.worker_main": "reward worker",
    "strop.sandbox": "sandbox",
    "controller/ray/launcher.py": "launcher",
    "controller/ray/reaper.py": "reaper",
    "ray.util.client.server": "client server of Ray",
    "ray/dashboard": "dashboard of Ray",
    "ray/_private": "helper of Ray",
    "ray/autoscaler": "monitor of Ray",
}
"""What processes are called, by a part of their command line."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of a run."""

    pid: int
    parent: int
    command: str
    """Its command line, as it shows it."""
    output: str
    """What its standard output leads to."""
    program: str
    """The file that it runs."""


@dataclass(frozen=True, kw_only=True)
class Socket:
    """A listening socket of a run, and who can speak there."""

    pid: int
    process: str
    """What the process does in the run."""
    user: str
    """Whose process it is."""
    protocol: str
    address: str
    port: int
    purpose: str
    protection: tuple[str, ...]
    """What keeps others out: `loopback`, `file mode`, `own network`, `token` of Ray, `secret` of the run."""

    @property
    def is_open(self) -> bool:
        """Whether anybody on the network, or another user through a Unix socket, can speak there."""
        return not self.protection

    def to_json(self) -> dict[str, object]:
        """As plain JSON."""
        return {**vars(self), "protection": list(self.protection), "open": self.is_open}


@dataclass(frozen=True, kw_only=True)
class Listing:
    """What a run listens on."""

    sockets: list[Socket]
    hidden: list[str]
    """Processes of the run that this user may not look into, as a sandbox may be."""


def sockets_of(run: Path) -> Listing:
    """Every listening socket of a run that is going on, by process.

    Raises:
        UsageError: the run does not go on here, or belongs to another user.
    """
    if not PROC.is_dir():
        raise UsageError("the sockets of a run are listed from /proc, which this system does not have")
    everything = dict(_processes())
    controller = _controller(run)
    pids = _of_run(everything, controller, run.resolve() / "logs")
    hidden: list[int] = []
    try:
        found = listeners(sorted(pids), home=controller, hidden=hidden)
    except OSError as error:  # not even its network may be looked at; or it has just ended
        raise UsageError(
            f"the processes of {run} belong to {_user(controller) or 'nobody any more'}; look at their sockets as that "
            f"user or as root"
        ) from error
    servers = _ray_servers(everything, pids)
    uses_token = any(_environment(pid).get("RAY_AUTH_MODE") == "token" for pid in servers)
    return Listing(
        sockets=[_described(one, everything, controller, run, uses_token=uses_token) for one in found],
        hidden=[f"{_name(everything[pid], controller, everything)} (pid {pid})" for pid in hidden],
    )


def _described(
    one: Listener, everything: Mapping[int, Process], controller: int, run: Path, *, uses_token: bool
) -> Socket:
    process = everything[one.pid]
    name = _name(process, controller, everything)
    purpose, is_authenticated = _notes(process, controller, run).get(one.inode, (_unnoted(name), False))
    protection = [
        *(["own network"] if one.is_in_own_network else []),
        *(["loopback"] if one.protocol != "unix" and one.is_on_loopback else []),
        *(["file mode"] if _is_private_file(one) else []),
        *(["secret"] if is_authenticated else []),
        *(["token"] if purpose == socket_notes.RAY and uses_token and one.protocol == "tcp" else []),
    ]
    return Socket(
        pid=one.pid,
        process=name,
        user=_user(one.pid),
        protocol=one.protocol,
        address=one.address,
        port=one.port,
        purpose=purpose,
        protection=tuple(protection),
    )


def _unnoted(name: str) -> str:
    """What a socket without a note is for."""
    if name.startswith("Ray: "):
        return socket_notes.RAY
    return "torch.distributed (gloo, NCCL)" if name.startswith("worker ") else "opened by the program"


def show(run: Path, listing: Listing) -> Iterator[str]:
    """A table for a person, what is wrong in it, and what the words mean."""
    sockets = listing.sockets
    for one in sockets:
        where = one.address if one.protocol == "unix" else f"{_bracketed(one.address)}:{one.port}"
        mark = "OPEN" if one.is_open else "ok  "
        words = (mark, f"{one.process} (pid {one.pid}, {one.user})", one.protocol, where, one.purpose)
        yield "  ".join([*words, ", ".join(one.protection) or "no protection"])
    wrong = sum(one.is_open for one in sockets)
    yield f"{len(sockets)} listening sockets of {run} on this machine, {wrong} of them open to others"
    if wrong:
        yield (
            "whoever reaches an open one can speak to it without a password: keep such ports behind a firewall, or on "
            "a network that only the machines of the run share"
        )
    if any(one.protection == ("loopback",) for one in sockets):
        yield "those with no protection but loopback ask for no password: other users of this machine reach them"
    if listing.hidden:
        yield f"this user may not look into {', '.join(listing.hidden)}; root may"


# ---------------------------------------------------------------- the processes of a run


def _controller(run: Path) -> int:
    """The process that writes the run.

    Raises:
        UsageError: there is none.
    """
    file = run / LOCK
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        pid = int(json.loads(socket_notes.read_small(file))["pid"])
        if _has_open(pid, file):
            return pid
    raise UsageError(
        f"no process of this machine writes the run {run}; its sockets can be looked at while it goes on, on the "
        f"machine of its controller"
    )


def _has_open(pid: int, file: Path) -> bool:
    """Whether a process has a file open; also where nobody may look, if it lives and owns the file."""
    folder, wanted = PROC / str(pid) / "fd", file.stat()
    try:
        names = list(folder.iterdir())
    except PermissionError:
        return (PROC / str(pid)).stat().st_uid == wanted.st_uid
    for name in names:
        with contextlib.suppress(OSError):
            found = name.stat()
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    return False


def _of_run(everything: Mapping[int, Process], controller: int, logs: Path) -> set[int]:
    """The process ids of a run."""
    workers = {pid for pid, one in everything.items() if _is_in(one.output, logs)}
    pids = _with_descendants(everything, {controller, *workers})
    # Of a cluster that was there before: the server that started the workers, and its like.
    parents = {everything[pid].parent for pid in workers} | {
        everything[everything[pid].parent].parent for pid in workers if everything[pid].parent in everything
    }
    pids |= {pid for pid in parents if pid in everything and _is_server(everything[pid])}
    sessions = {
        match[0]
        for pid in _ray_servers(everything, pids)
        for match in _SESSION.finditer(everything[pid].command)
    }
    users = {
        one for pid in pids if (one := _uid(pid)) is not None
    }  # anybody can have such words in a command line
    pids |= {
        pid
        for pid, one in everything.items()
        if any(name in one.command or name in one.output for name in sessions) and _uid(pid) in users
    }
    marks = {mark for pid in pids if (mark := _environment(pid).get(_MARK))}
    if marks:  # what a worker's own code has started and left alone
        pids |= {pid for pid in everything if _environment(pid).get(_MARK) in marks}
    return _with_descendants(everything, pids) - {os.getpid()}


def _with_descendants(everything: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    pids = {pid for pid in roots if pid in everything}
    while more := {pid for pid, one in everything.items() if one.parent in pids} - pids:
        pids |= more
    return pids


def _ray_servers(everything: Mapping[int, Process], pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if _is_server(everything[pid])]


def _processes() -> Iterator[tuple[int, Process]]:
    for entry in PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended
                yield int(entry.name), _process(entry)


def _process(entry: Path) -> Process:
    stat = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
    words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    return Process(
        pid=int(entry.name),
        parent=int(stat[1]),
        command=" ".join(word.decode(errors="replace") for word in words),
        output=_link(entry / "fd" / "1"),
        program=_link(entry / "exe"),
    )


def _link(file: Path) -> str:
    try:
        return str(file.readlink())
    except OSError:  # of another user, or none
        return ""


def _is_in(output: str, logs: Path) -> bool:
    return output.startswith(f"{logs}/")


def _environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where this user may not look."""
    try:
        text = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)


# ---------------------------------------------------------------- words


def _is_server(process: Process) -> bool:
    return process.program.endswith(_RAY_SERVERS)


def _name(process: Process, controller: int, everything: Mapping[int, Process]) -> str:
    if process.pid == controller:
        return "controller"
    if _is_server(process):
        return f"Ray: {Path(process.program).name}"
    parent = everything.get(process.parent)
    if process.command.startswith("ray::") and parent is not None:
        if _is_server(parent):
            return f"Ray: {process.command[5:45]}"
        if "controller/ray/launcher.py" in parent.command and process.output.endswith(".log"):
            return f"worker {Path(process.output).stem}"
    known = [name for part, name in _KNOWN.items() if part in process.command]
    return known[0] if known else f"program {Path(process.program).name[:40]}"


def _notes(process: Process, controller: int, run: Path) -> dict[int, tuple[str, bool]]:
    if process.pid == controller:
        return socket_notes.read(run / "logs" / f"controller{socket_notes.SUFFIX}")
    return (
        socket_notes.read(Path(process.output).with_suffix(socket_notes.SUFFIX))
        if process.output.endswith(".log")
        else {}
    )


def _is_private_file(one: Listener) -> bool:
    if one.protocol != "unix" or one.address.startswith("@"):
        return False
    return not is_reachable_by_others(PROC / str(one.pid) / "root" / one.address.lstrip("/"))


def _uid(pid: int) -> int | None:
    """The user that a process belongs to; None where it has ended."""
    try:
        return (PROC / str(pid)).stat().st_uid
    except OSError:
        return None


def _user(pid: int) -> str:
    uid = _uid(pid)
    if uid is None:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
