"""Which run a folder of the command line stands for."""

from __future__ import annotations

import contextlib
from pathlib import Path

from strop.cli.output import UsageError, say
from strop.run import is_run


def run_in(folder: Path) -> Path:
    """The folder itself, or the run right inside it where that is the only one: quickstart's --out holds runs.

    Raises:
        UsageError: it is no run and holds several; the sentence names them.
    """
    if is_run(folder):
        return folder
    runs: list[Path] = []
    with contextlib.suppress(OSError):  # who opens it says why it cannot be read
        runs = sorted(entry for entry in folder.iterdir() if is_run(entry))
    if len(runs) > 1:
        raise UsageError(
            f"{folder} is no run, but holds {len(runs)}: name one, {' or '.join(map(str, runs))}"
        )
    if not runs:
        return folder
    say(f"the run in {folder}: {runs[0]}")
    return runs[0]
