"""Programs that a model wrote, run where they can do no harm.

bubblewrap.py       The same sandbox built by the system's bubblewrap, for machines that give namespaces to it and to
                    nobody else
cgroups.py          Memory and process limits for all processes of a sandbox together, where this process may make
                    control groups
checking.py         Proof that a local sandbox isolates
config.py           Where the model's programs run, and within which limits
config_handover.py  What a reward worker was told of its sandbox, until its first program asks for one (factory.py)
errors.py           Errors of sandboxes
factory.py          The sandbox that a configuration describes
framing.py          The messages between a driver and a launcher
fusion.py           Programs on a SandboxFusion server
hosted.py           Programs in sandboxes of the hosted service e2b, through its own package (the extra `e2b`)
init_process.py     The first process of a sandbox
kernel.py           The calls of the Linux kernel that Python's standard library does not offer
launcher.py         A launcher
layout.py           What a program in the sandbox sees of the file system
local.py            Programs in namespaces of this machine's kernel
mounts.py           Which files of the host a program in a local sandbox may read
process.py          The driver's handle to one launcher process
program.py          A program, what became of it, and what every sandbox can do
remote.py           Programs that are sent to another machine
seccomp.py          Which system calls a program in the sandbox may make, as a filter for the kernel
supervisor.py       The launcher's eye on one sandbox
usage.py            What the processes of a sandbox use, as the launcher sees it
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
