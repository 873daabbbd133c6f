"""The runs that the page shows: found again when it asks, and their records read on."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

from strop.observability.viewer.page.texts import Decode, decode_of
from strop.observability.viewer.records import RunRecords
from strop.observability.viewer.summary import find_runs
from strop.run import RunError


class UnknownRun(LookupError):
    """The page asks for a run that is not shown."""


class Catalog:
    """Runs by the id that addresses have for them.

    Concurrency: answers are worked out in several threads; one at a time reads on.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Args:
        paths: run folders, and folders of runs, in which new ones appear while the page is open.
        """
        self._paths = paths
        self._lock = threading.Lock()
        self._runs: dict[str, RunRecords] = {}
        self._decoders: dict[Path, Decode | None] = {}
        self.unreadable: dict[str, str] = {}
        """Reasons for which runs are not shown, by their paths."""

    def runs(self) -> dict[str, RunRecords]:
        """All of them as they stand now, the newest first."""
        with self._lock:
            runs_by_id: dict[str, RunRecords] = {}
            self.unreadable = {}
            for path in reversed(find_runs(self._paths)):
                name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
                try:
                    records = self._runs.get(name) or RunRecords(path)
                    records.read_on()
                except RunError as error:
                    self.unreadable[str(path)] = str(error)
                    continue
                runs_by_id[name] = records
            self._runs = runs_by_id
            return runs_by_id

    def run(self, name: str) -> RunRecords:
        """One of them, as it stands now.

        Raises:
            UnknownRun: there is none.
        """
        with self._lock:
            records = self._runs.get(name)
            if records is not None:
                records.read_on()
                return records
        records = self.runs().get(name)
        if records is None:
            raise UnknownRun(f"no run {name} is shown here (any more)")
        return records

    def decode_of(self, run: RunRecords) -> Decode | None:
        """Tokens of a run as text; None where its tokenizer is not here any more."""
        with self._lock:
            if run.path not in self._decoders:
                self._decoders[run.path] = decode_of(run)
            return self._decoders[run.path]
