"""Local sandboxes built by the system's bubblewrap, for machines that give namespaces to it alone.

AppArmor may grant namespaces by program, as Ubuntu's does since 24.04: there a user's Python gets namespaces in which
it has no capabilities, and so can mount nothing.

bubblewrap makes the namespaces and the file system; its child is an interpreter with init_process.py, which then
limits, filters, runs and reports as it does where the kernel is called directly. Three differences: each of the three
writable folders holds a third of limits.disk_mib, the source files of this package are readable inside, at /.strop,
and without a control group there is no /dev/zero.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from strop.sandbox import init_process, layout

_PACKAGE = "/.strop"
_ANSWER_S = 20.0
_BOOT = """\
import sys, types
for name, folder in (("strop", "/"), ("strop.sandbox", sys.argv[1])):
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [folder]
import strop.sandbox.bubblewrap as bubblewrap
bubblewrap.live(*map(int, sys.argv[2:]))
"""


def start(job: Mapping[str, Any], ends: init_process.Ends, *, has_group: bool) -> tuple[int, int]:
    """Start bubblewrap; its process id, and that of the first process of the sandbox as the host sees it.

    Raises:
        OSError: it does not start.
    """
    info_read, info_write = os.pipe()
    passed = (ends.go, ends.status, ends.stdin, ends.stdout, ends.stderr)
    inner = [job["python"], "-I", "-S", "-B", "-c", _BOOT, _PACKAGE, *map(str, passed), str(int(has_group))]
    command = [
        job["bubblewrap"],
        *_arguments(job, has_group=has_group),
        "--info-fd",
        str(info_write),
        "--",
        *inner,
    ]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=ends.stderr, cwd="/",
            pass_fds=(*passed, info_write), env={"LANG": "C.UTF-8"},
        )  # fmt: skip
    finally:
        os.close(info_write)
    process.returncode = 0  # it is waited for by its number
    try:
        return process.pid, _first_process(info_read, process.pid)
    finally:
        os.close(info_read)


def _first_process(info_fd: int, fallback: int) -> int:
    """The process id that bubblewrap reports; its own where it ended before, which its error output explains."""
    text = b""
    while select.select([info_fd], [], [], _ANSWER_S)[0] and (data := os.read(info_fd, 4096)):
        text += data
        if b"}" in text:
            return int(json.loads(text)["child-pid"])
    return fallback


def _arguments(job: Mapping[str, Any], *, has_group: bool) -> list[str]:
    folder_bytes = str((job["limits"]["disk_mib"] << 20) // 3)
    identity = str(init_process.INSIDE_ID)
    words = [
        "--unshare-all",
        "--uid",
        identity,
        "--gid",
        identity,
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
    ]
    words += ["--cap-drop", "ALL", "--clearenv", "--proc", "/proc", "--dir", "/dev"]
    for name in layout.devices(has_group=has_group):
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for path in (layout.BOX, "/tmp", "/dev/shm"):
        words += ["--size", folder_bytes, "--tmpfs", path]
    for path in sorted(job["visible"], key=lambda path: str(path).count("/")):
        source = Path(path)
        words += (
            ["--symlink", str(source.readlink()), path] if source.is_symlink() else ["--ro-bind", path, path]
        )
    for path in job["hidden"]:
        if Path(path).is_dir():
            words += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    words += ["--ro-bind", str(Path(__file__).parent), _PACKAGE]
    return [*words, "--remount-ro", "/proc", "--remount-ro", "/", "--chdir", layout.BOX]


def live(go: int, status: int, stdin: int, stdout: int, stderr: int, has_group: int) -> NoReturn:
    """First process of a sandbox that bubblewrap has built: init_process.live, after reading the job from the pipe."""
    ends = init_process.Ends(go=go, status=status, stdin=stdin, stdout=stdout, stderr=stderr)
    text = bytearray()
    while not text.endswith(b"\n"):
        data = os.read(go, 1 << 16)
        if not data:
            os._exit(1)
        text += data
    init_process.live(json.loads(text), ends, has_group=bool(has_group), is_built=True)
