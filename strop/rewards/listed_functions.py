"""Reward functions over lists of answers: TRL's, and those for whole batches.

    f(prompts, completions, **columns) -> list[float | None]                          TRL
    f(data_sources, solution_strs, ground_truths, extra_infos) -> list[float]         for batches

TRL's functions are also given `log_extra(name, values)`, one value per answer, and `log_metric(name, value)`, one
number of the call: both become parts of the reward.

They are called once for all answers to a prompt, so that they can compare them; a list of numbers may also be an array
or a tensor. This module runs in the reward's worker processes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from strop.rewards.combine import Part
from strop.rewards.functions import (
    SINGLE,
    BadReturnError,
    RewardFunction,
    check_supplied,
    read_part,
    shown,
)
from strop.rewards.outcome import Value


def call_with_accepted(function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
    """Call a function with those of these arguments that it takes."""
    accepted = {
        name: value for name, value in arguments.items() if function.takes_any or name in function.parameters
    }
    return function.function(**accepted, **function.kwargs)


@dataclass(frozen=True, kw_only=True)
class BatchFunction(RewardFunction):
    """A function for whole batches."""

    takes_groups: ClassVar[bool] = True

    def call_all(self, calls: Sequence[Mapping[str, Any]]) -> Any:
        """Call the function with the answers to one prompt; the result may be a coroutine."""
        return call_with_accepted(self, {f"{name}s": [call[name] for call in calls] for name in SINGLE})

    def read_all(self, returned: object, count: int) -> list[Part | BadReturnError]:
        """Part of each of `count` answers, or the reason why what was returned for it is no reward.

        Raises:
            BadReturnError: it returned something else than one element for each.
        """
        parts: list[Part | BadReturnError] = []
        for element in self.elements(returned, count):
            try:
                parts.append(self.read_one(element))
            except BadReturnError as error:
                parts.append(error)
        return parts

    def read_one(self, element: object) -> Part:
        """Read one element of the list, as RewardFunction.read."""
        return RewardFunction.read(self, element)

    def __call__(self, call: Mapping[str, Any]) -> Any:
        return self.call_all([call])

    def read(self, returned: object) -> Part:
        """Read a list of one element."""
        return self.read_one(self.elements(returned, 1)[0])

    def elements(self, returned: object, count: int) -> list[Any]:
        """The elements of what it returned for so many answers: a list, an array, a tensor, a column.

        Raises:
            BadReturnError: it is none of these, or has another number of elements.
        """
        values = returned.tolist() if hasattr(returned, "tolist") else returned
        if isinstance(values, list | tuple) and len(values) == count:
            is_column = values is not returned
            return [_scalar(value) if is_column or hasattr(value, "tolist") else value for value in values]
        for_all = "one sample" if count == 1 else f"{count} samples"
        raise BadReturnError(
            f"{self.label} returned {shown(returned)} for {for_all}; this kind of function returns a list with "
            f"one score per sample"
        )


def _scalar(element: object) -> Any:
    """The one number of a row of a column, or of a tensor of one element."""
    value = element.tolist() if hasattr(element, "tolist") else element
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class _Log:
    """Parts that one call of a function logs, by answer."""

    def __init__(self, count: int) -> None:
        self.parts: list[dict[str, Value]] = [{} for _ in range(count)]

    def extra(self, name: str, values: Sequence[object]) -> None:
        """Log one value per answer."""
        if len(values) != len(self.parts):
            raise ValueError(
                f"log_extra({name!r}, ...) has {len(values)} values for {len(self.parts)} answers; give one for each"
            )
        for parts, value in zip(self.parts, values, strict=True):
            if value is not None:
                parts[str(name)] = read_part(value)

    def metric(self, name: str, value: object) -> None:
        """Log one number of the call, under a name that is no verdict on an answer (`acc`)."""
        for parts in self.parts:
            parts[f"metric/{name}"] = read_part(value)


@dataclass(frozen=True, kw_only=True)
class _Logged:
    """A returned value, and the log of the call."""

    value: object
    log: _Log


@dataclass(frozen=True, kw_only=True)
class TrlFunction(BatchFunction):
    """A function in TRL's form."""

    def call_all(self, calls: Sequence[Mapping[str, Any]]) -> Any:
        """Call the function with prompts, completions and the columns of the rows."""
        log = _Log(len(calls))
        columns = calls[0]["columns"]
        arguments: dict[str, Any] = {name: [call["columns"][name] for call in calls] for name in columns}
        arguments |= {name: [call[name] for call in calls] for name in SINGLE if name not in arguments}
        arguments |= {f"{name}s": [call[name] for call in calls] for name in ("prompt", "completion")}
        arguments["completion_ids"] = [call["completion_ids"] for call in calls]
        arguments |= {"log_extra": log.extra, "log_metric": log.metric}
        if missing := self.required - arguments.keys() - self.kwargs.keys():
            raise TypeError(
                f"it needs {', '.join(sorted(missing))}, but the data has only the columns "
                f"{', '.join(sorted(columns))}{_OF_TRL if missing & _NOT_PASSED else ''}"
            )
        returned = call_with_accepted(self, arguments)
        if not inspect.isawaitable(returned):
            return _Logged(value=returned, log=log)

        async def wait() -> _Logged:
            return _Logged(value=await returned, log=log)

        return wait()

    def elements(self, returned: object, count: int) -> list[Any]:
        """Pairs of what it returned for an answer and the parts that it logged of it.

        Raises:
            BadReturnError: as for batches.
        """
        assert isinstance(returned, _Logged), "call_all returns it"
        return list(zip(super().elements(returned.value, count), returned.log.parts, strict=True))

    def read_one(self, element: object) -> Part:
        """Read one pair; None is no score: the function does not apply to the sample."""
        assert isinstance(element, tuple), "elements are pairs"
        value, logged = element
        if value is None:
            return self.part(None, {})
        part = RewardFunction.read(self, value)
        return replace(part, parts={**logged, **part.parts})


_NOT_PASSED = frozenset({"trainer_state", "environments"})
_OF_TRL = (
    "; TRL passes its trainer and environments, strop does not: give the parameter a default, or leave it out"
)


def of_batches(loaded: RewardFunction, setup: Mapping[str, Any]) -> RewardFunction:
    """A loaded function for batches; arguments as of `strop.rewards.query_functions.of_queries`.

    Raises:
        LoadError: it asks for what it is not given.
    """
    check_supplied(loaded, [f"{name}s" for name in SINGLE])
    return BatchFunction(**vars(loaded))


def of_trl(loaded: RewardFunction, setup: Mapping[str, Any]) -> RewardFunction:
    """A loaded function in TRL's form; arguments as there."""
    return TrlFunction(**{**vars(loaded), "wants_conversation": True})
