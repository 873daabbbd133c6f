"""Program, SandboxResult, and the interface of sandboxes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Literal, Self

from strop.sandbox.config import Limits, SandboxConfig

SandboxOutcome = Literal["ok", "error", "timeout", "memory", "output", "killed", "infrastructure"]
_MAX_FILES = 256
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/box", "TMPDIR": "/tmp", "USER": "box",
    "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
"""The variables of a program in a local sandbox."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Something to run: either `code` in a language, or a `command` that finds its files in the work folder."""

    code: str = ""
    """The program's text."""
    language: str = "python"
    """Language of `code`. A local sandbox knows python and bash; a server has its own list."""
    command: tuple[str, ...] = ()
    """Program and arguments instead of `code`; the work folder is the current one."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files that it finds in the work folder, by relative name."""
    stdin: bytes = b""
    """Its standard input."""
    fetch: tuple[str, ...] = ()
    """Names of files in the work folder to bring back; those that do not exist are left out."""
    limits: Limits | None = None
    """Limits of this program; None: those of the sandbox."""

    def __post_init__(self) -> None:
        if bool(self.code) == bool(self.command):
            raise ValueError(
                "a program is either code or a command, and not both; set exactly one of the two"
            )
        if len(self.files) > _MAX_FILES or len(self.fetch) > _MAX_FILES:
            raise ValueError(f"a program brings {len(self.files)} files; at most {_MAX_FILES} are possible")
        for name in (*self.files, *self.fetch):
            path = PurePosixPath(name)
            if (
                not name
                or path.is_absolute()
                or ".." in path.parts
                or path == PurePosixPath(".")
                or "\0" in name
            ):
                raise ValueError(
                    f"file name {name!r} of a program must be relative and stay in the work folder"
                )


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """Result of one program. Everything in it but the numbers was written by the program: untrusted."""

    outcome: SandboxOutcome
    """`ok`: exit code 0. `error`: another exit code. `timeout`, `memory`, `output`: that limit ended it. `killed`: it
    died with a signal, or took its sandbox with it. `infrastructure`: the sandbox failed before the program began; this
    says nothing about the program, and nothing that it does leads there."""
    exit_code: int | None = None
    """None where it did not exit by itself."""
    signal: int | None = None
    """The signal that ended its first process; None where it exited or where the sandbox ended it."""
    stdout: bytes = b""
    """Standard output, at most limits.output_kib."""
    stderr: bytes = b""
    """Standard error, at most limits.output_kib."""
    is_truncated: bool = False
    """True where one of the two was cut."""
    wall_s: float = 0.0
    """Time on the clock from its start to its end, in seconds."""
    start_s: float = 0.0
    """Time from the free place in the sandbox until the program started, in seconds."""
    cpu_s: float = 0.0
    """Processor time, in seconds."""
    memory_bytes: int = 0
    """Most memory at one time; 0 where the back end does not say."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """The files asked back."""
    error: str = ""
    """One sentence; empty where the outcome is `ok`."""

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are no UTF-8 are replaced."""
        return self.stdout.decode("utf-8", errors="replace")


def failed(sentence: str) -> SandboxResult:
    """The result of a program that was not run, which says nothing about it."""
    return SandboxResult(outcome="infrastructure", error=sentence)


class Sandbox(ABC):
    """Runs programs, each in a sandbox of its own that nothing outlives; use as `async with`, or start and close."""

    config: SandboxConfig

    @abstractmethod
    def start(self) -> None:
        """Start, and test that programs are isolated.

        Raises:
            SandboxUnavailable: they are not; the message names the missing property.
        """

    @abstractmethod
    def close(self) -> None:
        """End everything that still runs."""

    @abstractmethod
    async def run(self, program: Program) -> SandboxResult:
        """Run one program; always comes back, with `infrastructure` where the sandbox itself failed."""

    @abstractmethod
    def run_blocking(self, program: Program) -> SandboxResult:
        """The same for callers without an event loop."""

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)
