"""Several real processes for a test, each one rank of a torch.distributed group.

    def gradient(ranks: Ranks, rows: int) -> float:      # at the top level of the test module
        parallel = ranks.join(shard_size=2)              # a gloo group of these ranks alone
        ...
        return plain python, numpy or CPU tensors

    first, second = run_ranks(gradient, 2, 10)           # the results in the order of the ranks

Processes are started once and serve later calls, as forks of a server that has imported what they need (fork_server);
each has one thread. Ranks that have joined stay in their group for the next call of as many, which saves a sixth of
it: connections, meshes, and all that DTensor has found out about shardings. What joins fewer ranks leaves it first;
what joins none and must be in no group calls `leave`.
After a call that failed or ran out of time its processes are killed, and the next call gets others. Nothing
survives the test run: the processes end with the one that started them.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import multiprocessing.connection
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from fork_server import CONTEXT, not_preloaded

from strop.controller.auth_listener import new_secret
from strop.controller.rendezvous import Rendezvous
from strop.controller.store_server import _GROUPS, RendezvousServer

_START_TIMEOUT_S = 240.0
"""Limit of a process's start: the first one waits for the server's imports, on a machine that may be busy."""
_TIMEOUT_S = 60.0
"""Limit of a wait for other ranks, of groups that are kept."""
_SECRET = new_secret()
"""Of all meetings, of which there are hundreds: each secret is looked for in whatever its process writes later."""


class RankFailed(RuntimeError):
    """A rank raised, ended or did not answer; the message holds its traceback."""


@dataclass(frozen=True)
class Ranks:
    """What the function of a test is given: who it is, and where the group meets."""

    rank: int
    world_size: int
    place: Rendezvous
    """Where the group of `join` meets."""

    @property
    def rendezvous(self) -> Rendezvous:
        """Where this call's ranks can find each other as they like, in no group yet."""
        leave()
        return self.place

    def join(self, *, timeout_s: float = _TIMEOUT_S, **engine: Any) -> Any:
        """This process as `strop.engines.parallel.ranks.Parallel`, on the CPU; again for another mesh, with these
        settings of an engine."""
        import torch.distributed as dist

        from strop.engines.config import EngineConfig
        from strop.engines.parallel.process_group import join_ranks

        are_others = dist.is_initialized() and dist.get_world_size() != self.world_size
        if timeout_s != _TIMEOUT_S or are_others:
            leave()
        return join_ranks(
            rank=self.rank,
            world_size=self.world_size,
            rendezvous=self.place,
            device="cpu",
            engine=EngineConfig(**engine),
            timeout_s=timeout_s,
        )


def run_ranks(
    function: Callable[..., Any] | str, world_size: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call `function(Ranks, *args)` in `world_size` processes at the same time; the results in order of rank.

    Args:
        function: at the top level of an importable module (a test module is one), or "module:name".
        world_size: number of processes.
        args: picklable; the same for all ranks.
        timeout_s: limit of the call, without the start of the processes.

    Raises:
        RankFailed: a rank raised (first traceback), died or was too late; all its processes are killed.
    """
    name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
    while len(_children) < world_size:
        _children.append(_Child())
    used = _children[:world_size]
    try:
        for child in used:
            child.wait_until_ready()
        are_met = world_size in _meetings
        if not are_met:
            _part()
            _meetings[world_size] = RendezvousServer("127.0.0.1", secret=_SECRET)
        place = _meetings[world_size].rendezvous
        for rank, child in enumerate(used):
            child.connection.send((sys.path, name, Ranks(rank, world_size, place), args, are_met))
        results, stay = _collect(used, name, time.monotonic() + timeout_s)
        if not stay:
            _part()
        return results
    except BaseException:
        _part()
        for child in used:
            child.kill()
            _children.remove(child)
        raise


class _Child:
    """One process that calls functions."""

    def __init__(self) -> None:
        self.connection, theirs = CONTEXT.Pipe()
        self.process: BaseProcess = CONTEXT.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._ready = False

    def wait_until_ready(self) -> None:
        if not self._ready and not self.connection.poll(_START_TIMEOUT_S):
            raise RankFailed(f"a rank's process did not start within {_START_TIMEOUT_S} s")
        if not self._ready:
            missing: list[str] = self.connection.recv()
            if missing:
                raise RankFailed(f"the server of processes could not import {', '.join(missing)}")
            self._ready = True

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.connection.close()


_children: list[_Child] = []
_meetings: dict[int, RendezvousServer] = {}
"""By the number of ranks: where those of the last call have met, if they are in their group still."""


def _part() -> None:
    while _meetings:
        _meetings.popitem()[1].close()


@atexit.register
def end_ranks() -> None:
    """End all processes; the next call starts others. For tests that change them for good."""
    _part()
    for child in _children:
        child.connection.close()  # what a waiting process ends by
    for child in _children:
        child.process.join(5)
        child.process.kill()
    _children.clear()


def _collect(used: list[_Child], name: str, deadline: float) -> tuple[list[Any], bool]:
    """The results, and whether all ranks are in their group still."""
    results: dict[int, Any] = {}
    all_stay = True
    rank_of = {child.connection: rank for rank, child in enumerate(used)}
    while len(results) < len(used):
        waiting = [connection for connection, rank in rank_of.items() if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank_of[connection] for connection in waiting]
            raise RankFailed(f"{name}: ranks {late} of {len(used)} gave no result in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = rank_of[connection]
            try:
                succeeded, stays, value = connection.recv()
            except (EOFError, ConnectionResetError) as error:
                used[rank].process.join(10)
                code = used[rank].process.exitcode
                raise RankFailed(f"{name}: rank {rank} ended with exit code {code}") from error
            if not succeeded:
                raise RankFailed(f"{name}: rank {rank} of {len(used)} raised\n{value}")
            results[rank] = value
            all_stay &= stays
    return [results[rank] for rank in range(len(used))], all_stay


# In the processes of ranks:

_may_stay = False
"""The call that runs has no group but that of `Ranks.join`, with the usual limits."""


def leave() -> None:
    """Leave the group of this process, if it has one, for good: what comes next is not for other calls."""
    global _may_stay
    _may_stay = False
    _leave()


def _leave() -> None:
    from strop.engines.parallel.process_group import leave_ranks

    leave_ranks()


def _serve(connection: Connection) -> None:
    """Life of a process: calls, until the one that started it is gone."""
    global _may_stay
    missing = not_preloaded()
    faulthandler.enable()  # a rank that crashes says where
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    gc.freeze()  # imported modules are not looked through at each collection
    connection.send(missing)
    while True:
        try:
            path, name, ranks, args, are_met = connection.recv()
        except EOFError:
            return
        sys.path[:] = path
        if not are_met:
            _leave()
            _GROUPS.clear()  # this meeting has the same secret as earlier ones, and may have the port of one
        _may_stay = True
        try:
            module, _, function = name.partition(":")
            value = getattr(importlib.import_module(module), function)(ranks, *args)
            _may_stay &= torch.distributed.is_initialized()
            connection.send((True, _may_stay, value))
        except Exception:  # noqa: BLE001  (raised again where the call was made)
            _may_stay = False
            connection.send((False, False, traceback.format_exc()))
        finally:
            value = None
            gc.collect()  # models and their collectives go before the group that they belong to
            gc.freeze()  # and what the call has imported is not looked through after each of the next ones
            if not _may_stay:
                _leave()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
