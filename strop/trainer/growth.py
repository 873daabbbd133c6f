"""Rows that come while a run goes on: from a generator (data.datagen), or from a dataset class that hears of batches.

They are written to `grown.jsonl` of the run folder when they come, with the step and the epoch from which on they are
visited, so that a resume has them again and nothing is made twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from strop.base.foreign_files import lines_of, open_regular
from strop.base.metrics import Metric
from strop.data.growing import GrowingPrompts
from strop.protocol import DataProto
from strop.rewards.wire import decode, encode
from strop.run import RunError, RunFolder
from strop.run.durable import replace_text
from strop.run.folder import GROWN_FILE
from strop.trainer.setup import TrainingData

GROWN = Metric("training/grown_rows", "rows", "that `data.datagen` or `on_batch_end` added so far")


class Growth:
    """Adds rows to the training data of a run."""

    def __init__(self, data: TrainingData, run: RunFolder) -> None:
        self._data, self._path = data, run.path / GROWN_FILE
        self._source = data.growth
        self._num_added = 0

    def restore(self, step: int) -> None:
        """Add the rows that came up to this step, and forget those of later ones; call it before the sampler is
        restored.

        Raises:
            RunError: the file is damaged.
        """
        if self._source is None or not self._path.is_file():
            return
        kept: list[str] = []
        added: list[Mapping[str, Any]] = []
        with open_regular(self._path) as file:
            for number, line in enumerate(lines_of(file, self._path), start=1):
                if not line.endswith(b"\n"):  # an interrupted write
                    break
                try:
                    at, epoch, rows = decode(line)
                except ValueError as error:
                    raise RunError(f"line {number} of {self._path} is damaged: {error}") from error
                if at <= step:
                    self._add(rows, epoch)
                    added += rows
                    kept.append(line.decode("ascii"))
        replace_text(self._path, "".join(kept))
        self._source.restore(added)

    def begin(self) -> None:
        """The first rows, before the first step."""
        if self._source is not None and not self._num_added:
            self._take(0, self._source.new_rows(None))

    def after(self, step: int, batch: DataProto | None) -> dict[str, float]:
        """Rows that come after a step; a metric, where there may be some."""
        if self._source is None:
            return {}
        self._take(step, self._source.new_rows(batch))
        return {GROWN: float(self._num_added)}

    def _take(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        epoch = self._data.sampler.fresh_epoch
        plain = [dict(row) for row in rows]
        line = encode([step, epoch, plain])
        self._add(plain, epoch)
        try:
            with self._path.open("ab") as file:
                file.write(line)
        except OSError as error:
            raise RunError(
                f"cannot write {self._path}: {error.strerror}; free space, then continue with --resume"
            ) from error

    def _add(self, rows: Sequence[Mapping[str, Any]], epoch: int) -> None:
        train = self._data.train
        assert isinstance(train, GrowingPrompts), "made with the source of rows"
        self._data.sampler.grow(train.append(rows), first_epoch=epoch)
        self._num_added += len(rows)
