"""Choices that a measurement makes once for a machine, so that every process of it, and a resumed run, has the same."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from strop.utils.c_library import cache_folder

logger = logging.getLogger(__name__)

CPU_INFO = Path("/proc/cpuinfo")


def machine_choice(name: str, measured: Callable[[], bool]) -> bool:
    """The answer that was measured on this machine before; else it is measured, and kept in the user's cache.

    Of processes that measure at the same time the first to be done decides for all. Where nothing can be kept, each
    process goes by its own measurement.

    Args:
        name: of the choice; a part of a file's name.
        measured: takes the measurement.

    Raises:
        ValueError: the file in the cache is not one of these.
    """
    try:
        path = cache_folder() / f"{name}-{_this_machine()}.json"
        if not path.is_file():
            _keep(path, measured())
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        logger.warning(
            "the choice of %s is not kept, and may be another one in another process: %s", name, error
        )
        return measured()
    try:
        answer = json.loads(text)["answer"]
    except (ValueError, TypeError, KeyError):
        answer = None
    if not isinstance(answer, bool):
        raise ValueError(f"{path} has no answer to read: delete it, and it is measured again")
    return answer


def _keep(path: Path, answer: bool) -> None:
    """Write the file whole, unless another process was faster."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        whole.write_text(json.dumps({"answer": answer}), encoding="utf-8")
        try:
            os.link(whole, path)
        except FileExistsError:
            return


def _this_machine() -> str:
    """A word for the processor and the libraries that compute on it."""
    lines = (
        CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.is_file() else [platform.processor()]
    )
    facts = sorted({line for line in lines if line.startswith(("vendor_id", "model", "cpu family", "flags"))})
    return hashlib.sha256("\n".join([*facts, torch.__version__]).encode()).hexdigest()[:16]
