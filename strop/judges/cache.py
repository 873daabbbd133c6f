"""Answers of a service on disk, by request: one small JSON file each.

A key is the SHA-256 of the address and the whole request, so that any change of model, prompt or setting asks anew. The
key of the service is not part of it, and is written nowhere. Files appear whole or not at all, so several processes
may share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from strop.border import read_json


class AnswerCache:
    """The answers in one folder; without a folder, nothing is kept."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser() if folder else None

    def key(self, url: str, body: bytes) -> str:
        """Name of the answer to a request."""
        return hashlib.sha256(url.encode() + b"\0" + body).hexdigest()

    def get(self, key: str) -> Any:
        """The answer; None where there is none, or its file is damaged."""
        if self._folder is None:
            return None
        try:
            return read_json(self._path(self._folder, key).read_bytes())
        except (OSError, ValueError):
            return None

    def put(self, key: str, answer: Any) -> None:
        """Keep an answer. A full or read-only disk costs repeats of the request, not the run."""
        if self._folder is None:
            return
        path = self._path(self._folder, key)
        temporary = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(answer), encoding="utf-8")
            temporary.replace(path)

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"
