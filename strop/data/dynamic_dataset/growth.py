"""Rows that come while a run goes on, from a generator or from a dataset class that hears of batches.

They are written to `grown.jsonl` of the run folder when they come, with the step and the epoch from which on they are
visited, so that a resume has them again and nothing is made twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from strop.config.sections import where_on
from strop.data.config import DataConfig
from strop.data.data_generator import GeneratedRows
from strop.data.dataset_class import CustomRows
from strop.data.dynamic_dataset.prompts import GrowingPrompts
from strop.data.prompts import PromptDataset
from strop.data.sampler import PromptSampler
from strop.protocol import DataProto
from strop.run import RunError, RunFolder
from strop.run.folder import GROWN_FILE
from strop.utils.atomic_io import append_line, replace_text, whole_lines
from strop.utils.json_lines import decode, encode
from strop.utils.metrics import Metric

GROWN = Metric("training/grown_rows", "rows", "that `data.datagen` or `on_batch_end` added so far")


class RowSource(Protocol):
    """Gives rows while a run goes on."""

    def restore(self, added: Sequence[Mapping[str, Any]]) -> None:
        """Restore rows that were added earlier."""

    def new_rows(self, batch: DataProto | None) -> Sequence[Mapping[str, Any]]:
        """The next rows, after a step with these samples; None before the first one."""


def adds_rows(data: DataConfig, rows: Sequence[Mapping[str, Any]]) -> bool:
    """True if rows may be added to these while the run goes on."""
    return where_on(data.datagen) is not None or (isinstance(rows, CustomRows) and rows.wants_batches)


class Growth:
    """Adds rows to the training data of a run."""

    def __init__(
        self,
        data: DataConfig,
        rows: Sequence[Mapping[str, Any]],
        first: PromptDataset,
        tokenizer: PreTrainedTokenizerBase,
        prepare: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]],
        *,
        max_steps: int | None,
    ) -> None:
        """Make the source of rows.

        Args:
            data: settings.
            rows: of the files; where data.datagen is not set, an object that gives more of them.
            first: their prompts.
            tokenizer: of all prompts.
            prepare: applied to rows before, such as naming their agents.
            max_steps: of the run.

        Raises:
            ValueError: the class of data.datagen cannot be used, rows come from two sources, or nobody knows how many
                steps they make.
        """
        maker, of_class = where_on(data.datagen), where_on(data.dataset_class)
        custom = rows if isinstance(rows, CustomRows) and rows.wants_batches else None
        if maker is not None and custom is not None:
            raise ValueError(
                "data.datagen and a dataset class with on_batch_end both add rows: use one of the two"
            )
        if max_steps is None and of_class is not None:
            raise ValueError(
                f"data.dataset_class {of_class.name} has on_batch_end, which may add rows, so epochs do not "
                f"tell how many steps there are: set trainer.max_steps"
            )
        if maker is not None:
            self._source: RowSource = GeneratedRows(maker, rows)
        else:
            assert custom is not None, "rows are added by data.datagen or by a dataset class"
            self._source = custom
        self.prompts = GrowingPrompts(first, tokenizer, data, prepare)
        self._num_added = 0

    def restore(self, run: RunFolder, step: int, sampler: PromptSampler) -> None:
        """Add the rows that came up to this step, and forget those of later ones; call it before the sampler is
        restored, and before anything else.

        Args:
            run: the folder of the run.
            step: that it goes on from; 0 at its beginning.
            sampler: of the run.

        Raises:
            RunError: the file is damaged.
        """
        self._path, self._sampler = run.path / GROWN_FILE, sampler
        if not self._path.is_file():
            return
        lines: list[str] = []
        added: list[Mapping[str, Any]] = []
        for number, line in enumerate(whole_lines(self._path), start=1):
            try:
                at, epoch, rows = decode(line)
            except ValueError as error:
                raise RunError(f"line {number} of {self._path} is damaged: {error}") from error
            if at <= step:
                self._add(rows, epoch)
                added += rows
                lines.append(line.decode("ascii"))
        replace_text(self._path, "".join(lines))
        self._source.restore(added)

    def begin(self) -> None:
        """Add the first rows, before the first step."""
        if not self._num_added:
            self._take(0, self._source.new_rows(None))

    def after(self, step: int, batch: DataProto | None) -> dict[str, float]:
        """Add the rows that come after a step; returns a metric."""
        self._take(step, self._source.new_rows(batch))
        return {GROWN: float(self._num_added)}

    def _take(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if not rows:
            return
        epoch = self._sampler.fresh_epoch
        plain = [dict(row) for row in rows]
        line = encode([step, epoch, plain])
        self._add(plain, epoch)
        try:
            with self._path.open("ab", buffering=0) as file:
                append_line(file, line)
        except OSError as error:
            raise RunError(
                f"cannot write {self._path}: {error.strerror}; free space, then continue with --resume"
            ) from error

    def _add(self, rows: Sequence[Mapping[str, Any]], epoch: int) -> None:
        self._sampler.grow(self.prompts.append(rows), first_epoch=epoch)
        self._num_added += len(rows)
