"""File system inside a sandbox.

    /                 an empty file system of its own, read-only
    /usr, /lib, ...   the system's programs and libraries, and the interpreter's installation: read-only
    /dev              null, zero, full, random, urandom; without a control group, zero is a file of zeros: shared
                      mappings of the device would be memory that is not counted
    /proc             processes of the sandbox only; absent where the kernel refuses it
    /box              the work folder: writable, gone afterwards
    /tmp, /dev/shm    the same; together with /box they hold limits.disk_mib

Built in the mount namespace of the sandbox, from inside, before the program exists. Raises OSError.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from strop.sandbox import kernel

BOX = "/box"
_HOST, _SCRATCH = "/.host", "/.scratch"
DEVICES = ("null", "zero", "full", "random", "urandom")
_MAX_FILES = 8192
"""Files and folders that fit into the writable part."""
_ZEROS_BYTES = 1 << 40
"""Length of the file of zeros; it holds nothing."""
_QUIET = kernel.MS_NOSUID | kernel.MS_NODEV


def build_root(
    *, visible: Sequence[str], hidden: Sequence[str], disk_bytes: int, uid: int, has_group: bool
) -> None:
    """Replace the root of this mount namespace.

    Args:
        visible: files and folders of the host, read-only at the same place; a link stays a link.
        hidden: folders that are empty although they lie below a visible one.
        disk_bytes: capacity of the writable folders together.
        uid: owner of the writable folders.
        has_group: a control group counts the memory of the sandbox.
    """
    kernel.mount("", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", _QUIET, "size=4m,nr_inodes=4096,mode=755")
    Path(f"/tmp{_HOST}").mkdir()
    kernel.pivot_root("/tmp", f"/tmp{_HOST}")
    os.chdir("/")
    _make_devices(has_group=has_group)
    _make_writable(disk_bytes, uid)
    _make_accounts(uid)
    for path in sorted(visible, key=lambda path: path.count("/")):
        _mount_visible(path)
    for path in hidden:
        if Path(path).is_dir():
            kernel.mount("tmpfs", path, "tmpfs", _QUIET | kernel.MS_RDONLY, "size=4k,mode=755")
    _mount_proc()
    kernel.unmount(_HOST)
    Path(_HOST).rmdir()
    kernel.mount("", "/", flags=kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _QUIET)
    os.chdir(BOX)


def devices(*, has_group: bool) -> list[str]:
    """Names of the host's devices that are visible inside."""
    return [name for name in DEVICES if has_group or name != "zero"]


def _make_devices(*, has_group: bool) -> None:
    Path("/dev").mkdir()
    if not has_group:
        with Path("/dev/zero").open("wb") as zeros:
            zeros.truncate(_ZEROS_BYTES)
    for name in devices(has_group=has_group):
        _bind_file(f"{_HOST}/dev/{name}", f"/dev/{name}")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        Path(f"/dev/{name}").symlink_to(f"/proc/self/fd/{number}")
    Path("/dev/fd").symlink_to("/proc/self/fd")


def _bind_file(source: str, target: str) -> None:
    Path(target).touch()
    kernel.mount(source, target, flags=kernel.MS_BIND)
    kernel.make_read_only(target)


def _make_writable(disk_bytes: int, uid: int) -> None:
    Path(_SCRATCH).mkdir()
    kernel.mount("tmpfs", _SCRATCH, "tmpfs", _QUIET, f"size={disk_bytes},nr_inodes={_MAX_FILES},mode=755")
    for name, target in (("box", BOX), ("tmp", "/tmp"), ("shm", "/dev/shm")):
        source = Path(_SCRATCH, name)
        source.mkdir()
        os.chown(source, uid, uid)
        Path(target).mkdir(exist_ok=True)
        kernel.mount(str(source), target, flags=kernel.MS_BIND)
    kernel.unmount(_SCRATCH)
    Path(_SCRATCH).rmdir()


def _make_accounts(uid: int) -> None:
    Path("/etc").mkdir(exist_ok=True)
    Path("/etc/passwd").write_text(f"box:x:{uid}:{uid}::{BOX}:/bin/sh\n", encoding="ascii")
    Path("/etc/group").write_text(f"box:x:{uid}:\n", encoding="ascii")


def _mount_visible(path: str) -> None:
    source, target = Path(_HOST + path), Path(path)
    if source.is_symlink():
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(source.readlink())
    elif source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        kernel.mount(str(source), path, flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.make_read_only(path)
    elif source.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _bind_file(str(source), path)


def _mount_proc() -> None:
    Path("/proc").mkdir()
    flags = _QUIET | kernel.MS_NOEXEC | kernel.MS_RDONLY
    for options in ("subset=pid", ""):
        with contextlib.suppress(OSError):  # a container with a masked /proc may not mount one
            kernel.mount("proc", "/proc", "proc", flags, options)
            return
