"""Reward functions that are given lists, and return one: TRL's, and those for whole batches.

    f(prompts, completions, **columns) -> list[float | None]                          TRL
    f(data_sources, solution_strs, ground_truths, extra_infos) -> list[float]         for batches

They are called for one sample at a time, with lists of one element. This module runs in the reward's worker processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.rewards.combining import Part
from strop.rewards.functions import SINGLE, BadReturnError, RewardFunction, check_supplied, shown


def called(function: RewardFunction, given: Mapping[str, Any]) -> Any:
    """What a function returns, called with those of these arguments that it takes."""
    taken = {name: one for name, one in given.items() if function.takes_any or name in function.parameters}
    return function.function(**taken, **function.kwargs)


@dataclass(frozen=True, kw_only=True)
class BatchFunction(RewardFunction):
    """A function for whole batches."""

    def __call__(self, call: Mapping[str, Any]) -> Any:
        return called(self, {f"{name}s": [call[name]] for name in SINGLE})

    def read(self, returned: Any) -> Part:
        """As RewardFunction, of the one element of a list."""
        return super().read(self.only(returned))

    def only(self, returned: Any) -> Any:
        """The one element of what it returned.

        Raises:
            BadReturnError: it is no list of one.
        """
        if not isinstance(returned, list | tuple) or len(returned) != 1:
            raise BadReturnError(
                f"{self.label} returned {shown(returned)} for one sample; this kind of function returns a list with "
                f"one score per sample"
            )
        return returned[0]


@dataclass(frozen=True, kw_only=True)
class TrlFunction(BatchFunction):
    """A function in TRL's form."""

    def __call__(self, call: Mapping[str, Any]) -> Any:
        given = {name: [value] for name, value in call["columns"].items()}
        given |= {name: [call[name]] for name in SINGLE if name not in given}
        given |= {"prompts": [call["prompt"]], "completions": [call["completion"]]}
        given["completion_ids"] = [call["completion_ids"]]
        if missing := self.required - given.keys() - self.kwargs.keys():
            raise TypeError(
                f"it needs {', '.join(sorted(missing))}, but the data has only the columns "
                f"{', '.join(sorted(call['columns']))}"
            )
        return called(self, given)

    def read(self, returned: Any) -> Part:
        """As BatchFunction; None is no score: the function does not apply to the sample."""
        score = self.only(returned)
        return self.part(None, {}) if score is None else RewardFunction.read(self, score)


def of_batches(
    function: Callable[..., Any], loaded: RewardFunction, setup: Mapping[str, Any]
) -> RewardFunction:
    """A loaded function for batches; arguments as of `strop.compat.query_rewards.of_queries`.

    Raises:
        LoadError: it asks for what it is not given.
    """
    check_supplied(loaded, [f"{name}s" for name in SINGLE])
    return BatchFunction(**vars(loaded))


def of_trl(function: Callable[..., Any], loaded: RewardFunction, setup: Mapping[str, Any]) -> RewardFunction:
    """A loaded function in TRL's form; arguments as there."""
    return TrlFunction(**{**vars(loaded), "wants_conversation": True})
