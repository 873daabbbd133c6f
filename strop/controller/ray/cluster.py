"""The Ray cluster that worker processes run on: one of our own on this machine, or one that exists.

A private cluster is started by the first user in this process and shared by all; it listens on loopback only, asks
for a token, has no dashboard, reports nothing, keeps its files in a folder that only this user can enter, and ends with
its last user. When this process dies, even by `kill -9`,
the kernel ends Ray's servers with it, workers notice, and a reaper ends what is left within seconds. (The
kernel asks for more than is needed: the servers also end with the thread that started them, so the first
runtime is to be made in a thread that lives on, such as the main one.)
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import accelerators, ray_constants, services, state, utils
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from strop.controller.ray.private import (
    PrivateFolder,
    keep_token_private,
    own_signal_handlers,
    remember_token,
    store_options,
)
from strop.controller.ray.reaper import MARK, Reaper, new_mark
from strop.controller.ray.transport import register_serializers
from strop.utils.device import visibility_variable
from strop.utils.trust import ask

log = logging.getLogger(__name__)

_REACH_S = 5.0
"""Timeout of the first connection to an existing cluster."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    node_id: str
    """Ray's name of it."""
    address: str
    """Its address within the cluster."""
    total: Mapping[str, float]
    """Resources of the node, by Ray's names: CPU, GPU ..."""
    free: Mapping[str, float]
    """Free resources of the node."""
    is_here: bool
    """True for the machine of this process."""


class Cluster:
    """This process's connection to a cluster; every user calls `close` once."""

    def __init__(self, address: str | None = None) -> None:
        """Connect, or start a private cluster, unless this process is connected already.

        Args:
            address: of an existing cluster, such as `10.0.0.1:6379` or `auto`; None: a private one, or
                whatever this process is connected to.

        Raises:
            ValueError: this process is connected to another cluster than the one asked for.
            ConnectionError: there is no cluster at that address.
        """
        if address:
            ask("resources.address", address)
        self._is_open = True
        with _LOCK:
            if not ray.is_initialized():
                try:
                    _CONNECTION.open(address)
                except BaseException:  # a signal, perhaps, that came while the cluster was started
                    _CONNECTION.shut()
                    raise
            elif address not in (None, "auto") and address != _gcs_address():
                raise ValueError(
                    f"this process is connected to the Ray cluster at {_gcs_address()}, so it cannot use the "
                    f"one at {address}; close what uses the first, or use another process"
                )
            _CONNECTION.num_users += 1
            register_serializers()

    @property
    def is_private(self) -> bool:
        """True where this process started the cluster."""
        return _CONNECTION.is_private

    def nodes(self) -> list[Node]:
        """The living machines, in the order of their addresses."""
        free = state.available_resources_per_node()  # type: ignore[no-untyped-call]
        own_address = this_address()
        nodes = [
            Node(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}),
                is_here=node["NodeManagerAddress"] == own_address,
            )
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (_address_key(node.address), node.node_id))

    def close(self) -> None:
        """Leave; the last user of a private cluster ends it. More than once does no harm."""
        with _LOCK:
            if self._is_open:
                self._is_open = False
                _CONNECTION.num_users -= 1
                if _CONNECTION.num_users == 0:
                    _CONNECTION.shut()


def this_address() -> str:
    """Address of this machine within the cluster."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def run_on(node_id: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function in a process of its own on a machine, whatever is taken there; Ray's reference to its value."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task: Any = ray.remote(function).options(num_cpus=0, scheduling_strategy=strategy, max_retries=0)
    return task.remote(*arguments)


def accelerator_resource(device: str) -> str | None:
    """Ray's name of a kind of device, such as GPU for `cuda`; None for a CPU.

    Raises:
        ValueError: Ray does not know the device.
    """
    variable = visibility_variable(device)
    if variable is None:
        return None
    for manager in accelerators.get_all_accelerator_managers():
        if manager.get_visible_accelerator_ids_env_var() == variable:
            return str(manager.get_resource_name())
    raise ValueError(f"Ray cannot hand out devices of kind {device!r}; use the inline runtime, or cpu")


def visibility_variables() -> set[str]:
    """The environment variables by which a process sees accelerators of any kind."""
    managers = accelerators.get_all_accelerator_managers()
    names = {manager.get_visible_accelerator_ids_env_var() for manager in managers}
    return {name for name in names if name is not None}


def private_cores() -> int | None:
    """Cores that a private cluster would have, as Ray counts them; None where this process is connected to one."""
    return None if ray.is_initialized() else int(utils.get_num_cpus())


class _SlowStart(Exception):
    """Ray gave up the start of a private cluster, of which nothing is left."""


class _Connection:
    """The one Ray connection that this process may have, shared by its clusters."""

    def __init__(self) -> None:
        self.num_users = 0
        self.is_ours = False
        """True where we connected, so that we also disconnect."""
        self.is_private = False
        self._reaper: Reaper | None = None
        self._folder: PrivateFolder | None = None

    def open(self, address: str | None) -> None:
        """Connect this process: to the cluster at `address`, or to a private one that it starts, twice where the
        machine is busy.

        Raises:
            ConnectionError: nothing answers there, or Ray refuses.
        """
        try:
            self._open(address)
        except _SlowStart as error:
            log.warning("%s; once more", error)
            try:
                self._open(address)
            except _SlowStart as again:
                raise ConnectionError(f"could not start a Ray cluster: {again}, twice") from again

    def _open(self, address: str | None) -> None:
        started = time.monotonic()
        if address == "auto":
            address = _existing()
        options = self._private_options() if address is None else {"address": address}
        remember_token()
        on_loopback = address is None or _is_on_loopback(address)
        mark = new_mark()
        with (
            own_signal_handlers(),
            _quiet_ray({MARK: mark, **_NO_IDLE_WORKERS} if address is None else {}, on_loopback=on_loopback),
        ):
            if on_loopback and address is not None:  # for others, Ray wants RAY_AUTH_MODE from the user
                maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
            try:
                ray.init(log_to_driver=False, configure_logging=False, **options)
            except (RuntimeError, ConnectionError, RayError) as error:
                folder, self._folder = self._folder, None  # kept, for its logs; the next cluster removes it
                raise ConnectionError(
                    f"could not {f'join the Ray cluster at {address}' if address else 'start a Ray cluster'}: "
                    f"{error}. A cluster with tokens needs RAY_AUTH_MODE=token here, and the same version of Ray"
                    + (f"; what Ray wrote is in {folder.path}" if folder else "")
                ) from error
            except Exception as error:
                if type(error) is not Exception or self._folder is None:
                    raise
                # Ray gives its own servers 30 seconds, and leaves those that came up where they are.
                Reaper(mark, str(self._folder.path), str(self._folder.path)).stop()
                self._folder.remove()
                self._folder = None
                raise _SlowStart(f"Ray's servers did not come up in time ({error})") from error
            self.is_ours = True
            if self._folder is not None:
                self.is_private = True
                node: Any = ray_worker.global_worker.node
                self._reaper = Reaper(mark, node.get_session_dir_path(), str(self._folder.path))
        log.debug("Ray cluster ready after %.1f s (%s)", time.monotonic() - started, address or "private")

    def _private_options(self) -> dict[str, Any]:
        """Arguments of `ray.init` for a private cluster, in a folder that is made here.

        Raises:
            ConnectionError: the disk has no room for it.
        """
        named = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE)
        if named and named != "local":
            log.warning(
                "RAY_ADDRESS names a cluster, %s, but resources.address does not: this run starts one of its own, "
                "on this machine alone; resources.address=auto joins the other",
                named,
            )
        self._folder = PrivateFolder()
        keep_token_private()
        return {
            "address": "local",
            "include_dashboard": False,
            # A folder within, because Ray opens the one that it is given to everybody.
            "_temp_dir": str(self._folder.path / "ray"),
            **store_options(self._folder.path),
        }

    def shut(self) -> None:
        if self.is_ours:
            ray.shutdown()
        if self._reaper is not None:
            self._reaper.stop()
            self._reaper = None
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self.is_ours = self.is_private = False


_NO_IDLE_WORKERS = {"RAY_prestart_worker_first_driver": "0"}
"""Ray would start a process per core for tasks; ours start from an executable of their own and never use them."""

_LOCK = threading.RLock()
_CONNECTION = _Connection()


@contextmanager
def _quiet_ray(extra: Mapping[str, str], *, on_loopback: bool) -> Iterator[None]:
    """Ray starts, or is reached, without statistics and without words, and with `extra` in its environment.

    Ray replaces a loopback address by one that other machines can reach, except where it takes itself to be
    on a system without clusters (its ENABLE_RAY_CLUSTER); there all its servers listen on loopback only. What
    its raylet has to say goes to our log instead of standard output, where a program's results may go.
    """
    ray_worker.print_to_stdstream = _to_log
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # it announces its defaults
    # Ray runs workers at niceness 15, where anything else on the machine would starve a training.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", **extra}
    if on_loopback:
        variables[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    before = {name: os.environ.get(name) for name in variables}
    can_cluster = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(variables)
    ray_constants.ENABLE_RAY_CLUSTER = can_cluster and not on_loopback
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = can_cluster
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _existing() -> str:
    """The address that Ray finds for `auto`.

    Raises:
        ConnectionError: it finds none, or nothing answers there, for which Ray would wait many minutes; or the cluster
            is the private one of another run, which Ray finds among the processes of this machine.
    """
    find: Any = services.get_ray_address_from_environment
    noted: Any = services.find_bootstrap_address
    try:
        address = str(find("auto", None))
    except ConnectionError as error:
        raise ConnectionError(
            "resources.address is auto, but no Ray cluster runs on this machine, and RAY_ADDRESS names none: start one "
            "with `ray start --head`, give its address as host:port, or leave resources.address out for a private one"
        ) from error
    host, port = _host_and_port(address)
    is_named = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE) not in (None, "", "auto")
    if not is_named and host.startswith("127.") and address != noted(None):
        raise ConnectionError(
            f"the Ray cluster at {address} is the private one of another run and ends with it, and no other was "
            f"started here: start one with `ray start --head`, or leave resources.address out for a private one"
        )
    if port.isdecimal() and _is_listening(host, int(port)):
        return address
    raise ConnectionError(
        f"{'RAY_ADDRESS' if is_named else 'the file in which Ray notes the cluster that was started last'} says "
        f"{address}, where no Ray cluster answers within {_REACH_S:g} s; name another one there or in "
        f"resources.address, as host:port, or leave both out for a private one"
    )


def _is_on_loopback(address: str) -> bool:
    """True where a cluster can be reached by its loopback address only, as a private one of another process.

    Raises:
        ConnectionError: nothing answers there.
    """
    host, port = _host_and_port(address)
    if not port.isdecimal():  # other forms are Ray's to read
        return False
    if not _is_listening(host, int(port)):
        raise ConnectionError(
            f"no Ray cluster answers at {address} within {_REACH_S:g} s; start it with `ray start --head`, or "
            f"leave the address out for a private one"
        )
    if host not in ("localhost", "::1") and not host.startswith("127."):
        return False
    outward: Any = services.get_node_ip_address  # the address that Ray would put in its place
    return not _is_listening(outward(), int(port))


def _host_and_port(address: str) -> tuple[str, str]:
    """Both parts of an address as Ray writes it, with brackets around one of IPv6."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), port


def _is_listening(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_REACH_S).close()
    except OSError:
        return False
    return True


def _to_log(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    for line in data["lines"]:
        log.debug("%s: %s", data.get("pid"), line)


def _gcs_address() -> str:
    return str(ray.get_runtime_context().gcs_address)


def _address_key(address: str) -> tuple[int, ...]:
    """10.0.0.9 before 10.0.0.10."""
    parts = address.split(".")
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)
