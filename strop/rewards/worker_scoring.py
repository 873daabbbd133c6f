"""Scoring of one sample, or of all answers to a prompt, in a worker process: the functions are called one after the
other, and whatever one of them raises becomes an outcome.

`Scoring` leaves the calls themselves to its `invoke`: `invoke_now` where samples are scored one at a time, and that of
strop.rewards.worker_coroutines where several are under way.
"""

from __future__ import annotations

import contextlib
import inspect
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from strop.rewards.combine import Part, combine, combined_token_rewards
from strop.rewards.functions import BadReturnError, RewardFunction, describe
from strop.rewards.outages import is_outage
from strop.rewards.outcome import Outcome
from strop.rewards.wire import MAX_PARTS_BYTES
from strop.utils.sanitize import usable
from strop.utils.sanitize.values import MAX_NUMBER

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
Invoke = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function, and waits for its value where that is a coroutine."""
MAX_ERROR_CHARACTERS = 2000
"""Of the text of an exception, which may hold the whole answer."""
_MAX_GROUPS = 10
"""Exception groups within each other that are looked into."""


@cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Event loop for coroutines that are awaited one at a time."""
    import asyncio  # half of what a process would import otherwise

    return asyncio.new_event_loop()


async def invoke_now(work: Callable[[], Any]) -> Any:
    """The value of a function, awaited in a loop of its own where it is a coroutine. It never suspends (`run_now`)."""
    returned = work()
    return _event_loop().run_until_complete(awaited(returned)) if inspect.isawaitable(returned) else returned


async def awaited(returned: Awaitable[Any]) -> Any:
    """The value of an awaitable of any kind, as a coroutine."""
    return await returned


def run_now(work: Awaitable[T]) -> T:
    """The result of work that never suspends, without an event loop."""
    try:
        work.__await__().__next__()
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("what invoke_now calls never suspends")


class OutOfMemory(Exception):
    """Memory ran out, as the text says: what filled it may still be there, so the process should be replaced."""


class Scoring:
    """The reward functions of a worker process, called one after the other."""

    def __init__(self, functions: Sequence[RewardFunction], invoke: Invoke) -> None:
        self.functions, self._invoke = functions, invoke

    async def score(self, call: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Outcome | list[Outcome]:
        """The outcome of a sample, or those of all answers to a prompt; a single one where a function that takes groups
        failed as a whole.

        Raises:
            OutOfMemory: a function has used it up.
        """
        return await (self._score_one(call) if isinstance(call, Mapping) else self._score_all(call))

    async def _score_one(self, arguments: Mapping[str, Any]) -> Outcome:
        """Call the functions; the first that fails decides."""
        parts: list[Part] = []
        for function in self.functions:
            part = await _guarded(function, partial(self._read_one, function, arguments))
            if isinstance(part, Outcome):
                return part
            parts.append(part)
        return _combined(self.functions, parts, arguments)

    async def _score_all(self, calls: Sequence[Mapping[str, Any]]) -> Outcome | list[Outcome]:
        """Call the functions that take groups with all answers at once, and the others for each."""
        group_parts: list[list[Part | BadReturnError] | None] = []
        for function in self.functions:
            if not function.takes_groups:
                group_parts.append(None)
                continue
            parts = await _guarded(function, partial(self._read_all, function, calls))
            if isinstance(parts, Outcome):
                return parts
            group_parts.append(parts)
        return [await self._outcome_in_group(group_parts, index, call) for index, call in enumerate(calls)]

    async def _read_all(
        self, function: RewardFunction, calls: Sequence[Mapping[str, Any]]
    ) -> list[Part | BadReturnError]:
        return function.read_all(await self._invoke(partial(function.call_all, calls)), len(calls))

    async def _read_one(self, function: RewardFunction, call: Mapping[str, Any]) -> Part:
        return function.read(await self._invoke(partial(function, call)))

    async def _outcome_in_group(
        self,
        group_parts: Sequence[list[Part | BadReturnError] | None],
        index: int,
        call: Mapping[str, Any],
    ) -> Outcome:
        """The outcome of the answer at this index in its group. Functions that take no groups are called here."""
        parts: list[Part] = []
        for function, of_group in zip(self.functions, group_parts, strict=True):
            part: Part | BadReturnError | Outcome
            if of_group is None:
                part = await _guarded(function, partial(self._read_one, function, call))
            else:
                part = of_group[index]
            if isinstance(part, BadReturnError):
                return Outcome(kind="error", error=str(part))
            if isinstance(part, Outcome):
                return part
            parts.append(part)
        return _combined(self.functions, parts, call)


async def _guarded(function: RewardFunction, work: Callable[[], Awaitable[T]]) -> T | Outcome:
    """Result of work with a function; an exception becomes an outcome.

    Raises:
        OutOfMemory: the function has used it up.
    """
    label, ran_out = function.label, ""
    try:
        return await work()
    except BadReturnError as error:
        return Outcome(kind="error", error=str(error))
    except MemoryError as error:
        ran_out = f"{label} ran out of memory: {_describe(error, function)}"
    except BaseException as raised:  # noqa: BLE001 (the declared boundary: user code may raise anything)
        told = _told(raised)
        if is_outage(told):
            return Outcome(
                kind="infrastructure", error=f"{label} could not score: {_describe(told, function)}"
            )
        with contextlib.suppress(BaseException):  # an exception whose own text cannot be made
            traceback.print_exc()
        return Outcome(kind="error", error=f"{label} raised {_describe(told, function)}")
    raise OutOfMemory(ran_out)  # here nothing holds what the function has filled


def _combined(
    functions: Sequence[RewardFunction], parts: Sequence[Part], arguments: Mapping[str, Any]
) -> Outcome:
    """The outcome of a sample that every function has scored."""
    score, merged = combine(parts)
    label = functions[0].label if len(functions) == 1 else f"all {len(functions)} reward functions"
    if score is None:
        return Outcome(
            kind="error",
            error=f"{label} returned None, which is TRL's word for not applicable, so this sample has no reward; "
            f"return a number for every row of data_source {arguments['data_source']!r}",
        )
    if usable(score) is None:
        return Outcome(
            kind="error",
            error=f"the weighted sum of the reward functions is {score}, beyond {MAX_NUMBER:g}; return smaller numbers",
        )
    if sum(len(str(part)) for part in merged.values()) > MAX_PARTS_BYTES:
        return Outcome(
            kind="error", error=f"{label} returned more than {MAX_PARTS_BYTES} bytes; return less text"
        )
    return Outcome(kind="score", score=score, parts=merged, token_rewards=combined_token_rewards(parts))


def _told(error: BaseException) -> BaseException:
    """The exception that says what happened, in place of one that Python put around it: of a StopIteration, such as
    that of next(), which no coroutine passes on, and of the first failure of a TaskGroup that is about the answer."""
    with contextlib.suppress(BaseException):  # attributes of an exception are the user's code as well
        failures = [error]
        for _ in range(_MAX_GROUPS):
            groups = [failure for failure in failures if isinstance(failure, BaseExceptionGroup)]
            if not groups:
                break
            failures = [failure for failure in failures if not isinstance(failure, BaseExceptionGroup)]
            failures += [inner for group in groups for inner in group.exceptions]
        failures = [
            failure.__cause__ if isinstance(failure.__cause__, StopIteration) else failure
            for failure in failures
        ]
        return next((failure for failure in failures if not is_outage(failure)), failures[0])
    return error


def _describe(error: BaseException, function: RewardFunction) -> str:
    try:
        return describe(error, function.path)[:MAX_ERROR_CHARACTERS]
    except BaseException:  # noqa: BLE001 (the text of the exception is the user's code as well)
        return f"{type(error).__name__}, whose text cannot be shown"


def source_of(call: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
    """The data source of a call."""
    return str((call if isinstance(call, Mapping) else call[0])["data_source"])


def prepare(functions: Sequence[RewardFunction], source: str) -> None:
    """Import what scoring a data source needs."""
    for function in functions:
        with contextlib.suppress(Exception):  # the call itself will say it, as this sample's error
            function.prepare(source)


def result_message(result: Outcome | Sequence[Outcome], seconds: float) -> list[Any]:
    """The message about a finished call (wire.py)."""
    if isinstance(result, Outcome):
        return [
            "done", result.kind, result.score, result.parts, result.token_rewards, result.error, seconds
        ]  # fmt: skip
    return [
        "all",
        [[outcome.kind, outcome.score, outcome.parts, outcome.error] for outcome in result],
        seconds,
    ]
