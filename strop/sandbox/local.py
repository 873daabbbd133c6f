"""Programs in namespaces of this machine's kernel: no daemon, no account, nothing that outlives a program.

A pool of launchers (launcher.py) is warm; a program leases one for as long as it runs. Each program has fresh
namespaces, so nothing passes from one to the next. Calls come from any thread or event loop; a call waits for a free
place, then for its launcher, each with a deadline. A caller that is cancelled interrupts its launcher, which ends the
sandbox at once. When this process dies, however it dies, the launchers see their sockets end and leave nothing.
"""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import os
import shutil
import threading
import time
from typing import Any

from strop.sandbox import checking
from strop.sandbox.config import SandboxConfig
from strop.sandbox.errors import SandboxUnavailable
from strop.sandbox.mounts import HostView, host_view
from strop.sandbox.process import EXIT_S, Launcher, LauncherGone
from strop.sandbox.program import ENVIRONMENT, Program, Sandbox, SandboxResult, failed
from strop.sandbox.supervisor import END_S, SETUP_S
from strop.utils.deadline import away

log = logging.getLogger(__name__)

_GRACE_S = SETUP_S + 2 * END_S
"""Time that a launcher may take beyond the program's own limit, in seconds."""
_ATTEMPTS = 2
"""Attempts to run a program: a launcher may have died while it waited for one."""
_PYTHON_FILE, _BASH_FILE = "__program__.py", "__program__.sh"


class _Lease:
    """One call's hold on a launcher, and its way to let go from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._launcher: Launcher | None = None
        self.is_cancelled = False
        self.called_at = time.monotonic()
        """Time of the call, on the monotonic clock."""

    def take(self, launcher: Launcher) -> None:
        with self._lock:
            self._launcher = launcher
            if self.is_cancelled:
                launcher.interrupt()

    def give_back(self) -> None:
        with self._lock:
            self._launcher = None

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            if self._launcher is not None:
                self._launcher.interrupt()


class LocalSandbox(Sandbox):
    """Runs programs on this machine; use as `async with LocalSandbox(config) as sandbox:`, or start and close."""

    def __init__(self, config: SandboxConfig | None = None, *, uses_groups: bool = True) -> None:
        """Nothing is started yet.

        Args:
            config: limits and sizes.
            uses_groups: False measures memory and processes without control groups, as on a machine where they
                cannot be made.
        """
        self.config = config or SandboxConfig()
        self._uses_groups = uses_groups
        self._view: HostView | None = None
        self._places = threading.BoundedSemaphore(self.config.max_concurrent)
        self._lock = threading.Lock()
        self._idle: list[Launcher] = []
        self._leases: set[_Lease] = set()
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        self._numbers = itertools.count()
        self._is_closed = False
        self._bubblewrap = ""

    # --- life ---

    def start(self) -> None:
        """Test that programs are isolated here, and start the warm launchers.

        Raises:
            SandboxUnavailable: a property is missing; the message names it.
        """
        if self._threads is not None:
            return
        self._is_closed = False
        self._view = host_view(self.config.python, self.config.read_only_paths)
        self._threads = concurrent.futures.ThreadPoolExecutor(
            self.config.max_concurrent, thread_name_prefix="sandbox"
        )
        try:
            self._choose_builder()
            while len(self._idle) < self.config.num_warm:
                launcher = Launcher()
                with self._lock:
                    self._idle.append(launcher)
        except OSError as error:
            self.close()
            raise SandboxUnavailable(
                f"a launcher could not be started: {error}; free memory or processes"
            ) from error
        except BaseException:
            self.close()
            raise

    def _choose_builder(self) -> None:
        """Choose the first builder whose isolation holds; SandboxUnavailable where there is none."""
        builders = self._builders()
        for number, builder in enumerate(builders, start=1):
            self._bubblewrap = builder
            try:
                checking.require(self._run_now, key=(self._view, self._uses_groups, builder))
                return
            except SandboxUnavailable:
                if number == len(builders):
                    raise
                log.info("%s does not isolate programs here; the kernel is asked directly", builder)

    def _builders(self) -> list[str]:
        """Paths of bubblewrap, and "" for the kernel directly, best first."""
        bwrap = shutil.which("bwrap") or ""
        if self.config.isolation == "bubblewrap" and not bwrap:
            raise SandboxUnavailable(
                "reward.sandbox.isolation is bubblewrap, but there is no bwrap on the path: install it"
            )
        if self.config.isolation == "bubblewrap" and os.geteuid() == 0:
            raise SandboxUnavailable(
                "reward.sandbox.isolation is bubblewrap, but this process is root, and programs in it would be root "
                "outside: use kernel, which gives them the identity of nobody"
            )
        if self.config.isolation == "kernel" or not bwrap or os.geteuid() == 0:
            return [""]
        return [bwrap] if self.config.isolation == "bubblewrap" else [bwrap, ""]

    def check(self) -> list[checking.Property]:
        """Every property of the isolation, tried now; nothing else may be run with this object before `start`.

        Raises:
            SandboxUnavailable: a file or folder to be shown is missing or private.
        """
        self._view = host_view(self.config.python, self.config.read_only_paths)
        properties: list[checking.Property] = []
        for builder in self._builders():
            self._bubblewrap = builder
            properties = checking.check(self._run_now)
            if all(isolation_property.holds for isolation_property in properties):
                break
        return properties

    def close(self) -> None:
        """End everything that runs. Programs in the middle come back as `infrastructure`."""
        threads, self._threads = self._threads, None
        with self._lock:
            self._is_closed = True
            leases = list(self._leases)
        for lease in leases:
            lease.cancel()
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            idle, self._idle = self._idle, []
        for launcher in idle:
            launcher.interrupt()
        for launcher in idle:
            launcher.end()

    # --- programs ---

    async def run(self, program: Program) -> SandboxResult:
        """Run one program; see Sandbox.run. Cancelling ends the program."""
        threads = self._threads
        if threads is None:
            raise RuntimeError(
                "the sandbox is not running; use `async with LocalSandbox(config) as sandbox:`"
            )
        lease = _Lease()  # its wait for a place begins here
        waiting = asyncio.get_running_loop().run_in_executor(threads, self._run, program, lease)
        try:
            with away(self._longest_s(program)):
                return await waiting
        except asyncio.CancelledError:
            lease.cancel()
            raise

    def run_blocking(self, program: Program) -> SandboxResult:
        """Run one program from a thread that may wait."""
        if self._threads is None:
            raise RuntimeError("the sandbox is not running; call start first")
        with away(self._longest_s(program)):
            return self._run(program, _Lease())

    def _longest_s(self, program: Program) -> float:
        """Longest duration of a call, in seconds."""
        wall_s = (program.limits or self.config.limits).wall_s
        return self.config.queue_s + _ATTEMPTS * (wall_s + _GRACE_S + EXIT_S)

    def _run_now(self, program: Program) -> SandboxResult:
        return self._run(program, _Lease())

    def _run(self, program: Program, lease: _Lease) -> SandboxResult:
        limits = program.limits or self.config.limits
        size = len(program.code.encode("utf-8", errors="replace")) + sum(map(len, program.files.values()))
        if size > limits.disk_mib << 20:
            return SandboxResult(
                outcome="error",
                error=f"the program's files have {size} bytes, more than {limits.disk_mib} MiB (limits.disk_mib)",
            )
        left_s = lease.called_at + self.config.queue_s - time.monotonic()
        if left_s <= 0 or not self._places.acquire(timeout=left_s):
            return failed(
                f"no place became free within {self.config.queue_s:g} s (reward.sandbox.queue_s, "
                f"reward.sandbox.max_concurrent)"
            )
        try:
            with self._lock:
                self._leases.add(lease)
            return self._run_leased(program, lease)
        finally:
            with self._lock:
                self._leases.discard(lease)
            self._places.release()

    def _run_leased(self, program: Program, lease: _Lease) -> SandboxResult:
        job = self._job(program)
        lease_start = time.monotonic()
        result = failed("the program was cancelled")
        for _attempt in range(_ATTEMPTS):
            if lease.is_cancelled:
                return result
            try:
                launcher, is_fresh = self._acquire_launcher()
            except OSError as error:
                return failed(f"a launcher could not be started: {error}")
            lease.take(launcher)
            try:
                answer = launcher.run(job, timeout_s=job["limits"]["wall_s"] + _GRACE_S)
            except LauncherGone as error:
                lease.give_back()
                launcher.end()
                result = failed(str(error))
                if is_fresh:
                    return result
                continue  # it may have died while it waited
            lease.give_back()
            self._release_launcher(launcher, is_usable=not answer.get("is_broken", False))
            return _result(answer, lease_start)
        return result

    def _acquire_launcher(self) -> tuple[Launcher, bool]:
        """A launcher, and True where it was started just now."""
        while True:
            with self._lock:
                launcher = self._idle.pop() if self._idle else None
            if launcher is None:
                return Launcher(), True
            if launcher.is_running():
                return launcher, False
            launcher.end()

    def _release_launcher(self, launcher: Launcher, *, is_usable: bool) -> None:
        with self._lock:
            if is_usable and not self._is_closed:
                self._idle.append(launcher)
                return
        launcher.end()

    def _job(self, program: Program) -> dict[str, Any]:
        assert self._view is not None, "start has set it"
        files = dict(program.files)
        argv = list(program.command)
        if program.code and program.language == "python":
            files[_PYTHON_FILE] = program.code.encode("utf-8", errors="replace")
            argv = [self._view.python, "-B", _PYTHON_FILE]
        elif program.code and program.language == "bash":
            files[_BASH_FILE] = program.code.encode("utf-8", errors="replace")
            argv = ["/bin/bash", "--norc", "--noprofile", _BASH_FILE]
        elif program.code:
            raise ValueError(
                f"a local sandbox runs code in python or bash, not {program.language!r}: give a command that runs it, "
                f"or use the backend sandbox_fusion"
            )
        elif argv[0] == "python":
            argv[0] = self._view.python
        return {
            "name": str(next(self._numbers)), "argv": argv, "env": ENVIRONMENT,
            "files": {name: base64.b64encode(content).decode("ascii") for name, content in files.items()},
            "stdin": base64.b64encode(program.stdin).decode("ascii"), "fetch": list(program.fetch),
            "limits": dataclasses.asdict(program.limits or self.config.limits), "uses_groups": self._uses_groups,
            "bubblewrap": self._bubblewrap, "python": self._view.python,
            "visible": self._view.visible, "hidden": self._view.hidden,
        }  # fmt: skip


def _result(answer: dict[str, Any], lease_start: float) -> SandboxResult:
    if "stdout" not in answer:
        return failed(str(answer.get("error", "the launcher said nothing")))
    files = {}
    with contextlib.suppress(ValueError):
        files = {name: base64.b64decode(content) for name, content in answer["files"].items()}
    return SandboxResult(
        outcome=answer["outcome"], exit_code=answer["exit_code"], signal=answer["signal"],
        stdout=base64.b64decode(answer["stdout"]), stderr=base64.b64decode(answer["stderr"]),
        is_truncated=answer["is_truncated"], wall_s=answer["wall_s"], cpu_s=answer["cpu_s"],
        start_s=max(0.0, answer["started"] - lease_start) if answer["started"] else 0.0,
        memory_bytes=answer["memory_bytes"], files=files, error=answer["error"],
    )  # fmt: skip
