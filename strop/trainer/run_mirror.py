"""Copies of a run at a URL while it trains: each checkpoint, and what a continuation needs beside it.

A thread copies, one checkpoint after another; training waits for it at the end alone. A checkpoint that is sealed while
another one is copied replaces one that waits. A store that fails stops nothing: the log of the run says so, and
the next checkpoint is tried.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

from strop.run import Checkpoint, RunFolder, is_run
from strop.run.manifest import MANIFEST
from strop.utils.hub.repo import Refused, Unreachable
from strop.utils.hub.stores import check_store, get_files, put_files, remove_folder, state_of
from strop.utils.remote_path import is_url
from strop.utils.sanitize import described
from strop.utils.trust import ask

RUN_FILES = ("run.json", "config.yaml", "models.json", "trackers.json", "events.jsonl", "metrics.jsonl")
"""Files that a continuation reads beside a checkpoint, where they exist."""
CHECKPOINTS = "checkpoints"
RUNS_CACHE = Path("~/.cache/strop/runs")
"""Folder of copies that `kept_run` has fetched."""
_WHOLE = re.compile(rf"{CHECKPOINTS}/global_step_\d{{1,18}}/{MANIFEST}", re.ASCII)


class RunMirror:
    """Sends checkpoints of a run to a folder at a URL, named like the run.

    Concurrency: the controller calls `copy` and `finish`; one thread sends, and tells through `_results` alone.
    """

    def __init__(self, run: RunFolder, url: str) -> None:
        """Raises:
        ValueError: it is no URL, or its store will take nothing.
        UntrustedCode: received settings name it.
        """
        if not is_url(url):
            raise ValueError(
                f"run.copy_to is {url!r}, which is no URL (s3://bucket/runs, file:///backup/runs)"
            )
        ask("run.copy_to", url)
        try:
            check_store(url)
        except Refused as error:
            raise ValueError(f"run.copy_to {url!r} takes nothing: {error}") from error
        except Unreachable:
            pass  # it may be there when the first checkpoint is, and each copy that fails is told
        self._run = run
        self.url = f"{url.rstrip('/')}/{run.path.resolve().name}"
        self._lock = threading.Condition()
        self._waiting: Checkpoint | None = None
        self._is_busy = self._is_closed = False
        self._results: list[tuple[int, str]] = []
        self._thread: threading.Thread | None = None

    def copy(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint that was sealed, soon."""
        self._record_results()
        with self._lock:
            self._waiting = checkpoint
            self._lock.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="copies of checkpoints", daemon=True)
            self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait for the copies, send the end of the log, and say what became of them."""
        if self._thread is None:
            return
        with self._lock:
            is_done = self._lock.wait_for(lambda: self._waiting is None and not self._is_busy, timeout_s)
            self._is_closed = True
            self._lock.notify_all()
        if not is_done:
            self._results.append(
                (0, f"nothing more was copied to {self.url}: it took longer than {timeout_s:g} s")
            )
        self._record_results()
        if is_done:
            with suppress(
                Refused, Unreachable, TimeoutError, OSError
            ):  # the last checkpoint has told already
                self._send_records()

    def _work(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._waiting is not None or self._is_closed)
                checkpoint, self._waiting = self._waiting, None
                if checkpoint is None:
                    return
                self._is_busy = True
            outcome: str | None = ""
            try:
                self._copy(checkpoint)
            except (Refused, Unreachable, TimeoutError, OSError) as failed:
                # Where retention has removed it meanwhile, a newer one waits.
                outcome = described(failed) if checkpoint.path.is_dir() else None
            with self._lock:
                if outcome is not None:
                    self._results.append((checkpoint.step, outcome))
                self._is_busy = False
                self._lock.notify_all()

    def _copy(self, checkpoint: Checkpoint) -> None:
        self._send_records()  # a log that is ahead of its checkpoint is what a crash leaves too
        names = [*sorted(checkpoint.manifest.files), MANIFEST]
        put_files(checkpoint.path, names, f"{self.url}/{CHECKPOINTS}/{checkpoint.path.name}")
        local = {f"global_step_{step}" for step in self._run.checkpoints.steps()}
        remote = {name.split("/")[1] for name in state_of(self.url)[1] if name.startswith(f"{CHECKPOINTS}/")}
        for name in sorted(remote - local - {checkpoint.path.name}):
            if name.startswith("global_step_"):
                remove_folder(f"{self.url}/{CHECKPOINTS}/{name}")

    def _send_records(self) -> None:
        """The records as they are now; the run goes on to write them."""
        with tempfile.TemporaryDirectory(prefix="strop-copy-") as staging:
            names = [name for name in RUN_FILES if (self._run.path / name).is_file()]
            for name in names:
                shutil.copyfile(self._run.path / name, Path(staging) / name)
            put_files(Path(staging), names, self.url)

    def _record_results(self) -> None:
        """Write the results of the thread into the log of the run."""
        with self._lock:
            results, self._results = self._results, []
        for step, error in results:
            if error:
                self._run.events.append("copy_failed", step, url=self.url, error=error)
            else:
                self._run.events.append("copied", step, url=self.url)


def fetch_run(url: str, folder: Path, step: int | str | None = None) -> Path:
    """Bring a copy of a run to a folder of this machine: its records, and checkpoints that are whole.

    Args:
        url: of the copy, with run.json.
        folder: absent.
        step: the checkpoint of this step alone; best: all of them, so that the best can be told; None: the last.

    Raises:
        ValueError: there is no copy of a run, or it cannot be had.
    """
    try:
        _, names = state_of(url)
        whole = {
            int(name.split("/")[1].removeprefix("global_step_")): name.rpartition("/")[0]
            for name in names
            if _WHOLE.fullmatch(name)
        }
        if "run.json" not in names or not whole:
            raise ValueError(
                f"{url} holds no copy of a run with a checkpoint: give what run.copy_to names, and the run's name"
            )
        steps = list(whole) if step == "best" else [max(whole) if step is None else int(step)]
        if steps[0] not in whole:
            raise ValueError(
                f"{url} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(whole)))}"
            )
        folders = tuple(f"{whole[number]}/" for number in steps)
        get_files(url, [name for name in names if name in RUN_FILES or name.startswith(folders)], folder)
    except (Refused, Unreachable, TimeoutError) as error:
        raise ValueError(f"{url} cannot be fetched: {error}") from error
    return folder


def kept_run(url: str, step: int | str | None = None) -> Path:
    """As `fetch_run`, into a folder below the cache, under what names the present state of the copy; one that is there
    already is taken.

    Args:
        url, step: as of `fetch_run`.

    Raises:
        ValueError: as of `fetch_run`.
    """
    state = f"{state_of_copy(url)}-{step or 'last'}"
    folder = RUNS_CACHE.expanduser() / state / url.rstrip("/").rpartition("/")[2]
    return folder if is_run(folder) else fetch_run(url, folder, step)


def state_of_copy(url: str) -> str:
    """A key that changes with the files of a copy.

    Raises:
        ValueError: the store does not say.
    """
    try:
        return state_of(url)[0]
    except (Refused, Unreachable) as error:
        raise ValueError(f"{url} cannot be fetched: {error}") from error
