"""Reward functions that are given lists, and return one: TRL's, and those for whole batches.

    f(prompts, completions, **columns) -> list[float | None]                          TRL
    f(data_sources, solution_strs, ground_truths, extra_infos) -> list[float]         for batches

They are called once for all answers to a prompt, so that they can compare them; a list of numbers may also be an array
or a tensor. This module runs in the reward's worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from strop.rewards.combine import Part
from strop.rewards.functions import SINGLE, BadReturnError, RewardFunction, check_supplied, shown


def called(function: RewardFunction, given: Mapping[str, Any]) -> Any:
    """What a function returns, called with those of these arguments that it takes."""
    taken = {name: one for name, one in given.items() if function.takes_any or name in function.parameters}
    return function.function(**taken, **function.kwargs)


@dataclass(frozen=True, kw_only=True)
class BatchFunction(RewardFunction):
    """A function for whole batches."""

    takes_groups: ClassVar[bool] = True

    def call_all(self, calls: Sequence[Mapping[str, Any]]) -> Any:
        """What it returns for these calls, the answers to one prompt; possibly a coroutine."""
        return called(self, {f"{name}s": [call[name] for call in calls] for name in SINGLE})

    def read_all(self, returned: Any, count: int) -> list[Part | BadReturnError]:
        """Of each of so many answers, the part of what it returned, or why that is no reward.

        Raises:
            BadReturnError: it returned something else than one element for each.
        """
        made: list[Part | BadReturnError] = []
        for one in self.listed(returned, count):
            try:
                made.append(self.read_one(one))
            except BadReturnError as error:
                made.append(error)
        return made

    def read_one(self, element: Any) -> Part:
        """As RewardFunction.read, of an element of the list."""
        return RewardFunction.read(self, element)

    def __call__(self, call: Mapping[str, Any]) -> Any:
        return self.call_all([call])

    def read(self, returned: Any) -> Part:
        """As RewardFunction, of the one element of a list."""
        return self.read_one(self.listed(returned, 1)[0])

    def listed(self, returned: Any, count: int) -> list[Any]:
        """The elements of what it returned for so many answers: a list, an array, a tensor, a column.

        Raises:
            BadReturnError: it is none of these, or has another number of elements.
        """
        found = returned.tolist() if hasattr(returned, "tolist") else returned
        if isinstance(found, list | tuple) and len(found) == count:
            is_column = found is not returned
            return [_alone(one) if is_column or hasattr(one, "tolist") else one for one in found]
        for_all = "one sample" if count == 1 else f"{count} samples"
        raise BadReturnError(
            f"{self.label} returned {shown(returned)} for {for_all}; this kind of function returns a list with "
            f"one score per sample"
        )


def _alone(element: Any) -> Any:
    """The one number of a row of a column, or of a tensor of one element."""
    found = element.tolist() if hasattr(element, "tolist") else element
    return found[0] if isinstance(found, list) and len(found) == 1 else found


@dataclass(frozen=True, kw_only=True)
class TrlFunction(BatchFunction):
    """A function in TRL's form."""

    def call_all(self, calls: Sequence[Mapping[str, Any]]) -> Any:
        """As BatchFunction."""
        columns = calls[0]["columns"]
        given = {name: [call["columns"][name] for call in calls] for name in columns}
        given |= {name: [call[name] for call in calls] for name in SINGLE if name not in given}
        given |= {f"{name}s": [call[name] for call in calls] for name in ("prompt", "completion")}
        given["completion_ids"] = [call["completion_ids"] for call in calls]
        if missing := self.required - given.keys() - self.kwargs.keys():
            raise TypeError(
                f"it needs {', '.join(sorted(missing))}, but the data has only the columns "
                f"{', '.join(sorted(columns))}"
            )
        return called(self, given)

    def read_one(self, element: Any) -> Part:
        """As BatchFunction; None is no score: the function does not apply to the sample."""
        return self.part(None, {}) if element is None else RewardFunction.read(self, element)


def of_batches(
    function: Callable[..., Any], loaded: RewardFunction, setup: Mapping[str, Any]
) -> RewardFunction:
    """A loaded function for batches; arguments as of `strop.rewards.query_functions.of_queries`.

    Raises:
        LoadError: it asks for what it is not given.
    """
    check_supplied(loaded, [f"{name}s" for name in SINGLE])
    return BatchFunction(**vars(loaded))


def of_trl(function: Callable[..., Any], loaded: RewardFunction, setup: Mapping[str, Any]) -> RewardFunction:
    """A loaded function in TRL's form; arguments as there."""
    return TrlFunction(**{**vars(loaded), "wants_conversation": True})
