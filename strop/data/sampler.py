"""PromptSampler: the rows that a step visits.

The order of an epoch is a pure function of (seed, epoch), or, of a sampler that sees results (curriculum.py), of those
as well; such an order is part of a checkpoint. The position in it is the set of visits already consumed, not an
offset: prompts that were in flight when a run ended are simply not in that set, so they are visited again, and
nothing is skipped or repeated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from strop.data.curriculum import ORDERS, ResultsOrder, RowResult
from strop.data.visit_ids import parse_visit_uid

if TYPE_CHECKING:
    from strop.data.config import DataConfig
    from strop.protocol import DataProto


class Rest(NamedTuple):
    """Epochs in which a row is not visited."""

    since: int
    """The last one before."""
    until: int | None
    """The last one of them; None: it has no end."""


class PromptSampler:
    """Hands out (epoch, row) visits, a step at a time, each row once per epoch.

    A step may cross the end of an epoch, so no row is dropped; only the last step of the last epoch is
    shorter than the others.

    Args:
        rows: row numbers to visit, without repeats (`PromptDataset.row_numbers`).
        prompts_per_step: visits per step.
        seed: seed of the run.
        name: of the sampler that orders the rows of an epoch.
        num_epochs: None goes on without end.
        chosen: the rows that an epoch visits, out of all; not given: all of them.
        num_never: rows that no epoch visits.
        reorder_every: steps after which what is left of an epoch is ordered again; 0: never.
        data: the section data, for samplers that are classes.
        video_digest: digest of the video files of the rows; a run that goes on must find the same.
    """

    def __init__(
        self,
        rows: Sequence[int],
        prompts_per_step: int,
        seed: int,
        name: str = "shuffled",
        *,
        num_epochs: int | None = None,
        chosen: Callable[[int], Collection[int]] | None = None,
        num_never: int = 0,
        reorder_every: int = 0,
        data: DataConfig | None = None,
        video_digest: str = "",
    ) -> None:
        if len(rows) == 0:
            raise ValueError("a sampler needs at least one row; check the data files and the length filter")
        self._rows = np.asarray(rows, dtype=np.int64)  # [rows]
        if len(np.unique(self._rows)) != len(rows):
            raise ValueError("the rows of a sampler must not repeat; pass PromptDataset.row_numbers")
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1")
        self._prompts_per_step = prompts_per_step
        self._seed, self._video_digest = seed, video_digest
        self._name, self._reorder_every = name, reorder_every
        self._results_order: ResultsOrder | None = None if name in ORDERS else ResultsOrder(name, rows, data)
        self._num_epochs = num_epochs
        self._first_epoch: dict[int, int] = {}
        self._rests_of: dict[int, list[Rest]] = {}
        """By row, all its rests: which visits of an earlier epoch are missing is asked when a run goes on."""
        self._num_retired, self._num_never = 0, num_never
        self._least_steps = 0
        self._chosen = (
            None if chosen is None else lru_cache(maxsize=4)(lambda epoch: frozenset(chosen(epoch)))
        )
        self._start({})

    def _start(self, consumed: dict[int, set[int]]) -> None:
        """Start at the beginning of the first epoch that is not wholly consumed."""
        self._consumed = consumed
        self._epoch = 0
        while self._is_over(self._epoch, consumed.get(self._epoch, set())):
            del consumed[self._epoch]
            self._epoch += 1
        self._order: NDArray[np.int64] | None = None  # made when it is needed: by then the results are there
        self._index = 0

    def _is_over(self, epoch: int, consumed: set[int]) -> bool:
        """True if every row of the epoch was visited, or rests in it."""
        if len(consumed) == len(self._rows):
            return True
        return bool(consumed) and all(
            int(row) in consumed or self._rests(int(row), epoch) for row in self._rows
        )

    def order(self, epoch: int) -> list[int]:
        """The rows of an epoch in the order of their visits, by the results that are known now.

        Raises:
            ValueError: a sampler of the user's own returned something else than the rows.
        """
        return [int(row) for row in self._order_of(epoch)]

    def grow(self, rows: Sequence[int], *, first_epoch: int) -> None:
        """Add rows, which are visited from this epoch on.

        Raises:
            ValueError: the sampler is a class, which was made with the rows there were.
        """
        if self._results_order is not None and rows:
            self._results_order.check_growth()
        self._rows = np.concatenate([self._rows, np.asarray(rows, dtype=np.int64)])
        self._first_epoch |= dict.fromkeys(rows, first_epoch)
        if self._order is None or not first_epoch > self._epoch:
            self._order, self._index = None, 0

    @property
    def fresh_epoch(self) -> int:
        """The first epoch of which nothing was visited yet."""
        is_begun = self._index > 0 or bool(self._consumed.get(self._epoch))
        return self._epoch + is_begun

    def _rows_of(self, epoch: int) -> NDArray[np.int64]:
        """The rows that there are in an epoch."""
        if not self._first_epoch:
            return self._rows
        present = [int(row) for row in self._rows if self._first_epoch.get(int(row), 0) <= epoch]
        return np.asarray(present, dtype=np.int64)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        order = ORDERS[self._name] if self._results_order is None else self._results_order.order
        return order(self._rows_of(epoch), epoch=epoch, seed=self._seed)

    def next(self, count: int | None = None) -> list[tuple[int, int]]:
        """The (epoch, row) visits of the next step; shorter, then empty, when the last epoch is over, or every row is
        retired.

        Args:
            count: number of visits; not given: prompts_per_step.
        """
        num_visits = self._prompts_per_step if count is None else count
        visits: list[tuple[int, int]] = []
        while len(visits) < num_visits and not self.is_finished:
            if self._order is None:
                self._order = self._order_of(self._epoch)
            row = int(self._order[self._index])
            if row not in self._consumed.get(self._epoch, ()) and not self._rests(row, self._epoch):
                visits.append((self._epoch, row))
                if self._reorder_every:  # the position in an order says nothing about the next one
                    self._consumed.setdefault(self._epoch, set()).add(row)
            self._index += 1
            if self._index == len(self._order):
                self._consumed.pop(self._epoch, None)
                self._epoch += 1
                self._order, self._index = None, 0
        return visits

    @property
    def sees_results(self) -> bool:
        """True if the sampler uses the results of `record`."""
        return self._results_order is not None and self._results_order.sees_results

    @property
    def wants_batch(self) -> bool:
        """True if `record` needs the batch too."""
        return self._results_order is not None and self._results_order.wants_batch

    def record(self, step: int, results: Mapping[int, RowResult], batch: DataProto | None = None) -> None:
        """Record the results of a step.

        The sampler sees it when it orders the next epoch, or with `reorder_every` the rest of this one.

        Args:
            step: number of the step.
            results: of each row that has scored samples, with its visits in this step.
            batch: the samples with their numbers, for a sampler that is a class; None in a step without.
        """
        if self._results_order is not None:
            self._results_order.record(results, batch)
        if self._reorder_every and step % self._reorder_every == 0:
            self._order, self._index = None, 0

    def progress(self) -> dict[str, Any]:
        """State of a sampler that sees results, for the manifest of a checkpoint; empty of others."""
        state = {} if self._results_order is None else self._results_order.state()
        if not state:
            return {}
        order = None if self._order is None else self._order.tolist()
        return {**state, "epoch": self._epoch, "order": order}

    def retire(self, row: int, epoch: int) -> None:
        """Do not visit this row in the epochs after this one: there is nothing left to learn from it."""
        self._num_retired += not self._is_retired(row)
        self._rests_of.setdefault(row, []).append(Rest(epoch, None))

    def defer(self, row: int, epoch: int, *, epochs: int) -> None:
        """Visit this row again only after resting this many epochs after this one."""
        if not self._is_retired(row):
            self._rests_of.setdefault(row, []).append(Rest(epoch, epoch + epochs))

    def curriculum(self) -> dict[str, list[int | None]]:
        """Rows that rested or rest, for the manifest of a checkpoint: row -> epoch after which and last epoch of each
        rest, one rest after the other."""
        return {
            str(row): [number for rest in rests for number in rest]
            for row, rests in sorted(self._rests_of.items())
        }

    def _rests(self, row: int, epoch: int) -> bool:
        if self._first_epoch.get(row, 0) > epoch:
            return True
        if self._chosen is not None and row not in self._chosen(epoch):
            return True
        return any(
            since < epoch and (until is None or epoch <= until)
            for since, until in self._rests_of.get(row, ())
        )

    def _is_retired(self, row: int) -> bool:
        return any(rest.until is None for rest in self._rests_of.get(row, ()))

    @property
    def is_exhausted(self) -> bool:
        """True when every row that an epoch may visit is retired."""
        return self._num_retired + self._num_never == len(self._rows)

    @property
    def epoch(self) -> int:
        """Epoch of the next visit, from 0."""
        return self._epoch

    @property
    def is_finished(self) -> bool:
        """True when every row was visited num_epochs times, or is retired."""
        return self.is_exhausted or (self._num_epochs is not None and self._epoch >= self._num_epochs)

    @property
    def num_steps(self) -> int | None:
        """Steps from the beginning to the end of the last epoch; None without num_epochs.

        After `restore` at least the steps done and those that the visits left need: a run whose last step was a short
        one may go on for more epochs. Steps that took more visits than others change nothing about it, so that
        schedules of a continued run are those of the whole one.
        """
        if self._num_epochs is None:
            return None
        return max(self._steps_for(self._num_visits(0)), self._least_steps)

    def _num_visits(self, first_epoch: int) -> int:
        """Visits of the epochs from this one to the last."""
        assert self._num_epochs is not None, "asked for a run that ends"
        epochs = range(first_epoch, self._num_epochs)
        if self._chosen is None:
            return len(epochs) * len(self._rows)
        return sum(len(self._chosen(epoch)) for epoch in epochs)

    def _steps_for(self, visits: int) -> int:
        return -(-visits // self._prompts_per_step)

    def state(self) -> dict[str, int | bool | str]:
        """Settings that the order depends on, for the manifest of a checkpoint; `restore` compares them."""
        return {
            "seed": self._seed,
            "sampler": self._name,
            "reorder_every": self._reorder_every,
            "num_rows": len(self._rows),
            "rows_digest": hashlib.sha256(self._rows.astype("<i8").tobytes()).hexdigest()[:16],
            **({"films": self._video_digest} if self._video_digest else {}),
        }

    def restore(
        self,
        consumed: Collection[str],
        state: Mapping[str, Any] | None = None,
        curriculum: Mapping[str, Sequence[int | None]] | None = None,
        progress: Mapping[str, Any] | None = None,
        *,
        step: int = 0,
    ) -> None:
        """Continue after the visits in `consumed`: every other visit follows, in its order.

        Args:
            consumed: uids of all training visits that are done (`Ledger`).
            state: result of `state` when the checkpoint was written.
            curriculum: result of `curriculum` then.
            progress: result of `progress` then.
            step: the last one that was done.

        Raises:
            ValueError: `state` differs from this sampler's, or `consumed` names rows that it does not have.
        """
        if state is not None:
            self._check_same(state)
        self._rests_of = {
            int(row): [
                Rest(int(since or 0), until) for since, until in zip(numbers[::2], numbers[1::2], strict=True)
            ]
            for row, numbers in (curriculum or {}).items()
        }
        self._num_retired = sum(self._is_retired(row) for row in self._rests_of)
        visits = [parse_visit_uid(uid) for uid in consumed]
        are_known = np.isin(np.array([row for _, row in visits], dtype=np.int64), self._rows)
        by_epoch: dict[int, set[int]] = {}
        for (epoch, row), is_known, uid in zip(visits, are_known, consumed, strict=True):
            if not is_known:
                raise ValueError(
                    f"the run already trained on prompt {uid}, but row {row} is not among the {len(self._rows)} "
                    f"rows read now; resume with the data files and data.max_prompt_tokens of the run"
                )
            by_epoch.setdefault(epoch, set()).add(row)
        self._start(by_epoch)
        if self._num_epochs is not None:
            num_left = self._num_visits(self._epoch) - sum(len(rows) for rows in self._consumed.values())
            self._least_steps = step + self._steps_for(max(0, num_left))
        if progress:
            if self._results_order is not None:
                self._results_order.restore(progress)
            if progress["epoch"] == self._epoch and progress["order"] is not None:
                self._order = np.asarray(progress["order"], dtype=np.int64)

    def _check_same(self, state: Mapping[str, Any]) -> None:
        now = self.state()
        if now.pop("films", "") != state.get("films", ""):
            raise ValueError(
                "the video files that the rows name are not those of the run to resume, or other frames of them would "
                "be taken: put the files and the video settings of the model folder back"
            )
        changed = [
            f"{name} was {state.get(name)!r}, is {now[name]!r}"
            for name in now
            if state.get(name) != now[name]
        ]
        if changed:
            raise ValueError(
                f"the order of the prompts would differ from that of the run to resume: "
                f"{'; '.join(changed)}; use the run's own data files, data.* settings and seed"
            )
