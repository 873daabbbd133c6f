"""Programs that a model wrote, run where they can do no harm.

    config.py    SandboxConfig, Limits
    program.py   Program, SandboxResult, the protocol Sandbox, SandboxUnavailable
    opening.py   make_sandbox: the sandbox of a configuration; `shared`: the one of a process; told.py: its settings
    local.py     LocalSandbox: this machine's kernel; the pool of launchers
    process.py   the driver's side of one launcher; frames.py what they say
    launcher.py  the launcher process; watch.py its limits; measure.py what a sandbox uses
    inside.py    the first process of a sandbox
    bubblewrap.py  the same built by the system's bwrap
    layout.py    the file system inside; view.py what of the host it shows
    kernel.py    calls of the kernel; seccomp.py the filter; cgroups.py control groups
    checking.py  the proof, from inside, that all of it holds here
    remote.py    other machines: fusion.py SandboxFusion servers; hosted.py the e2b service

A launcher imports launcher.py and what that needs, and not this file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.sandbox.config import Limits, SandboxConfig
    from strop.sandbox.local import LocalSandbox
    from strop.sandbox.opening import make_sandbox, shared
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
        ".opening": "make_sandbox shared",
        ".program": "Program Sandbox SandboxFailed SandboxResult SandboxUnavailable",
    },
)
