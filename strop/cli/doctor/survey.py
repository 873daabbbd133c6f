"""Survey of a cluster's machines: versions, devices, open ports, shared paths; read on each machine itself.

One task per machine, pinned to it; all of them run at once and have one deadline together.
"""

from __future__ import annotations

import ipaddress
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from strop.cli.versions import installed_version
from strop.controller.ray.cluster import Cluster, Node, run_on
from strop.utils.device import device_name, num_devices

PACKAGES = ("strop", "ray", "torch", "transformers", "tensordict", "numpy")
"""Packages whose version must be the same on every machine: tensors and classes travel between them."""
SURVEY_S = 120.0
"""Limit for all answers together, in seconds; the first task on a machine starts a process there."""
_RAY_PROGRAMS = ("gcs_server", "raylet", "dashboard", "ray::", "runtime_env", "log_monitor", "monitor.py")


@dataclass(frozen=True, kw_only=True)
class OpenPort:
    """A port on which a process of Ray listens."""

    program: str
    host: str
    """Address it is bound to; `0.0.0.0` or `::` for all of them."""
    port: int

    @property
    def is_public(self) -> bool:
        """Bound to every address of the machine, or to one that is reachable from anywhere."""
        address = ipaddress.ip_address(self.host.partition("%")[0])
        return address.is_unspecified or address.is_global


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """One machine as it sees itself."""

    address: str
    python: str
    versions: Mapping[str, str]
    """Package -> version; "" where it is missing."""
    device: str
    """Device that `resources.device=auto` would take there."""
    num_devices: int
    memory_bytes: int
    shared_memory_free_bytes: int
    ports: tuple[OpenPort, ...]
    marker: str
    """Text, as read here, of the file that the asking machine wrote; "" where it cannot be read."""
    clock: float
    """Seconds since the epoch."""


def survey(cluster: Cluster, *, marker: Path | None) -> list[tuple[Node, MachineFacts | str]]:
    """Facts of every machine, or why it did not answer.

    Args:
        cluster: to look at.
        marker: a file to read on each machine; None for none.
    """
    nodes = cluster.nodes()
    file = "" if marker is None else str(marker)
    tasks = [run_on(node.node_id, facts_here, node.address, file) for node in nodes]
    ready, _ = ray.wait(tasks, num_returns=len(tasks), timeout=SURVEY_S)
    answers: list[tuple[Node, MachineFacts | str]] = []
    for node, task in zip(nodes, tasks, strict=True):
        if task not in ready:
            answers.append((node, f"no answer within {SURVEY_S:g} s"))
            continue
        try:
            answers.append((node, ray.get(task, timeout=SURVEY_S)))
        except ray.exceptions.RayError as error:
            answers.append((node, str(error).strip().splitlines()[-1]))
    return answers


def facts_here(address: str, marker: str) -> MachineFacts:
    """Facts of the machine that this runs on."""
    device = device_name("auto")
    return MachineFacts(
        address=address,
        python=platform.python_version(),
        versions={name: installed_version(name) for name in PACKAGES},
        device=device,
        num_devices=num_devices(device),
        memory_bytes=psutil.virtual_memory().total,
        shared_memory_free_bytes=_free_bytes(Path("/dev/shm")),
        ports=tuple(_ray_ports()),
        marker=_read(marker),
        clock=time.time(),
    )


def _free_bytes(path: Path) -> int:
    return psutil.disk_usage(str(path)).free if path.is_dir() else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8") if path else ""
    except OSError:
        return ""


def _ray_ports() -> Sequence[OpenPort]:
    """Ports on which Ray's processes listen; those of other users cannot be seen."""
    ports = set()
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline()) or process.name()
            program = next((name for name in _RAY_PROGRAMS if name in command), None)
            if program is None:
                continue
            for connection in process.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr:
                    host, port = connection.laddr[0], connection.laddr[1]
                    ports.add(OpenPort(program=program.rstrip(":"), host=host, port=port))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(ports, key=lambda port: (port.program, port.host, port.port))
