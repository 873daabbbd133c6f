"""All sockets of some processes that listen, from the system's own tables.

Of each process the tables of its own network namespace are read, and the inodes of its open files. Linux only.
"""

from __future__ import annotations

import ipaddress
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_TCP_LISTEN, _UDP_UNCONNECTED = "0A", "07"
_ACCEPTS = 0x10000
"""Flag of a Unix socket that listens."""
_UNIX_DATAGRAM = "0002"
_UNIX = re.compile(
    r"[0-9a-fA-F]+: [0-9A-F]{8} [0-9A-F]{8} (?P<flags>[0-9A-F]{8}) (?P<type>[0-9A-F]{4}) [0-9A-F]{2} +"
    r"(?P<inode>[0-9]{1,20})(?: (?P<path>.*))?"
)
_SOCKET = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True, kw_only=True, order=True)
class Listener:
    """A socket that takes connections or messages from others; held by one process, or several that share it."""

    pid: int
    """A process that holds it."""
    protocol: str
    """`tcp`, `udp` or `unix`."""
    address: str
    """An IP address, the path of a Unix socket, or `@` and its abstract name."""
    port: int
    """0 for Unix sockets."""
    inode: int
    """The system's number of the socket."""
    is_in_own_network: bool
    """True in another network namespace than that of the others."""

    @property
    def is_on_loopback(self) -> bool:
        """Whether only processes of this machine reach it."""
        return self.protocol == "unix" or ipaddress.ip_address(self.address).is_loopback


def listeners(
    pids: Collection[int], *, home: int | None = None, hidden: list[int] | None = None
) -> list[Listener]:
    """The sockets of these processes that listen; processes that end meanwhile have none, nor has any where there is no
    /proc.

    Args:
        pids: the processes.
        home: the process whose network is that of all that have none of their own; this one by default.
        hidden: takes those that this user may not look into.

    Raises:
        PermissionError: there is such a process, and nothing to take it.
    """
    if not PROC.is_dir():
        return []
    here = _namespace("self" if home is None else str(home))
    tables: dict[int, dict[int, list[tuple[str, str, int]]]] = {}
    found = []
    for pid in pids:
        try:
            namespace = _namespace(str(pid))
            inodes = _socket_inodes(pid)
            # Read after the inodes, so that what is open now is in the table.
            if namespace not in tables or not inodes <= tables[namespace].keys():
                tables[namespace] = _by_inode(PROC / str(pid) / "net")
        except PermissionError:
            if hidden is None:
                raise
            hidden.append(pid)
            continue
        except (FileNotFoundError, ProcessLookupError):
            continue
        for inode in inodes & tables[namespace].keys():
            for protocol, address, port in tables[namespace][inode]:
                found.append(
                    Listener(
                        pid=pid,
                        protocol=protocol,
                        address=address,
                        port=port,
                        inode=inode,
                        is_in_own_network=namespace != here,
                    )
                )
    return sorted(found)


def _namespace(process: str) -> int:
    return (PROC / process / "ns" / "net").stat().st_ino


def is_reachable_by_others(path: Path) -> bool:
    """Whether another user can get at a file: write to it, with every folder above it open to him."""
    try:
        modes = [
            path.stat().st_mode & 0o002,
            *(folder.stat().st_mode & 0o001 for folder in path.resolve().parents),
        ]
    except OSError:  # gone, or not even this user can look
        return False
    return all(modes)


def _socket_inodes(pid: int) -> set[int]:
    inodes = set()
    for file in (PROC / str(pid) / "fd").iterdir():
        try:
            match = _SOCKET.fullmatch(str(file.readlink()))
        except FileNotFoundError:
            continue
        if match:
            inodes.add(int(match[1]))
    return inodes


def _by_inode(net: Path) -> dict[int, list[tuple[str, str, int]]]:
    """What listens in a network namespace; several entries for one inode where somebody has made up a line.

    Names of Unix sockets are written into the table as they are, line breaks included, by whoever makes one.
    """
    table: dict[int, list[tuple[str, str, int]]] = {}
    for inode, entry in _table(net):
        table.setdefault(inode, []).append(entry)
    return table


def _table(net: Path) -> Iterator[tuple[int, tuple[str, str, int]]]:
    """Inode, and protocol, address and port, of everything in a network namespace that listens."""
    states = {"tcp": _TCP_LISTEN, "tcp6": _TCP_LISTEN, "udp": _UDP_UNCONNECTED, "udp6": _UDP_UNCONNECTED}
    for name, state in states.items():
        for line in _lines(net / name):
            fields = line.split()
            if fields[3] == state:
                address, port = fields[1].split(":")
                yield int(fields[9]), (name.rstrip("6"), _address(address), int(port, 16))
    for line in _lines(net / "unix"):
        if match := _UNIX.fullmatch(line):
            listens = int(match["flags"], 16) & _ACCEPTS or (
                match["type"] == _UNIX_DATAGRAM and match["path"]
            )
            if listens:
                yield int(match["inode"]), ("unix", match["path"] or "@", 0)


def _lines(table: Path) -> list[str]:
    try:
        return table.read_text(encoding="utf-8", errors="backslashreplace").split("\n")[1:-1]
    except FileNotFoundError:  # a kernel without IPv6
        return []


def _address(digits: str) -> str:
    """The kernel writes an address as words of 32 bits, each in the order of this machine's bytes."""
    words = [
        int(digits[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(digits), 8)
    ]
    address = ipaddress.ip_address(b"".join(words))
    mapped = getattr(address, "ipv4_mapped", None)
    return str(mapped or address)
