"""A link of a set rate between two network namespaces of this machine, as between two machines.

It takes root, and the commands `ip` and `tc` of iproute2. A process goes to one end with `Link.enter`, before it opens
any connection; sockets and threads that it makes afterwards belong there. The senders among each other have the
loopback of their end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/run/netns")
"""Home of the namespaces that `ip` has made."""
_NEW_NETWORK = 0x40000000
"""CLONE_NEWNET of Linux."""
_BURST = "1mb"
"""Bytes that may go at once: a thousandth of a second of the fastest link."""
_LATENCY = "20ms"
"""Longest wait of a packet before it is dropped."""


@dataclass(frozen=True)
class Link:
    """Two ends, numbered 0 and 1."""

    name: str

    def host(self, end: int) -> str:
        """Address of an end."""
        return f"10.213.77.{end + 1}"

    def namespace(self, end: int) -> str:
        """Name of the namespace of an end."""
        return f"{self.name}-{end}"

    def enter(self, end: int) -> None:
        """Let this thread, and those that it starts, see the network of this end alone."""
        descriptor = os.open(FOLDER / self.namespace(end), os.O_RDONLY)
        try:
            _set_network(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def at(self, end: int) -> Iterator[None]:
        """Inside, what this thread opens belongs to this end."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            self.enter(end)
            yield
        finally:
            _set_network(before)
            os.close(before)


@contextmanager
def link(rate: str) -> Iterator[Link]:
    """A link of this rate in each direction, as `tc` writes it (`10gbit`); it is gone afterwards.

    Raises:
        SystemExit: it cannot be made here, and why.
    """
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        raise SystemExit(f"a link of {rate} needs the command {missing[0]} (package iproute2)")
    if os.geteuid() != 0:
        raise SystemExit(f"a link of {rate} needs network namespaces, which only root makes; run it as root")
    made = Link(f"strop-{os.getpid()}")
    try:
        for end in (0, 1):
            _run("ip", "netns", "add", made.namespace(end))
            _run("ip", "-n", made.namespace(end), "link", "set", "lo", "up")
        _run(
            "ip", "-n", made.namespace(0), "link", "add", "link0", "type", "veth", "peer", "name", "link0",
            "netns", made.namespace(1),
        )  # fmt: skip
        for end in (0, 1):
            _run("ip", "-n", made.namespace(end), "address", "add", f"{made.host(end)}/30", "dev", "link0")
            _run("ip", "-n", made.namespace(end), "link", "set", "link0", "up")
            _run(
                "tc", "-n", made.namespace(end), "qdisc", "add", "dev", "link0", "root", "tbf", "rate", rate,
                "burst", _BURST, "latency", _LATENCY,
            )  # fmt: skip
        yield made
    finally:
        for end in (0, 1):
            with suppress(SystemExit):
                _run("ip", "netns", "delete", made.namespace(end))


def _set_network(descriptor: int) -> None:
    """`setns` of Linux, which Python has as of 3.12, for this thread."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, _NEW_NETWORK):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise SystemExit(
            f"`{' '.join(command)}` failed, so there is no link to measure: {done.stderr.strip()}"
        )
