"""Saves a checkpoint and dies by SIGKILL at one boundary; run by test_run_crashes.py.

    python checkpoint_crasher.py FOLDER first|replace|background

For k = 0, 1, 2, ... a forked child works in FOLDER/<k>: it saves step 20, then step 40 ("first", or "background":
written by one thread and sealed by another) or step 20 once more ("replace"), and kills itself just before its
k-th operation on the file system. Boundaries come from the interpreter's audit events (open, mkdir, rename,
remove, ...), from fsync, and from the chunks that the writer writes. Ends when a child gets through; prints what
each boundary was.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from strop.run import CheckpointStore
from strop.run.sealing import Sealing

FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree")


def write(folder: Path, *, boundary: Callable[[str], None], content: bytes) -> None:
    (folder / "model").mkdir()
    for name in ("model/a.safetensors", "optimizer.safetensors"):
        with (folder / name).open("wb", buffering=0) as file:
            for start in range(0, len(content), 1000):
                boundary(f"write {name} at {start}")
                file.write(content[start : start + 1000])


def save(store: CheckpointStore, step: int, boundary: Callable[[str], None], *, content: bytes) -> None:
    pending = store.begin(step, facts={"run": content[:3].decode()})
    with pending.writing():
        write(pending.folder, boundary=boundary, content=content)
    pending.seal()


def save_in_background(store: CheckpointStore, step: int, boundary: Callable[[str], None]) -> None:
    """What a run with run.async_save does: the main thread has nothing to do with the files."""
    pending = store.begin(step, facts={"run": "new"})
    writer = threading.Thread(
        target=write, args=(pending.folder,), kwargs={"boundary": boundary, "content": b"new" * 999}
    )
    writer.start()
    Sealing(pending, writer.join).result(60)


def child(root: Path, kill_at: int, mode: str) -> None:
    armed, count = False, 0

    def boundary(what: str) -> None:
        nonlocal count
        if not armed:
            return
        if count == kill_at:
            os.write(1, f"{kill_at} {what}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if (
            armed
            and event in FILE_EVENTS
            and (event in ("os.remove", "os.rmdir") or str(root) in str(arguments[0]))
        ):
            boundary(f"{event} {str(arguments[0]).replace(str(root), '')}")

    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        boundary(f"fsync {str(Path(f'/proc/self/fd/{descriptor}').readlink()).replace(str(root), '')}")
        real_fsync(descriptor)

    sys.addaudithook(audit)
    os.fsync = fsync
    store = CheckpointStore(root, keep_last=1, keep_best=0)
    save(store, 20, boundary, content=b"old" * 1000)
    armed = True
    if mode == "background":
        save_in_background(store, 40, boundary)
    else:
        save(store, 40 if mode == "first" else 20, boundary, content=b"new" * 999)


def main() -> None:
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    for kill_at in range(10_000):
        pid = os.fork()
        if pid == 0:
            child(folder / str(kill_at), kill_at, mode)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            sys.exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
