"""Calls of users' methods: async ones on the loop of the episodes, others in threads, which may hang.

Python code in a thread can be interrupted, but a call that waits outside of Python cannot. Such a thread is a daemon,
which ends with the process. Calls that a model asks for are refused while MAX_STUCK threads hang; calls that begin or
end an episode are not, because a model that makes threads hang must not block the next episodes.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import inspect
import logging
import threading
import time
import types
from collections.abc import Awaitable, Callable, Generator
from typing import Any, ParamSpec, TypeVar

from strop.utils.sanitize import described

logger = logging.getLogger(__name__)

MAX_STUCK = 64
"""Functions that may go on after their deadline, per process; each holds a thread and what it uses."""
HELD_UP_S = 1.0
"""Time without an await after which a method is named that holds up all episodes."""

P = ParamSpec("P")
T = TypeVar("T")
_stuck: set[threading.Thread] = set()
_named: set[str] = set()


class TooManyStuckError(RuntimeError):
    """So many functions run after their deadline that no more are begun."""


async def result_of(
    method: Callable[..., Any],
    label: str,
    in_thread: Callable[..., Awaitable[Any]],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """The result of a method, whether it is async, gives something to await, or neither.

    Args:
        method: of a user.
        label: names it in a warning.
        in_thread: calls it where it is not async: answer_in_thread or call_in_thread.
        args, kwargs: of the method.
    """
    if inspect.iscoroutinefunction(method):
        return await _watched(method(*args, **kwargs), label)
    result = await in_thread(method, *args, **kwargs)
    return await _watched(result, label) if inspect.isawaitable(result) else result


@types.coroutine
def _watched(work: Awaitable[T], label: str) -> Generator[Any, Any, T]:
    """The result; a warning, once for each label, where a step up to an await takes longer than HELD_UP_S."""
    steps: Any = work.__await__()
    go_on = functools.partial(next, steps)
    while True:
        start = time.perf_counter()
        try:
            awaited = go_on()
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            seconds = time.perf_counter() - start
            if seconds > HELD_UP_S and label not in _named:
                _named.add(label)
                logger.warning(
                    "%s took %.1f s without an await, in which every other episode stood still and no time limit held: "
                    "make the method a plain def, which runs in a thread, or set agent.num_workers", label, seconds
                )  # fmt: skip
        try:
            value = yield awaited
        except BaseException as error:  # noqa: BLE001 (handed on)
            go_on = functools.partial(steps.throw, error)
        else:
            go_on = functools.partial(steps.send, value)


async def answer_in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """As call_in_thread, for calls caused by an answer of the model: the call is interrupted when the wait ends.

    Raises:
        TooManyStuckError: MAX_STUCK functions were left behind and still run.
    """
    _stuck.difference_update([thread for thread in _stuck if not thread.is_alive()])
    if len(_stuck) >= MAX_STUCK:
        raise TooManyStuckError(
            f"{len(_stuck)} earlier calls still run after their deadline; no more are begun"
        )
    return await _in_thread(functools.partial(function, *args, **kwargs), function, ends=True)


async def call_in_thread(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a blocking function; when the wait is cancelled, the thread is left behind."""
    return await _in_thread(functools.partial(function, *args, **kwargs), function, ends=False)


async def _in_thread(call: Callable[[], T], function: Callable[..., T], *, ends: bool) -> T:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def set_outcome(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # T may be None

    def work() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = context.run(call)
        except StopIteration as error:  # cannot be raised into a future
            failure = RuntimeError(f"StopIteration: {error}")
        except BaseException as error:  # noqa: BLE001 (handed to the caller)
            failure = error if isinstance(error, Exception) else RuntimeError(described(error))
        try:
            loop.call_soon_threadsafe(set_outcome, result, failure)
        except RuntimeError:  # the loop was closed meanwhile; nobody waits
            return

    thread = threading.Thread(target=work, name=f"tool {getattr(function, '__name__', '?')}", daemon=True)
    thread.start()
    try:
        return await future
    except asyncio.CancelledError:
        if thread.is_alive():
            if ends:  # a loop in Python would take the time of everybody else for ever
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                )
            _stuck.add(thread)
            if len(_stuck) == MAX_STUCK:
                logger.warning(
                    "%d functions of tools or environments run after their deadline (agent.tool_timeout_s), the last "
                    "one %s; until one of them ends, tools answer with an error, and answers to an environment are "
                    "worth 0", MAX_STUCK, thread.name,
                )  # fmt: skip
        raise
