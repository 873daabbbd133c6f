"""The client of a scoring service: asks within its limits, repeats what may be repeated, counts what it costs.

Concurrency: one thread with an event loop of its own, so that deadlines hold while the trainer's loop is busy with a
step; requests wait in up to max_concurrent further threads. `ask` always ends: each attempt within timeout_s, with at
most `retries` repeats, each after at most a minute.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import random
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from strop.base.token_bucket import TokenBucket
from strop.border import described, read_json, remember_secret, storable_text
from strop.judges.cache import AnswerCache
from strop.judges.config import CallsConfig
from strop.judges.cost_budget import CostBudget
from strop.net.exchange import Answer, Exchange
from strop.rewards.outcome import CallFailed, OutcomeKind, RewardError

T = TypeVar("T")
_MAX_WAIT_S = 60.0
_CLOSE_S = 5.0
_REPEATABLE = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_ABOUT_THE_SAMPLE = frozenset({400, 413, 422})
"""Refusals of this one request, such as a prompt that is too long for the model."""


class _Refused(Exception):
    """One attempt that failed."""

    def __init__(
        self, kind: OutcomeKind, sentence: str, *, repeats: bool, wait_s: float | None = None
    ) -> None:
        super().__init__(sentence)
        self.kind, self.repeats, self.wait_s = kind, repeats, wait_s


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of a service to one request."""

    data: Any
    """Its JSON."""
    key: str
    """Of the cache."""
    usage: Mapping[str, float]
    """requests, retries, cached, wait_s."""


class RemoteClient:
    """Asks one address; use `start` and `close` around it."""

    def __init__(self, config: CallsConfig, url: str, *, name: str, budget: CostBudget | None = None) -> None:
        """Args:
        config: limits.
        url: full address of the POST requests.
        name: what sentences and metrics call the service: `judge`, `server`.
        budget: nothing is asked once it is empty; who reads the replies pays.
        """
        self._config, self._url, self._name = config, url, name
        self._budget = CostBudget(None) if budget is None else budget
        self._cache = AnswerCache(config.cache_dir)
        self._headers: dict[str, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Read the key and start the thread.

        Raises:
            RewardError: there is no key under the configured name.
        """
        if self._config.api_key_env:
            key = os.environ.get(self._config.api_key_env, "").strip()
            if not key:
                raise RewardError(
                    f"reward.{self._name}.api_key_env names {self._config.api_key_env!r}, but the environment has no "
                    f"such variable: export it, or remove the setting for a service without a key"
                )
            remember_secret(key)
            self._headers = {"Authorization": f"Bearer {key}"}
        self._bucket = TokenBucket(self._config.requests_per_s)
        self._places = asyncio.Semaphore(self._config.max_concurrent)
        self._threads = concurrent.futures.ThreadPoolExecutor(
            self._config.max_concurrent, thread_name_prefix=f"reward-{self._name}"
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"reward-{self._name}", daemon=True
        )
        self._thread.start()

    async def close(self) -> None:
        """End what is under way; who waits for it is cancelled."""
        loop, self._loop = self._loop, None
        if loop is None:
            return

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(cancel_all(), loop))
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        loop.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry out a coroutine in the client's own loop."""
        if self._loop is None:
            work.close()
            raise CallFailed("infrastructure", f"the {self._name} was closed", {})
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._loop is None:  # it was not the caller who was cancelled
                raise CallFailed("infrastructure", f"the {self._name} was closed", {}) from None
            raise

    async def ask(self, request: Mapping[str, Any], *, fresh: bool = False) -> Reply:
        """The reply to a request; to be awaited in the client's own loop.

        Args:
            request: becomes the JSON body.
            fresh: ask although the answer is in the cache.

        Raises:
            CallFailed: no attempt succeeded.
        """
        body = json.dumps(request, sort_keys=True, separators=(",", ":")).encode()
        key = self._cache.key(self._url, body)
        if not fresh and (known := self._cache.get(key)) is not None:
            return Reply(data=known, key=key, usage={"requests": 0.0, "retries": 0.0, "cached": 1.0})
        started = time.monotonic()
        for attempt in range(self._config.retries + 1):
            try:
                async with self._places:
                    await self._bucket.take()
                    if refusal := self._budget.refusal():
                        usage = _counted(attempt - 1, time.monotonic() - started)
                        raise CallFailed("infrastructure", f"the {self._name} {refusal}", usage)
                    data = await self._attempt(body)
            except _Refused as refused:
                usage = _counted(attempt, time.monotonic() - started)
                if not refused.repeats or attempt == self._config.retries:
                    times = f" after {attempt + 1} attempts" if attempt else ""
                    raise CallFailed(refused.kind, f"the {self._name} {refused}{times}", usage) from refused
                await asyncio.sleep(self._wait_s(attempt, refused.wait_s))
            else:
                return Reply(data=data, key=key, usage=_counted(attempt, time.monotonic() - started))
        raise AssertionError("the last attempt returns or raises")

    def remember(self, reply: Reply) -> None:
        """Keep a reply that could be used."""
        if not reply.usage.get("cached"):
            self._cache.put(reply.key, reply.data)

    def _wait_s(self, attempt: int, asked_s: float | None) -> float:
        backoff = min(_MAX_WAIT_S, self._config.backoff_s * 2.0**attempt)
        chosen = backoff * (0.5 + 0.5 * random.random())  # spreads repeats; no result depends on it
        return chosen if asked_s is None else min(_MAX_WAIT_S, max(asked_s, chosen))

    async def _attempt(self, body: bytes) -> Any:
        assert self._threads is not None, "asked between start and close"
        limit_s = self._config.timeout_s
        exchange = Exchange(self._url, body, self._headers, timeout_s=limit_s)
        try:
            async with asyncio.timeout(limit_s):
                answer = await asyncio.get_running_loop().run_in_executor(self._threads, exchange.run)
        except TimeoutError as error:
            exchange.abort()
            raise _Refused(
                "timeout", f"did not answer in {limit_s:g} s (reward.{self._name}.timeout_s)", repeats=True
            ) from error
        except asyncio.CancelledError:
            exchange.abort()
            raise
        except OSError as error:
            raise _Refused(
                "infrastructure", f"at {self._url} could not be asked: {described(error)}", repeats=True
            ) from error
        return self._read(answer)

    def _read(self, answer: Answer) -> Any:
        if answer.status != 200:
            kind: OutcomeKind = "error" if answer.status in _ABOUT_THE_SAMPLE else "infrastructure"
            said = " ".join(_shown(answer.body, 300).split())
            raise _Refused(
                kind, f"refused with HTTP status {answer.status}{f': {said}' if said else ''}",
                repeats=answer.status in _REPEATABLE, wait_s=answer.retry_after_s,
            )  # fmt: skip
        try:
            return read_json(answer.body)
        except ValueError as error:
            raise _Refused(
                "infrastructure", f"sent no JSON: {_shown(answer.body, 100)!r}", repeats=True
            ) from error


def _shown(body: bytes, max_chars: int) -> str:
    return storable_text(body.decode(errors="replace"))[:max_chars]  # first without secrets, then cut


def _counted(attempt: int, wait_s: float) -> dict[str, float]:
    return {"requests": attempt + 1.0, "retries": max(0.0, attempt), "cached": 0.0, "wait_s": wait_s}
