"""Orders of the rows of an epoch (data.sampler): shuffled, by results, and those of a user's own.

A sampler is a pure function, called with what it has parameters for:

    order(rows, results, *, epoch, seed) -> the same rows, in the order of their visits

`results` holds what came of the rows so far (`RowResult`, by row number; rows that were never scored are not in
it). It is recorded by the trainer and part of every checkpoint, so a resumed run goes on in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from strop.utils.registry import Registry, dotted, required_parameters
from strop.utils.rng import permutation, random_key

if TYPE_CHECKING:
    from strop.data.config import DataConfig
    from strop.data.sampler_class import VerlSampler
    from strop.protocol import DataProto

Rows = Sequence[int] | NDArray[np.int64]
"""Row numbers."""
Sampler = Callable[..., Rows]
"""See the module."""
F = TypeVar("F", bound=Sampler)

OFFERED = ("rows", "results", "epoch", "seed")
"""Keyword arguments of a sampler, passed where it has a parameter of the name."""

SAMPLERS: Registry[Sampler] = Registry("sampler", group="strop.samplers")

UNKNOWN_PASS_RATE = 0.5
"""Of a row that was never scored: in the middle between easy and hard."""


def shuffled(rows: Rows, *, epoch: int, seed: int) -> NDArray[np.int64]:
    """An order drawn from the seed, another one in each epoch."""
    return np.asarray(rows)[permutation(random_key(seed, "prompt_order", epoch), len(rows))]


def in_order(rows: Rows, *, epoch: int, seed: int) -> NDArray[np.int64]:
    """The order of the files."""
    return np.asarray(rows)


ORDERS: dict[str, Callable[..., NDArray[np.int64]]] = {"shuffled": shuffled, "in_order": in_order}
"""Values of data.sampler that look at no results."""


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """Result of a row of the training data at its last visit."""

    visits: int
    """Visits with at least one scored sample, over the whole run."""
    mean_score: float
    """Mean score of the samples of the last one."""
    pass_rate: float
    """Share of them that passed; their mean score where nothing decides which samples pass."""
    last_step: int
    """Step of that visit."""


def register_sampler(name: str) -> Callable[[F], F]:
    """A decorator that makes a function, or a class in verl's form (`strop.data.sampler_class`), available as
    data.sampler=name.

    Raises:
        ValueError: the name is taken, the function requires something that nobody gives it, or the class has a state
            that no checkpoint can hold.
    """

    def add(function: F) -> F:
        if isinstance(function, type):
            from strop.data.sampler_class import check_sampler_class  # torch: seconds

            check_sampler_class(name, function)
            SAMPLERS.register(name)(function)
            return function
        required = required_parameters(function)
        unknown = [parameter for parameter in required if parameter not in OFFERED]
        if unknown or "rows" not in required:
            raise ValueError(
                f"sampler {name!r}: {dotted(function)} has the parameters {', '.join(required) or 'none'}, but a "
                f"sampler is order(rows, results, *, epoch, seed); results, epoch and seed may be left out"
            )
        SAMPLERS.register(name)(function)
        return function

    return add


class ResultsOrder:
    """The order of one sampler in a run, where it follows from results or is a user's own."""

    def __init__(self, name: str, rows: Sequence[int], data: DataConfig | None) -> None:
        """Args:
        name: of the sampler.
        rows: row numbers of the training prompts.
        data: the section data.

        Raises:
            ValueError: there is no such sampler.
        """
        function: Any = SAMPLERS[name]
        self._name, self._rows = name, np.asarray(rows, dtype=np.int64)
        self._results: dict[int, RowResult] = {}
        self._object: VerlSampler | None = None
        if isinstance(function, type):
            from strop.data.sampler_class import VerlSampler  # torch: seconds

            assert data is not None, "a sampler that is a class is made with the section data"
            self._object = VerlSampler(name, function, rows, data)
        self.sees_results = sees_results(name)

    @property
    def wants_batch(self) -> bool:
        """True if the sampler is a class that learns from batches."""
        return self._object is not None and self._object.learns

    def check_growth(self) -> None:
        """Refuse rows beside those it was made with.

        Raises:
            ValueError: it is a class.
        """
        if self._object is not None:
            raise ValueError(
                f"data.sampler={self._name} is a class that was made with the rows there were at the start, and rows "
                f"were added: use another sampler with data.datagen or on_batch_end"
            )

    def order(self, rows: NDArray[np.int64], *, epoch: int, seed: int) -> NDArray[np.int64]:
        """The rows of an epoch, by the results that are known now.

        Raises:
            ValueError: what the user's own gave is no order of them.
        """
        if self._object is None:
            return ordered_rows(self._name, rows, self._results, epoch=epoch, seed=seed)
        return self._rows[check_order(self._name, np.arange(len(self._rows)), self._object.positions())]

    def record(self, results: Mapping[int, RowResult], batch: DataProto | None) -> None:
        """Record the results of a step; arguments as of `PromptSampler.record`."""
        if self._object is not None and batch is not None:
            self._object.update(batch)
        for row, result in results.items():
            before = self._results[row].visits if row in self._results else 0
            self._results[row] = replace(result, visits=before + result.visits)

    def state(self) -> dict[str, Any]:
        """State that the next order depends on, for the manifest of a checkpoint."""
        if not self.sees_results and self._object is None:
            return {}
        object_state = None if self._object is None else self._object.state()
        results = {str(row): list(astuple(result)) for row, result in sorted(self._results.items())}
        return {"results": results, "own": object_state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore such a state."""
        self._results = {
            int(row): RowResult(visits=int(visits), mean_score=score, pass_rate=rate, last_step=int(step))
            for row, (visits, score, rate, step) in state["results"].items()
        }
        if self._object is not None:
            self._object.restore(state["own"])


def is_sampler(name: str) -> bool:
    """True if there is a sampler of this name, built in or registered in this process."""
    return name in ORDERS or name in SAMPLERS


def sees_results(name: str) -> bool:
    """True if the sampler has a parameter for results, or is a class with a method `update`.

    Raises:
        ValueError: there is no such sampler.
    """
    function = SAMPLERS[name]
    if isinstance(function, type):
        return hasattr(function, "update")
    return "results" in inspect.signature(function).parameters


def ordered_rows(
    name: str, rows: NDArray[np.int64], results: Mapping[int, RowResult], *, epoch: int, seed: int
) -> NDArray[np.int64]:
    """The rows in the order that the sampler gives them: [rows] int64.

    A sampler that sees results gets a list of rows, and a copy of the results; another one the array, which is a tenth
    as large.

    Raises:
        ValueError: there is no such sampler, or it returned something else than these rows.
    """
    function = SAMPLERS[name]
    parameters = inspect.signature(function).parameters
    offered: dict[str, object] = {"rows": rows, "epoch": epoch, "seed": seed}
    if "results" in parameters:
        offered |= {"rows": rows.tolist(), "results": dict(results)}
    order: object = function(**{key: value for key, value in offered.items() if key in parameters})
    return check_order(name, rows, order)


def check_order(name: str, rows: NDArray[np.int64], order: object) -> NDArray[np.int64]:
    """Validate the order that a sampler returned, and convert it to an array.

    Raises:
        ValueError: it is none.
    """
    function = SAMPLERS[name]
    if not isinstance(order, Sequence | np.ndarray):
        raise ValueError(
            f"sampler {name!r}: {dotted(function)} returned a {type(order).__name__}, but a sampler returns a "
            f"sequence with the {len(rows)} rows"
        )
    numbers = np.asarray(order)
    if numbers.dtype.kind not in "iu" or not np.array_equal(np.sort(numbers, axis=None), np.sort(rows)):
        strange = np.setdiff1d(numbers, rows).tolist()
        example = f", among them {strange[0]!r}, which is none of them" if strange else ""
        raise ValueError(
            f"sampler {name!r}: {dotted(function)} returned {numbers.size} entries{example}, but a sampler returns "
            f"each of the {len(rows)} rows once; use algorithm.filter_groups to leave prompts out"
        )
    return numbers.astype(np.int64)


for _name, _order in ORDERS.items():
    register_sampler(_name)(_order)


@register_sampler("easy_first")
def easy_first(rows: Rows, results: Mapping[int, RowResult], *, epoch: int, seed: int) -> Rows:
    """Rows that passed most often at their last visit first, shuffled where equal."""
    return sorted(shuffled(rows, epoch=epoch, seed=seed).tolist(), key=lambda row: -_pass_rate(results, row))


@register_sampler("hard_first")
def hard_first(rows: Rows, results: Mapping[int, RowResult], *, epoch: int, seed: int) -> Rows:
    """Rows that passed least often at their last visit first, shuffled where equal."""
    return sorted(shuffled(rows, epoch=epoch, seed=seed).tolist(), key=lambda row: _pass_rate(results, row))


@register_sampler("near_half")
def near_half(rows: Rows, results: Mapping[int, RowResult], *, epoch: int, seed: int) -> Rows:
    """Rows first of which about half of the samples passed at their last visit, which teach most, and rows that were
    never scored; shuffled where equal."""
    return sorted(
        shuffled(rows, epoch=epoch, seed=seed).tolist(), key=lambda row: abs(_pass_rate(results, row) - 0.5)
    )


def _pass_rate(results: Mapping[int, RowResult], row: int) -> float:
    return results[row].pass_rate if row in results else UNKNOWN_PASS_RATE
