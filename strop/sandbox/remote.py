"""Base class of sandboxes on another machine.

Concurrency: programs are sent on an event loop in a thread of its own, so that calls may come from any thread or loop;
at most max_concurrent are there at the same time. A caller that is cancelled gives its program up.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod

from strop.sandbox.config import Limits, SandboxConfig
from strop.sandbox.errors import SandboxUnavailable
from strop.sandbox.program import Program, Sandbox, SandboxResult, failed
from strop.utils.background_loop import BackgroundLoop
from strop.utils.deadline import away

_HELLO = "sandbox ready"
_LOOP = BackgroundLoop("programs on other machines")


class RemoteSandbox(Sandbox):
    """Runs programs elsewhere; use as `async with`, or start and close."""

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self._places = asyncio.Semaphore(config.max_concurrent)
        self._is_running = False

    @abstractmethod
    def longest_s(self, limits: Limits) -> float:
        """Longest duration of one program, from sending it to the whole answer, in seconds."""

    @abstractmethod
    async def answer(self, program: Program, limits: Limits) -> SandboxResult:
        """Send a program and wait for its result."""

    @abstractmethod
    def failure_sentence(self, reason: str) -> str:
        """Error sentence for a first program that was not run."""

    def start(self) -> None:
        """Run one program there; SandboxUnavailable where that fails."""
        if self._is_running:
            return
        result = self.run_blocking(Program(code=f"print({_HELLO!r})", limits=Limits(wall_s=20.0)))
        if result.text.strip() != _HELLO:
            raise SandboxUnavailable(self.failure_sentence(result.error or "its output was lost"))
        self._is_running = True

    def close(self) -> None:
        """Take no more programs; each call under way has its deadline."""
        self._is_running = False

    async def run(self, program: Program) -> SandboxResult:
        """Run one program; see Sandbox.run."""
        if not self._is_running:
            raise RuntimeError(
                f"the sandbox is not running; use `async with {type(self).__name__}(config) as sandbox:`"
            )
        with away(self._longest_s(program)):
            return await asyncio.wrap_future(_LOOP.submit(self._run(program)))

    def run_blocking(self, program: Program) -> SandboxResult:
        """Run one program from a thread that may wait."""
        with away(self._longest_s(program)):
            return _LOOP.submit(self._run(program)).result()

    def _longest_s(self, program: Program) -> float:
        return self.config.queue_s + self.longest_s(program.limits or self.config.limits)

    async def _run(self, program: Program) -> SandboxResult:
        try:
            async with asyncio.timeout(self.config.queue_s):
                await self._places.acquire()
        except TimeoutError:
            return failed(f"no place became free within {self.config.queue_s:g} s (reward.sandbox.queue_s)")
        try:
            return await self.answer(program, program.limits or self.config.limits)
        finally:
            self._places.release()
