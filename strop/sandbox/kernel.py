"""System calls of Linux that Python's standard library does not offer.

Used in the launcher process, which has one thread. Each function raises OSError with the kernel's reason.
Numbers are those of the kernel's own headers (asm/unistd_64.h, asm-generic/unistd.h, linux/mount.h, linux/sched.h,
linux/prctl.h, linux/capability.h).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
from typing import Final

MACHINE: Final = platform.machine()
_CLONE = {"x86_64": 56, "aarch64": 220}
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAPSET = {"x86_64": 126, "aarch64": 91}
_MOUNT_SETATTR = 442

NEW_NAMESPACES: Final = (
    0x10000000 | 0x00020000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
)
"""user, mount, pid, network, ipc, uts, cgroup"""

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MS_REMOUNT: Final = 32
MNT_DETACH: Final = 2
_ATTR_RDONLY, _ATTR_NOSUID, _AT_RECURSIVE, _AT_FDCWD = 1, 2, 0x8000, -100

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    22,
    24,
    38,
)
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _check(result: int, operation: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{operation}: {os.strerror(number)}")
    return result


def _syscall(operation: str, number: int, *arguments: object) -> int:
    return _check(_libc.syscall(ctypes.c_long(number), *arguments), operation)


def fork_into_namespaces() -> int:
    """Like os.fork, with the child as the first process of fresh namespaces. The caller has one thread."""
    flags = ctypes.c_ulong(NEW_NAMESPACES | signal.SIGCHLD)
    zero = ctypes.c_ulong(0)
    return _syscall("new namespaces", _CLONE[MACHINE], flags, zero, zero, zero, zero)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() or None,
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _check(result, f"mount {kind or source} at {target}")


def make_read_only(target: str) -> None:
    """Read-only and without set-user-id, for a mount and everything mounted below it."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_RDONLY | _ATTR_NOSUID, 0, 0, 0)
    _syscall(
        f"make {target} read-only", _MOUNT_SETATTR, ctypes.c_int(_AT_FDCWD), ctypes.c_char_p(target.encode()),
        ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)),
    )  # fmt: skip


def unmount(target: str) -> None:
    """Detach a mount."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    """Make new_root the root; the root so far is found below it, at old_root."""
    _syscall(
        "change the root",
        _PIVOT_ROOT[MACHINE],
        ctypes.c_char_p(new_root.encode()),
        ctypes.c_char_p(old_root.encode()),
    )


def _prctl(operation: str, option: int, first: object = 0, second: object = 0) -> None:
    values = (
        ctypes.c_ulong(int(value)) if isinstance(value, int) else value for value in (first, second, 0, 0)
    )
    _check(_libc.prctl(ctypes.c_int(option), *values), operation)


def die_with_parent() -> None:
    """SIGKILL for this process when its parent ends."""
    _prctl("die with the parent", _PR_SET_PDEATHSIG, int(signal.SIGKILL))


def drop_capabilities_for_ever() -> None:
    """Drop the bounding set, so that no exec brings a capability back. Needs CAP_SETPCAP."""
    for capability in range(64):
        try:
            _prctl("drop a capability", _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno != errno.EINVAL or capability == 0:
                raise
            break  # beyond the last one that this kernel has
    _prctl("clear ambient capabilities", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def drop_capabilities() -> None:
    """Drop all capabilities."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _syscall("drop all capabilities", _CAPSET[MACHINE], ctypes.byref(header), ctypes.byref(nothing))


def forbid_new_privileges() -> None:
    """Forbid that an exec gives more rights, and that another process looks into this one."""
    _prctl("no new privileges", _PR_SET_NO_NEW_PRIVS, 1)
    _prctl("no dumps", _PR_SET_DUMPABLE, 0)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter(instructions: bytes) -> None:
    """Put a seccomp filter (8 bytes per instruction) on this process and all that it starts."""
    program = _Filter(len(instructions) // 8, instructions)
    _prctl("install the system call filter", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))
