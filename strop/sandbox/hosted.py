"""Programs in sandboxes of the hosted service e2b, through its own package (the extra `e2b`).

Needs E2B_API_KEY in the environment of this process; the package reads it. Each program has a virtual machine of its
own, which is ended afterwards. Not run against the service by the tests, which have no account: written from the
package's documentation (AsyncSandbox.create, files.write, commands.run, files.read, kill), and tested with a stand-in.

Of the limits, wall_s ends the command and the machine, and output_kib cuts the output; the machine's own template
sets memory, processor and disk.
"""

from __future__ import annotations

import asyncio
import importlib
import shlex
import time
from typing import Any

from strop.sandbox.config import Limits, SandboxConfig
from strop.sandbox.errors import SandboxUnavailable
from strop.sandbox.program import Program, SandboxResult, failed
from strop.sandbox.remote import RemoteSandbox

_FOLDER = "/home/user/box"
_COMMANDS = {"python": ("python3", "-B", "__program__.py"), "bash": ("bash", "__program__.sh")}
_START_S = 60.0


class HostedSandbox(RemoteSandbox):
    """Runs programs at e2b; use as `async with HostedSandbox(config) as sandbox:`."""

    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        try:
            self._e2b: Any = importlib.import_module("e2b")
        except ImportError as error:
            raise SandboxUnavailable(
                "reward.sandbox.backend is e2b, but its package is not installed: pip install 'strop[e2b]'"
            ) from error

    def longest_s(self, limits: Limits) -> float:
        """As of RemoteSandbox, the start of the machine included."""
        return _START_S + limits.wall_s

    def failure_sentence(self, reason: str) -> str:
        """As of RemoteSandbox."""
        return f"e2b did not run a program: {reason}. Check E2B_API_KEY and the network"

    async def answer(self, program: Program, limits: Limits) -> SandboxResult:
        """As of RemoteSandbox."""
        files, command = dict(program.files), program.command
        if program.code:
            if program.language not in _COMMANDS:
                raise ValueError(f"e2b runs code in python or bash, not {program.language!r}; give a command")
            command = _COMMANDS[program.language]
            files[command[-1]] = program.code.encode("utf-8", errors="replace")
        files["__stdin__"] = program.stdin
        call_start = time.monotonic()
        try:
            async with asyncio.timeout(self.longest_s(limits)):
                machine = await self._e2b.AsyncSandbox.create(timeout=int(self.longest_s(limits)))
                try:
                    for name, content in files.items():
                        await machine.files.write(f"{_FOLDER}/{name}", content)
                    return await self._run_command(machine, command, program, limits, call_start)
                finally:
                    await machine.kill()
        except TimeoutError:
            return failed(f"e2b did not answer within {self.longest_s(limits):g} s")
        except Exception as error:  # noqa: BLE001 (the package's errors share no base; all of them mean: not run)
            return failed(f"e2b failed: {type(error).__name__}: {error}")

    async def _run_command(
        self, machine: Any, command: tuple[str, ...], program: Program, limits: Limits, call_start: float
    ) -> SandboxResult:
        line = f"{shlex.join(command)} < __stdin__"
        started = time.monotonic()
        try:
            finished = await machine.commands.run(line, cwd=_FOLDER, timeout=limits.wall_s)
        except self._e2b.TimeoutException:
            return SandboxResult(
                outcome="timeout", start_s=started - call_start, wall_s=time.monotonic() - started,
                error=f"the program did not finish in {limits.wall_s:g} s (limits.wall_s)",
            )  # fmt: skip
        except self._e2b.CommandExitException as error:
            finished = error
        wall_s = time.monotonic() - started
        cap = limits.output_kib << 10
        stdout, stderr = (
            str(text or "").encode("utf-8", errors="replace") for text in (finished.stdout, finished.stderr)
        )
        is_truncated = len(stdout) > cap or len(stderr) > cap
        code = int(finished.exit_code)
        fetched: dict[str, bytes] = {}
        for name in program.fetch:
            if await machine.files.exists(f"{_FOLDER}/{name}"):
                fetched[name] = bytes(await machine.files.read(f"{_FOLDER}/{name}", format="bytes"))
        return SandboxResult(
            outcome="output" if is_truncated else "ok" if code == 0 else "error", exit_code=code,
            stdout=stdout[:cap], stderr=stderr[:cap], is_truncated=is_truncated, wall_s=wall_s,
            start_s=started - call_start, files=fetched,
            error="" if code == 0 and not is_truncated else f"the program exited with code {code}",
        )  # fmt: skip
