"""Choices that a measurement makes once for a machine, so that every process of it, and a resumed run, has the same."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from strop.utils.c_library import cache_folder

logger = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")
FACTS = ("vendor_id", "model", "cpu family", "flags", "CPU ", "Features")
"""Beginnings of the lines that say which processor it is; the last two on ARM."""
WRITING_S = 1.0
"""Another process writes an answer in less."""


def machine_choice(name: str, speedup: Callable[[], float], *, at_least: float) -> bool:
    """True where a speedup of at least so much was measured on this machine; if never before, it is measured now, on
    one thread, and the answer is kept in the user's cache.

    Of processes that measure at the same time the first to be done decides for all. Where nothing can be kept, each
    process goes by its own measurement.

    Args:
        name: of the choice; a part of a file's name.
        speedup: takes the measurement.
        at_least: the speedup from which the answer is yes.

    Raises:
        ValueError: the file in the cache is not one of these.
    """
    measured: float | None = None
    try:
        path = cache_folder() / f"{name}-{_this_machine()}.json"
        if not path.is_file():
            measured = _on_one_thread(speedup)
            _keep(path, measured, measured >= at_least)
        return _kept(path)
    except OSError as error:
        logger.warning(
            "the choice of %s is not kept, and may be another one in another process: %s", name, error
        )
        return (_on_one_thread(speedup) if measured is None else measured) >= at_least


def _on_one_thread(speedup: Callable[[], float]) -> float:
    """The same however many threads the process that asks first may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return speedup()
    finally:
        torch.set_num_threads(before)


def _keep(path: Path, speedup: float, answer: bool) -> None:
    """Write the file, unless another process was faster: whole, where the file system has hard links."""
    text = json.dumps({"answer": answer, "speedup": round(speedup, 3)})
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        whole.write_text(text, encoding="utf-8")
        try:
            _place(whole, path)
        except FileExistsError:
            return
    logger.info(
        "%s: a speedup of %.2f was measured and is kept for this machine in %s", answer, speedup, path
    )


def _place(whole: Path, path: Path) -> None:
    """The file under another name, which nothing has.

    Raises:
        FileExistsError: something has it.
    """
    try:
        os.link(whole, path)
    except FileExistsError:
        raise
    except OSError:  # no hard links here
        with path.open("x", encoding="utf-8") as file:
            file.write(whole.read_text(encoding="utf-8"))


def _kept(path: Path) -> bool:
    """The answer in a file; one that is empty is being written."""
    deadline = time.monotonic() + WRITING_S
    while not (text := path.read_text(encoding="utf-8")) and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        answer = json.loads(text)["answer"]
    except (ValueError, TypeError, KeyError):
        answer = None
    if not isinstance(answer, bool):
        raise ValueError(f"{path} has no answer to read: delete it, and it is measured again")
    return answer


def _this_machine() -> str:
    """A word for the processor and the libraries that compute on it."""
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.is_file() else []
    facts = sorted({line for line in lines if line.startswith(FACTS)})
    words = (platform.machine(), platform.processor(), *facts, torch.__version__)
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]
