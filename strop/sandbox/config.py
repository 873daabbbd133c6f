"""Configuration of sandboxes, and limits of programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from strop.config.sections import section
from strop.utils.field_types import NonNegativeInt, PositiveFloat, PositiveInt


@section("reward.sandbox.limits")
class Limits:
    """Limits of one program. A limit that is reached ends the program, never the run."""

    wall_s: PositiveFloat = 10.0
    """Time on the clock, in seconds."""
    cpu_s: PositiveFloat = 10.0
    """Processor time of all its processes together, in seconds."""
    memory_mib: Annotated[int, Ge(32), "an interpreter needs that to start"] = 512
    """Memory of all its processes together, in MiB."""
    max_processes: PositiveInt = 64
    """Processes and threads that exist at the same time."""
    max_open_files: Annotated[int, Ge(16), "an interpreter needs as many"] = 256
    """Open files of one process."""
    file_mib: PositiveInt = 16
    """Size of the largest file it may write, in MiB."""
    disk_mib: PositiveInt = 64
    """Size of its work folder, /tmp and /dev/shm together, in MiB; kept in memory, gone afterwards."""
    output_kib: PositiveInt = 256
    """Bytes of standard output, and as many of standard error, in KiB; the program that writes more is ended."""


@section("reward.sandbox")
class SandboxConfig:
    """Sandbox for programs that a model wrote."""

    backend: Literal["local", "sandbox_fusion", "e2b"] = "local"
    """`local`: namespaces of this machine's kernel. `sandbox_fusion`: a SandboxFusion server at `url`. `e2b`: the
    hosted service (needs the extra `e2b` and E2B_API_KEY)."""
    url: str = ""
    """Address of the SandboxFusion server, for example http://10.0.0.5:8080."""
    isolation: Literal["auto", "bubblewrap", "kernel"] = "auto"
    """Builder of a local sandbox: the program bwrap of the system, or the kernel's calls directly. `auto` takes bwrap
    where it is installed and this process is not root. Both are tested before use; there is no weaker mode."""
    python: str = ""
    """Python interpreter inside a local sandbox; its installation is visible there, read-only. Empty: the one
    that strop runs with, its standard library without other packages."""
    read_only_paths: tuple[str, ...] = ()
    """Further files and folders that programs in a local sandbox may read, at the same place."""
    max_concurrent: PositiveInt = 8
    """Programs that run at the same time, for each process that uses the sandbox."""
    num_warm: Annotated[NonNegativeInt, "0 is none"] = 1
    """Launchers of a local sandbox that are started before the first program."""
    queue_s: Annotated[float, Gt(0), ".inf is no limit"] = 600.0
    """Longest wait for a free place among max_concurrent, in seconds."""
    limits: Limits = field(default_factory=Limits)
    """Limits of one program, unless it brings limits of its own."""

    def __post_init__(self) -> None:
        if self.backend == "sandbox_fusion" and not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"reward.sandbox.backend is sandbox_fusion, but reward.sandbox.url is {self.url!r}: give the address "
                f"of the server, for example http://127.0.0.1:8080"
            )
        if self.backend != "sandbox_fusion" and self.url:
            raise ValueError(
                f"reward.sandbox.url is {self.url!r}, but reward.sandbox.backend is {self.backend}, which asks no "
                f"server: set the backend to sandbox_fusion, or remove the url"
            )
        if self.backend != "local":
            local_only = {
                "isolation": self.isolation != "auto", "python": bool(self.python),
                "read_only_paths": bool(self.read_only_paths), "num_warm": self.num_warm != 1,
            }  # fmt: skip
            for name, is_set in local_only.items():
                if is_set:
                    raise ValueError(
                        f"reward.sandbox.{name} is set, but reward.sandbox.backend is {self.backend}: only a local "
                        f"sandbox has it"
                    )
        if self.num_warm > self.max_concurrent:
            raise ValueError(
                f"reward.sandbox.num_warm is {self.num_warm}, but reward.sandbox.max_concurrent is "
                f"{self.max_concurrent}: use a number from 0 to that"
            )
        for path in self.read_only_paths:
            if not path.startswith("/") or path == "/":
                raise ValueError(
                    f"reward.sandbox.read_only_paths has {path!r}; name files or folders by their full path, "
                    f"not the root"
                )

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """The service that programs are sent to, and files of this machine that they can read; see
        strop.config.sections.code_below."""
        if self.backend != "local":
            address = self.url or "the hosted service, with your key"
            yield "url" if self.url else "backend", f"{self.backend} at {address}", ""
        if self.python:
            yield "python", self.python, self.python
        for path in self.read_only_paths:
            yield "read_only_paths", f"{path} (shown to programs of the model)", path


CHANGEABLE = tuple(
    f"reward.sandbox.{key}"
    for key in ["backend", "url", "isolation", "max_concurrent", "num_warm", "queue_s"]
)
"""Settings that a run may be continued with anew: all but the limits, which decide a verdict."""
