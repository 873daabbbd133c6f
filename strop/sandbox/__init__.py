"""Programs that a model wrote, run where they can do no harm.

    config.py    SandboxConfig, Limits
    program.py   Program, SandboxResult, the protocol Sandbox, SandboxUnavailable
    factory.py   make_sandbox: the sandbox of a configuration; `shared`: the one of a process; config_handover.py: its settings
    local.py     LocalSandbox: this machine's kernel; the pool of launchers
    process.py   the driver's side of one launcher; framing.py what they say
    launcher.py  the launcher process; supervisor.py its limits; usage.py what a sandbox uses
    init_process.py    the first process of a sandbox
    bubblewrap.py  the same built by the system's bwrap
    layout.py    the file system inside; mounts.py what of the host it shows
    kernel.py    calls of the kernel; seccomp.py the filter; cgroups.py control groups
    checking.py  the proof, from inside, that all of it holds here
    remote.py    other machines: fusion.py SandboxFusion servers; hosted.py the e2b service

A launcher imports launcher.py and what that needs, and not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.utils.lazy_import import lazy_names

if TYPE_CHECKING:
    from strop.sandbox.config import Limits, SandboxConfig
    from strop.sandbox.factory import make_sandbox, shared
    from strop.sandbox.local import LocalSandbox
    from strop.sandbox.program import Program, Sandbox, SandboxFailed, SandboxResult, SandboxUnavailable

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
        ".program": "Program Sandbox SandboxFailed SandboxResult SandboxUnavailable",
    },
)
