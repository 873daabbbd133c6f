"""Which rows a step visits.

The order of an epoch is a pure function of (seed, epoch). The position in it is the set of visits already
consumed, not an offset: prompts that were in flight when a run ended are simply not in that set, so they are
visited again, and nothing is skipped or repeated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from strop.randomness import permutation, random_key

_VISIT_UID = re.compile(r"e(\d+)-(\d{6,})")


def visit_uid(epoch: int, row: int) -> str:
    """Id of the visit of a training row in an epoch: `e0-000017`."""
    return f"e{epoch}-{row:06d}"


def val_uid(row: int) -> str:
    """Id of a validation row: `val-000017`."""
    return f"val-{row:06d}"


def parse_visit_uid(uid: str) -> tuple[int, int]:
    """Epoch and row of a training visit; the inverse of `visit_uid`."""
    match = _VISIT_UID.fullmatch(uid)
    if match is None:
        raise ValueError(f"{uid!r} is no id of a training visit; those look like {visit_uid(0, 17)!r}")
    return int(match[1]), int(match[2])


class PromptSampler:
    """Hands out (epoch, row) visits, a step at a time, each row once per epoch.

    A step may cross the end of an epoch, so no row is dropped; only the last step of the last epoch is
    shorter than the others.

    Args:
        rows: row numbers to visit, without repeats (`PromptDataset.row_numbers`).
        prompts_per_step: visits per step.
        seed: seed of the run.
        shuffle: False visits the rows of every epoch in the order given.
        num_epochs: None goes on without end.
        chosen: the rows that an epoch visits, out of all; not given: all of them.
    """

    def __init__(
        self,
        rows: Sequence[int],
        prompts_per_step: int,
        seed: int,
        shuffle: bool = True,
        *,
        num_epochs: int | None = None,
        chosen: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        if len(rows) == 0:
            raise ValueError("a sampler needs at least one row; check the data files and the length filter")
        if len(set(rows)) != len(rows):
            raise ValueError("the rows of a sampler must not repeat; pass PromptDataset.row_numbers")
        if prompts_per_step < 1:
            raise ValueError(f"data.prompts_per_step is {prompts_per_step}; it must be at least 1")
        self._rows = np.asarray(rows, dtype=np.int64)  # [rows]
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._num_epochs = num_epochs
        self._rest_until: dict[int, tuple[int, int | None]] = {}
        self._chosen = (
            None if chosen is None else lru_cache(maxsize=4)(lambda epoch: frozenset(chosen(epoch)))
        )
        self._start({})

    def _start(self, consumed: dict[int, set[int]]) -> None:
        """Stand at the beginning of the first epoch that is not wholly consumed."""
        self._consumed = consumed
        self._epoch = 0
        while self._is_over(self._epoch, consumed.get(self._epoch, set())):
            del consumed[self._epoch]
            self._epoch += 1
        self._order = self.order(self._epoch)
        self._index = 0

    def _is_over(self, epoch: int, consumed: set[int]) -> bool:
        """Every row of the epoch was visited, or rests in it."""
        if len(consumed) == len(self._rows):
            return True
        return bool(consumed) and all(
            int(row) in consumed or self._rests(int(row), epoch) for row in self._rows
        )

    def order(self, epoch: int) -> list[int]:
        """The rows of an epoch in the order of their visits."""
        if not self._shuffle:
            return [int(row) for row in self._rows]
        key = random_key(self._seed, "prompt_order", epoch)
        return [int(row) for row in self._rows[permutation(key, len(self._rows))]]

    def next(self, count: int | None = None) -> list[tuple[int, int]]:
        """The (epoch, row) visits of the next step; shorter, then empty, when the last epoch is over.

        Args:
            count: how many; not given: prompts_per_step.

        Raises:
            ValueError: every row is retired.
        """
        wanted = self._prompts_per_step if count is None else count
        visits: list[tuple[int, int]] = []
        while len(visits) < wanted and not self.is_finished:
            row = self._order[self._index]
            if row not in self._consumed.get(self._epoch, ()) and not self._rests(row, self._epoch):
                visits.append((self._epoch, row))
            self._index += 1
            if self._index == len(self._order):
                self._check_some_left()
                self._consumed.pop(self._epoch, None)
                self._epoch += 1
                self._order = self.order(self._epoch)
                self._index = 0
        return visits

    def retire(self, row: int, epoch: int) -> None:
        """Do not visit this row in the epochs after this one: there is nothing left to learn from it."""
        self._rest_until[row] = (epoch, None)

    def defer(self, row: int, epoch: int, *, epochs: int) -> None:
        """Visit this row again only after resting this many epochs after this one."""
        if self._rest_until.get(row, (0, 0))[1] is not None:
            self._rest_until[row] = (epoch, epoch + epochs)

    def curriculum(self) -> dict[str, list[int | None]]:
        """Rows that rest, for the manifest of a checkpoint: row -> [epoch after which, last epoch of rest]."""
        return {str(row): list(rest) for row, rest in sorted(self._rest_until.items())}

    def _rests(self, row: int, epoch: int) -> bool:
        if self._chosen is not None and row not in self._chosen(epoch):
            return True
        since, until = self._rest_until.get(row, (epoch, epoch))
        return since < epoch and (until is None or epoch <= until)

    def _check_some_left(self) -> None:
        if all(self._rest_until.get(int(row), (0, 0))[1] is None for row in self._rows):
            raise ValueError(
                "every prompt was solved by all its samples and is retired, so there is nothing left to learn: use "
                "harder data, or set algorithm.filter_groups.retire_solved=false"
            )

    @property
    def epoch(self) -> int:
        """Epoch of the next visit, from 0."""
        return self._epoch

    @property
    def is_finished(self) -> bool:
        """True when every row was visited num_epochs times."""
        return self._num_epochs is not None and self._epoch >= self._num_epochs

    @property
    def num_steps(self) -> int | None:
        """Steps from the beginning to the end of the last epoch; None without num_epochs."""
        if self._num_epochs is None:
            return None
        if self._chosen is None:
            visits = self._num_epochs * len(self._rows)
        else:
            visits = sum(len(self._chosen(epoch)) for epoch in range(self._num_epochs))
        return -(-visits // self._prompts_per_step)

    def state(self) -> dict[str, int | bool | str]:
        """What the order depends on, for the manifest of a checkpoint; `restore` compares it."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "num_rows": len(self._rows),
            "rows_digest": hashlib.sha256(self._rows.astype("<i8").tobytes()).hexdigest()[:16],
        }

    def restore(
        self,
        consumed: Collection[str],
        state: Mapping[str, Any] | None = None,
        curriculum: Mapping[str, Sequence[int | None]] | None = None,
    ) -> None:
        """Continue after the visits in `consumed`: every other visit follows, in its order.

        Args:
            consumed: uids of all training visits that are done (`Ledger`).
            state: what `state` said when the checkpoint was written.
            curriculum: what `curriculum` said then.

        Raises:
            ValueError: `state` differs from this sampler's, or `consumed` names rows that it does not have.
        """
        if state is not None:
            self._check_same(state)
        self._rest_until = {
            int(row): (int(since or 0), until) for row, (since, until) in (curriculum or {}).items()
        }
        known = {int(row) for row in self._rows}
        by_epoch: dict[int, set[int]] = {}
        for uid in consumed:
            epoch, row = parse_visit_uid(uid)
            if row not in known:
                raise ValueError(
                    f"the run already trained on prompt {uid}, but row {row} is not among the {len(known)} "
                    f"rows read now; resume with the data files and data.max_prompt_tokens of the run"
                )
            by_epoch.setdefault(epoch, set()).add(row)
        self._start(by_epoch)

    def _check_same(self, state: Mapping[str, Any]) -> None:
        now = self.state()
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
