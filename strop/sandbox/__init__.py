"""Sandboxes: isolation of programs that a model wrote.

bubblewrap.py       Local sandboxes built by the system's bubblewrap, for machines that give namespaces to it alone
cgroups.py          Control groups: memory and process limits of a whole sandbox
checking.py         Test of a local sandbox's isolation
config.py           Configuration of sandboxes, and limits of programs
config_handover.py  Sandbox configuration of a reward worker, until its first program (factory.py)
errors.py           Errors of sandboxes
factory.py          The sandbox of a configuration; the shared one of a reward worker
framing.py          Messages between a driver and a launcher
fusion.py           Programs on a SandboxFusion server
hosted.py           Programs in sandboxes of the hosted service e2b, through its own package (the extra `e2b`)
init_process.py     First process of a sandbox
kernel.py           System calls of Linux that Python's standard library does not offer
launcher.py         Launcher process, which builds and watches sandboxes
layout.py           File system inside a sandbox
local.py            Programs in namespaces of this machine's kernel
mounts.py           Files of the host that are visible in a local sandbox
process.py          The driver's handle to one launcher process
program.py          Program, SandboxResult, and the interface of sandboxes
remote.py           Base class of sandboxes on another machine
seccomp.py          Filter of system calls
supervisor.py       Supervision of one sandbox: pipes, limits, outcome
usage.py            Processor time and memory of a sandbox
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.sandbox.config import Limits, SandboxConfig
    from strop.sandbox.errors import SandboxFailed, SandboxUnavailable
    from strop.sandbox.factory import make_sandbox, shared
    from strop.sandbox.local import LocalSandbox
    from strop.sandbox.program import Program, Sandbox, SandboxResult

__all__ = [
    "Limits",
    "LocalSandbox",
    "Program",
    "Sandbox",
    "SandboxConfig",
    "SandboxFailed",
    "SandboxResult",
    "SandboxUnavailable",
    "make_sandbox",
    "shared",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        ".config": "Limits SandboxConfig",
        ".local": "LocalSandbox",
        ".factory": "make_sandbox shared",
        ".errors": "SandboxFailed SandboxUnavailable",
        ".program": "Program Sandbox SandboxResult",
    },
)
