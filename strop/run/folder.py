"""The run folder: everything a run leaves behind, and the only thing a resume, a diff or a report reads.

    run.json        who, when, with which versions, on which machine, by which command, with which settings
    config.yaml     the resolved configuration, written by the caller
    events.jsonl    the event log; the ledger is a view of it
    samples/        what the model wrote
    grown.jsonl     rows that came while the run went on
    checkpoints/    what a continuation needs
    lock            the process that writes

Everything but the lock may be copied elsewhere and read there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import secrets
import shutil
import socket
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from strop.run.checkpoints import MODEL_FOLDER, CheckpointStore
from strop.run.config import RunConfig
from strop.run.errors import RunError
from strop.run.events import EventLog
from strop.run.fingerprints import FingerprintChain
from strop.run.inputs import INPUTS_FILE
from strop.run.ledger import Ledger
from strop.run.lock import RunLock
from strop.run.profile.parts import PROFILE
from strop.run.samples.store import SampleStore
from strop.utils.atomic_io import replace_text
from strop.utils.safe_read import read_json
from strop.utils.sanitize import remember_secrets_in, storable, storable_text
from strop.utils.shell_words import shell_word
from strop.version import __version__

RUN_FILE = "run.json"
CONFIG_FILE = "config.yaml"
GROWN_FILE = "grown.jsonl"
SAMPLES = "samples"
FORMAT = 1
_PACKAGES = ("torch", "transformers", "tensordict", "numpy")
LOGS = "logs"
_OURS = {
    "config.yaml",
    INPUTS_FILE,
    "events.jsonl",
    "samples",
    "checkpoints",
    LOGS,
    "lock",
    f".{RUN_FILE}.tmp",
}
_WRITTEN = {CONFIG_FILE, "events.jsonl", "metrics.jsonl", "samples", "checkpoints", LOGS, "lock", "tensorboard",
            "spending.json", GROWN_FILE, INPUTS_FILE, RUN_FILE, PROFILE}  # fmt: skip
ROLES_STARTED = "roles_started"
"""Kind of the event that all roles have loaded their models, of each start."""
PROFILED = "profiled"
"""Kind of the event that the profile of a step is written."""
REHEARSAL = "rehearsal"
"""Kind of the event of the longest batch of a role, before the first step."""
OUT_OF_MEMORY = "out_of_memory"
"""Kind of the event that the token budget of a role was lowered."""
_BEFORE_START = (
    "created", "model", "started_from", "threads", "no_end_known", "reward_check", "environment", "preflight",
    REHEARSAL, OUT_OF_MEMORY, ROLES_STARTED,
)  # fmt: skip
"""Events of a run that has done nothing yet."""
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Errors of a disk, with which a run goes on once the disk is mended."""
_DEFAULTS = RunConfig()


class RunFolder:
    """One run on disk. Use `create` or `open`, and `close` at the end (or a `with` block)."""

    def __init__(
        self, path: Path, *, info: Mapping[str, Any], settings: RunConfig, lock: RunLock | None
    ) -> None:
        self.path = path
        self.info = info
        """Content of run.json."""
        self.events = EventLog(path / "events.jsonl", read_only=lock is None)
        self.ledger = Ledger(self.events)
        self.fingerprints = FingerprintChain(self.events)
        self.samples = SampleStore(path / SAMPLES)
        """Samples of the model."""
        self.checkpoints = CheckpointStore(
            path / "checkpoints", keep_last=settings.keep_last, keep_best=settings.keep_best
        )
        self._lock = lock

    @property
    def made_by(self) -> str:
        """Word of the command that made the run, such as `train`; empty for a program that named none."""
        return "".join(self.info["command"][1:2])

    @classmethod
    def create(
        cls,
        path: str | Path,
        *,
        config: Mapping[str, Any],
        command: Sequence[str],
        settings: RunConfig = _DEFAULTS,
    ) -> RunFolder:
        """Start a run in a folder that is absent or empty, and hold its lock.

        Args:
            path: the folder.
            config: the resolved configuration as plain values; run.json keeps it.
            command: the command line that started the run.
            settings: retention of checkpoints.

        Raises:
            RunError: the folder cannot be written, holds something else, or holds a run already.
        """
        path = Path(path)
        _check_free(path)
        lock = RunLock(path / "lock")
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
            _check_free(path)  # another process may have been faster, up to the moment of the lock
            for name in ("samples", "checkpoints"):
                (path / name).mkdir(exist_ok=True)
            (path / "events.jsonl").unlink(missing_ok=True)  # of a start that died before run.json
            info = _describe(config, command)
            run = cls(path, info=info, settings=settings, lock=lock)
            run.events.append("created", 0, fsync=True, id=info["id"])
            replace_text(path / RUN_FILE, json.dumps(info, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            lock.release()
            raise _unwritable(path, error) from error
        except BaseException:
            lock.release()
            raise
        return run

    @classmethod
    def open(cls, path: str | Path, *, read_only: bool = False, settings: RunConfig = _DEFAULTS) -> RunFolder:
        """Open a run that exists.

        Args:
            path: the folder.
            read_only: look at it without the lock, also while another process writes it.
            settings: retention of checkpoints.

        Raises:
            RunError: no run is there, it cannot be written, or another process writes it.
        """
        path = Path(path)
        info = _read_info(path)
        if read_only:
            return cls(path, info=info, settings=settings, lock=None)
        _check_no_links(path)
        lock = RunLock(path / "lock")
        try:
            lock.acquire()
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            return cls(path, info=info, settings=settings, lock=lock)
        except BaseException:
            lock.release()
            raise

    def rollback(
        self, step: int, *, settings: Mapping[str, Any] | None = None, before: Mapping[str, Any] | None = None
    ) -> None:
        """Continue from `step`: records, samples and checkpoints of later steps no longer count.

        Args:
            step: of a checkpoint; 0 for the beginning.
            settings: in which the run goes on with other values, for the record.
            before: the values of those so far.

        Raises:
            CheckpointError: later checkpoints are valid and the one of `step` is not.
        """
        self.checkpoints.discard_after(step)
        self.samples.discard_after(step)
        self.events.rollback(step, **_environment(), settings=dict(settings or {}), before=dict(before or {}))
        self.ledger.reload()
        self.fingerprints.reload()

    def seconds_of_steps(self) -> float:
        """Seconds of the steps recorded so far, in all processes that continued the run."""
        return sum(float(event["seconds"]) for event in self.events.read("step"))

    def link_model(self) -> None:
        """`model` in the folder leads to the model of the last checkpoint, where that has one.

        Raises:
            OSError: the file system has no links.
        """
        steps = self.checkpoints.steps() or [0]  # of a finished run they may have been removed
        target = Path("checkpoints") / f"global_step_{steps[-1]}" / MODEL_FOLDER
        if (self.path / target).is_dir():  # not with run.hf_model=never
            link = self.path / MODEL_FOLDER
            link.unlink(missing_ok=True)
            link.symlink_to(target)

    def remove_unstarted(self, error: Exception) -> bool:
        """Remove the folder of a run that has done nothing yet (its entries only, where something else holds the
        folder), and return True if it was removed. One that the disk refused stays, and goes on with --resume; logs
        that the error names stay alone, which a new run in the folder does not mind.

        Args:
            error: that ended the run.
        """
        cause = error.__cause__ if isinstance(error, RunError) else None
        if isinstance(cause, OSError) and cause.errno in _DISK:
            return False
        has_samples = any(
            path.is_file() for path in (self.path / SAMPLES).rglob("*")
        )  # of the first validation
        if has_samples or any(event["kind"] not in _BEFORE_START for event in self.events.read()):
            return False
        self.close()
        logs = self.path / LOGS
        is_named = any(f"{path}{os.sep}" in str(error) for path in (logs, logs.absolute()))
        for entry in self.path.iterdir():
            if is_named and entry == logs:
                continue
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        with contextlib.suppress(OSError):  # the current directory, a mount point: empty is good enough
            self.path.rmdir()
        return True

    def close(self) -> None:
        """Close the log and give the lock back; a second call does nothing."""
        self.events.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def is_run(path: str | Path) -> bool:
    """True when the folder holds a run."""
    return (Path(path) / RUN_FILE).is_file()


def no_run(path: Path) -> RunError:
    """The error of a path where no run is."""
    problem = "does not exist" if not path.exists() else f"is no run folder (it has no {RUN_FILE})"
    return RunError(f"{path} {problem}; give the folder that --out named when the run started")


def _check_free(path: Path) -> None:
    try:
        if not path.exists():
            return
        if not path.is_dir():
            raise RunError(f"{path} is a file, not a folder; choose another run folder with --out")
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise _unwritable(path, error) from error
    if RUN_FILE in names:
        info = _read_info(path)
        raise RunError(
            f"{path} already holds the run {info['id']}, started {info['created']}: continue it with "
            f"--resume {shell_word(path)}, or choose another folder with --out"
        )
    foreign = [name for name in names if name not in _OURS]
    if foreign:
        names_text = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise RunError(
            f"{path} exists and is no run folder (it holds {names_text}): choose an empty or absent folder with "
            f"--out"
        )


def _check_no_links(path: Path) -> None:
    """Refuse links inside the run folder: what is written, rolled back or removed must not lie elsewhere, such as in
    another run."""
    for name in sorted(_WRITTEN):
        if (path / name).is_symlink():
            raise RunError(
                f"{path / name} is a link, and a run is written in its own folder: move what it leads to here, or copy "
                f"the whole folder to where there is room"
            )


def _read_info(path: Path) -> dict[str, Any]:
    try:
        info = read_json(path / RUN_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise no_run(path) from None
    except OSError as error:
        reason = f"cannot read {path / RUN_FILE}: {error.strerror}"
        raise RunError(f"{reason}; check the rights on the folder") from error
    except ValueError as error:
        raise RunError(f"{path / RUN_FILE} is damaged ({error}); restore it from a backup") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        raise RunError(f"{path / RUN_FILE} is not of format {FORMAT}; use the strop that wrote it")
    remember_secrets_in(info.get("config"))
    command = info.get("command")
    for name, is_sound in (
        ("id", isinstance(info.get("id"), str)),
        ("created", isinstance(info.get("created"), str)),
        ("config", isinstance(info.get("config"), dict)),
        ("command", isinstance(command, list) and all(isinstance(word, str) for word in command)),
    ):
        if not is_sound:
            raise RunError(
                f"{path / RUN_FILE} is damaged ({name} has another form); restore it from a backup"
            )
    return info


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(f"cannot write the run folder {path}: {error.strerror}; choose another one with --out")


def _describe(config: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    now = datetime.now(UTC)
    return {
        "format": FORMAT,
        "id": f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        "created": now.isoformat(timespec="seconds"),
        **_environment(),
        "command": [storable_text(word) for word in command],
        "config": storable(config),
    }


def _environment() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "strop": __version__, **_installed()}
    machine = {"host": socket.gethostname(), "system": platform.platform(), "cpus": os.cpu_count()}
    return {"versions": versions, "machine": machine}


@cache
def _installed() -> Mapping[str, str]:
    """Versions of packages that a run computes with, those that there are."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions
