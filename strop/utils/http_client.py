"""Calls of a service that takes and gives JSON over HTTP: within its limits, repeated where that may help.

Concurrency: one thread with an event loop of its own, so that deadlines hold while other loops are busy. `ask` always
ends: each attempt within its time limit, with at most `retries` repeats, each after at most a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from strop.utils.background_loop import EventLoopThread
from strop.utils.call_limits import CallLimits
from strop.utils.http_post import Answer, post
from strop.utils.sanitize import described, read_json, remember_secret, storable_text
from strop.utils.token_bucket import TokenBucket

T = TypeVar("T")
Failure = Literal["error", "timeout", "infrastructure"]
"""Of a request that got no answer. error: the service refuses this one. timeout: no answer in time. infrastructure:
anything else, which says nothing about the request."""
CLOSED = "ask before it is closed"
"""Remedy of what was asked later."""
_MAX_WAIT_S = 60.0
_MAX_DOUBLINGS = 64
_REPEATABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_ABOUT_THE_REQUEST = frozenset({400, 413, 422})
"""Refusals of this one request, such as a prompt that is too long for the model."""


def backoff_s(attempt: int, first_s: float) -> float:
    """Wait before a repeat, in seconds: doubled with each attempt, up to a minute, and half of it left to chance.

    Args:
        attempt: number of the one that failed, from 0.
        first_s: wait after that one, at most.
    """
    backoff = min(_MAX_WAIT_S, first_s * 2.0 ** min(attempt, _MAX_DOUBLINGS))
    return backoff * (0.5 + 0.5 * random.random())  # spreads repeats; no result depends on it


class CallRefused(Exception):
    """There is no answer to a request; the message is one sentence."""

    def __init__(
        self,
        kind: Failure,
        sentence: str,
        usage: Mapping[str, float],
        *,
        repeats: bool = False,
        wait_s: float | None = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(sentence)
        self.kind, self.usage, self.repeats, self.wait_s = kind, usage, repeats, wait_s
        self.remedy = remedy
        """Advice; None: as the kind tells; empty: the sentence says it."""


@dataclass(frozen=True, kw_only=True)
class Called:
    """The answer to a request."""

    data: Any
    """Its JSON, as it was read."""
    usage: Mapping[str, float]
    """requests, retries, cached, wait_s."""


class Caller:
    """Asks one address; use `start` and `close` around it."""

    def __init__(
        self, limits: CallLimits, url: str, *, key: str, name: str, timeout_s: float, timeout_key: str
    ) -> None:
        """Args:
        limits: rates and repeats.
        url: full address of the POST requests.
        key: full key of the section with the limits, for sentences.
        name: what sentences call the service, such as `judge`.
        timeout_s: wall-clock limit of one attempt, in seconds.
        timeout_key: full key of that setting.
        """
        self._limits, self._url, self._key, self._name = limits, url, key, name
        self._timeout_s, self._timeout_key = timeout_s, timeout_key
        self._headers: dict[str, str] = {}
        self._runner: EventLoopThread | None = None

    def start(self) -> None:
        """Read the key and start the thread.

        Raises:
            ValueError: there is no key under the configured name.
        """
        if self._limits.api_key_env:
            key = os.environ.get(self._limits.api_key_env, "").strip()
            if not key:
                raise ValueError(
                    f"{self._key}.api_key_env names {self._limits.api_key_env!r}, but the environment has no "
                    f"such variable: export it, or remove the setting for a service without a key"
                )
            remember_secret(key)
            self._headers = {"Authorization": f"Bearer {key}"}
        self._bucket = TokenBucket(self._limits.requests_per_s)
        self._places = asyncio.Semaphore(self._limits.max_concurrent)
        self._runner = EventLoopThread(f"calls-{self._name}")

    async def close(self) -> None:
        """End what is under way; who waits for it is cancelled."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await asyncio.to_thread(runner.close)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry out a coroutine in the caller's own loop.

        Raises:
            CallRefused: it was closed.
        """
        if self._runner is None:
            work.close()
            raise self._closed()
        try:
            return await asyncio.wrap_future(self._runner.submit(work))
        except asyncio.CancelledError:
            if self._runner is None:  # it was not whoever called who was cancelled
                raise self._closed() from None
            raise

    async def ask(
        self,
        body: bytes,
        *,
        refusal: Callable[[], str] = lambda: "",
        read: Callable[[Any], Any] = lambda data: data,
    ) -> Called:
        """The answer to a request; to be awaited in the caller's own loop.

        Args:
            body: of the request.
            refusal: asked before each attempt; a sentence with which nothing is asked any more, and which says what to
                do, or nothing.
            read: makes something of the JSON of the answer; a ValueError says that this is none, so it is asked again.

        Raises:
            CallRefused: no attempt succeeded.
        """
        started = time.monotonic()
        for attempt in range(self._limits.retries + 1):
            try:
                async with self._places:
                    await self._bucket.take()
                    if reason := refusal():
                        usage = _counted(attempt - 1, time.monotonic() - started)
                        raise CallRefused("infrastructure", f"the {self._name} {reason}", usage, remedy="")
                    data = await self._attempt(body, read)
            except CallRefused as refused:
                if refused.usage:  # it was not asked
                    raise
                usage = _counted(attempt, time.monotonic() - started)
                if not refused.repeats or attempt == self._limits.retries:
                    times = f" after {attempt + 1} attempts" if attempt else ""
                    raise CallRefused(refused.kind, f"the {self._name} {refused}{times}", usage) from refused
                await asyncio.sleep(self._wait_s(attempt, refused.wait_s))
            else:
                return Called(data=data, usage=_counted(attempt, time.monotonic() - started))
        raise AssertionError("the last attempt returns or raises")

    def _closed(self) -> CallRefused:
        return CallRefused("infrastructure", f"the {self._name} was closed", {}, remedy=CLOSED)

    def _wait_s(self, attempt: int, asked_s: float | None) -> float:
        chosen = backoff_s(attempt, self._limits.backoff_s)
        return chosen if asked_s is None else min(_MAX_WAIT_S, max(asked_s, chosen))

    async def _attempt(self, body: bytes, read: Callable[[Any], Any]) -> Any:
        limit_s = self._timeout_s
        try:
            answer = await post(self._url, body, self._headers, timeout_s=limit_s)
        except TimeoutError as error:
            raise CallRefused(
                "timeout", f"did not answer in {limit_s:g} s ({self._timeout_key})", {}, repeats=True
            ) from error
        except OSError as error:
            sentence = f"at {self._url} could not be asked: {described(error)}"
            raise CallRefused("infrastructure", sentence, {}, repeats=True) from error
        data = self._read(answer)
        try:
            return read(data)
        except ValueError as error:
            raise CallRefused("infrastructure", str(error), {}, repeats=True) from error

    def _read(self, answer: Answer) -> Any:
        if answer.status != 200:
            kind: Failure = "error" if answer.status in _ABOUT_THE_REQUEST else "infrastructure"
            detail = " ".join(_shown(answer.body, 300).split())
            sentence = f"refused with HTTP status {answer.status}{f': {detail}' if detail else ''}"
            is_repeated = answer.status in _REPEATABLE
            raise CallRefused(kind, sentence, {}, repeats=is_repeated, wait_s=answer.retry_after_s)
        try:
            return read_json(answer.body)
        except ValueError as error:
            sentence = f"sent no JSON: {_shown(answer.body, 100)!r}"
            raise CallRefused("infrastructure", sentence, {}, repeats=True) from error


def _shown(body: bytes, max_chars: int) -> str:
    return storable_text(body.decode(errors="replace"))[:max_chars]  # first without secrets, then cut


def _counted(attempt: int, wait_s: float) -> dict[str, float]:
    return {"requests": attempt + 1.0, "retries": max(0.0, attempt), "cached": 0.0, "wait_s": wait_s}
