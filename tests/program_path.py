"""Folders that the Python programs which tests start import from."""

from __future__ import annotations

import os
from pathlib import Path


def python_path(*folders: str | Path) -> str:
    """A PYTHONPATH of these folders and, behind them, that of this process, where its own packages may lie."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])
