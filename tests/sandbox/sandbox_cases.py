"""Programs of the sandbox's tests."""

from __future__ import annotations

import textwrap
from typing import Any

import psutil
from command_lines import command_line

from strop.sandbox import Limits, LocalSandbox, Program, SandboxResult

SECRET = "a-key-of-the-host"


class Runner:
    """Runs a program text in a sandbox."""

    def __init__(self, sandbox: LocalSandbox) -> None:
        self.sandbox = sandbox

    def __call__(
        self, code: str, *, files: dict[str, bytes] | None = None, fetch: tuple[str, ...] = (), stdin: bytes = b"",
        **limits: Any,
    ) -> SandboxResult:  # fmt: skip
        given = Limits(**{"wall_s": 20.0, "cpu_s": 20.0, "memory_mib": 128, **limits})
        program = Program(
            code=textwrap.dedent(code), files=files or {}, fetch=fetch, stdin=stdin, limits=given
        )
        return self.sandbox.run_blocking(program)


def launchers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "sandbox.launcher" in command_line(child)]
