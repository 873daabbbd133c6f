"""Asks engines that may be lost: one, or several with the same weights.

Every request has one outcome, and every wait ends. A request may generate for `timeout_s` from its first token on: the
time in which it waits for its turn does not count. It waits as long as its engine goes on with others: when that has
neither begun nor ended a request for `timeout_s`, and is not paused, the wait ends with an error.

An engine that fails a request, or gives no token, is probed (engine_replicas.py). Where it cannot answer, its requests
go on elsewhere behind the tokens that were heard of, so that nothing is sampled twice and nothing lost; the engine is
started again where its owner says how, and serves once it has generated a token at the current version. Where engines
record the experts of tokens, a request whose engine is lost behind its last token is read by another one for them.

Concurrency: one asyncio loop. Probes, and a task that looks at the clock, run while requests are open.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from strop.rollout.client import NoEngine, RolloutTimeout, too_slow
from strop.rollout.replicas.partial_request import PartialRequest
from strop.rollout.replicas.router import Replica, RequestAttempt, Router
from strop.rollout.types import OnToken, RolloutEngine, Sampling, TokenOutput

logger = logging.getLogger(__name__)

SILENCE_S = 20.0
"""An engine with requests that gives no token for so long is probed."""
SIGNAL_S = 0.5
"""Interval at which the numbers of running requests of several engines are logged."""
PROBE_S = 90.0
"""Deadline of a probe: longer than that of the engines' own (`RolloutEngine.health`), whose message says more."""
RESTART_S = 900.0
"""Deadline of a restart."""
RETRY_S = 30.0
"""Interval after which an engine that does not serve is probed again."""
MAX_LOSSES = 5
"""A request that was lost with so many engines is not tried once more: it may be what ends them."""

Restart = Callable[[int], Awaitable[RolloutEngine]]
"""Ends what is left of the engine of this number and starts another one in its place, at the current version."""


@dataclass
class RequestCounts:
    """Outcomes of requests: each that was issued has one, or is still open."""

    issued: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0
    """By the caller."""
    reissued: int = 0
    """Times that a request was taken to another engine; no outcome."""

    @property
    def open(self) -> int:
        """Requests without an outcome."""
        return self.issued - self.completed - self.failed - self.cancelled


class _Lost(Exception):
    """The engine of a request is gone."""


class RolloutClient:
    """Routes requests to engines, bounds their time, and takes them to another engine where one is lost."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        timeout_s: float,
        restart: Restart | None = None,
        records_routing: bool = False,
        silence_s: float = SILENCE_S,
        probe_s: float = PROBE_S,
    ) -> None:
        """Nothing is asked of the engines yet.

        Args:
            engines: at least one; of several, all have the same weights. They stay their owner's to close.
            timeout_s: rollout.timeout_s.
            restart: how the owner starts one anew; without it, one that was given up serves again when it answers.
            records_routing: engines record the experts of tokens (rollout.router_replay), and no output goes without.
            silence_s: probe an engine with requests that gives no token for so long.
            probe_s: deadline of a probe.
        """
        self.counts = RequestCounts()
        self._router = Router(engines)
        self._timeout_s, self._silence_s, self._probe_s = timeout_s, silence_s, probe_s
        self._restart, self._records_routing = restart, records_routing
        self._clock: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """The current policy version: the highest that an engine holds."""
        return max(replica.engine.version for replica in self._router.replicas)

    def admit(self, index: int, engine: RolloutEngine) -> None:
        """The engine of this number is another one from now on, which its owner has made ready."""
        replica = self._router.replicas[index]
        if replica.revival is not None:
            replica.revival.cancel()
        self._router.admit(replica, engine)

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """Continue `prompt_ids`.

        Args:
            request_id: its own; requests of one episode are alike up to the last `#`, and go to one engine.
            prompt_ids: may be `MediaTokens`.
            sampling: how to sample.
            on_token: hears of each token.

        Raises:
            RolloutTimeout: it generated for longer than rollout.timeout_s, or its engine took no request for so long.
            NoEngine: no engine is left, or it was lost with too many of them.
            ValueError: the engine refuses the request.
            Exception: whatever else an engine raises that answers a probe all the same.
        """
        self.counts.issued += 1
        request = PartialRequest(
            request_id, prompt_ids, sampling, on_token, records_routing=self._records_routing
        )
        if self._clock is None:
            self._clock = asyncio.create_task(self._watch())
        try:
            output = await self._served(request)
        except asyncio.CancelledError:
            self.counts.cancelled += 1
            raise
        except BaseException:
            self.counts.failed += 1
            raise
        else:
            self.counts.completed += 1
            return output
        finally:
            if self.counts.open == 0:
                self._rest()

    async def close(self) -> None:
        """End the start of an engine that goes on."""
        revivals = [replica.revival for replica in self._router.replicas if replica.revival is not None]
        for revival in revivals:
            revival.cancel()
        await asyncio.gather(*revivals, return_exceptions=True)

    async def _served(self, request: PartialRequest) -> TokenOutput:
        while True:
            try:
                async with self._place(request) as replica:
                    return await self._attempt(request, replica)
            except _Lost as error:
                request.losses.append(str(error))
            if (reason := request.end()) is not None:
                return request.output(reason)
            if len(request.losses) >= MAX_LOSSES:
                raise NoEngine(
                    f"{request.request_id} was lost with {MAX_LOSSES} engines, one after another, and is not tried "
                    f"again: {'; '.join(request.losses)}"
                )
            self.counts.reissued += 1

    @asynccontextmanager
    async def _place(self, request: PartialRequest) -> AsyncIterator[Replica]:
        router = self._router
        if not router.serving and all(candidate.revival is None for candidate in router.replicas):
            for replica in router.replicas:
                self._revive(replica)
        replica = await router.place(request.request_id.rpartition("#")[0] or request.request_id)
        try:
            yield replica
        finally:
            router.leave(replica)

    async def _attempt(self, request: PartialRequest, replica: Replica) -> TokenOutput:
        """The output that the request has in the end.

        Raises:
            _Lost: the engine does not serve any more, or lost the request.
        """
        loop = asyncio.get_running_loop()
        name, ids, sampling = request.rest()
        before = len(request.token_ids)
        try:
            async with asyncio.timeout(None) as deadline:
                attempt = RequestAttempt(loop.time(), deadline)

                def hear(token: int, log_prob: float, version: int) -> None:
                    if attempt not in replica.attempts:
                        return  # too late: the request has gone elsewhere
                    replica.heard_at = loop.time()
                    if not attempt.is_taken:
                        attempt.is_taken = True
                        replica.moved_at = replica.heard_at
                        if attempt.cut is None:
                            deadline.reschedule(replica.heard_at + self._timeout_s)
                    request.hear(token, log_prob, version)

                with _held(replica, attempt):
                    output = await replica.engine.generate(name, ids, sampling, on_token=hear)
        except ValueError:
            raise
        except Exception as error:
            if deadline.expired():
                raise (
                    attempt.cut
                    or too_slow(
                        request.request_id, request.prompt_ids, request.sampling, timeout_s=self._timeout_s
                    )
                ) from None
            await self._probe(replica)
            if replica.cause or isinstance(error, ConnectionError):
                raise _Lost(f"engine {replica.index}: {replica.cause or error}") from error
            raise
        return request.answered(output, heard=len(request.token_ids) - before)

    async def _watch(self) -> None:
        """Look at the clock while requests are open."""
        tick = min(SIGNAL_S, self._silence_s / 4, self._timeout_s / 4)
        while True:
            await asyncio.sleep(tick)
            now = asyncio.get_running_loop().time()
            for replica in self._router.replicas:
                if not replica.cause:
                    self._look(replica, now)
                elif replica.revival is None and now >= replica.retry_at:
                    self._revive(replica)

    def _look(self, replica: Replica, now: float) -> None:
        """Probe an engine that is silent, ask one of several how much it takes, and end waits that are in vain."""
        if not replica.attempts:
            return
        is_silent = now - max(replica.heard_at, replica.asked_at) > self._silence_s
        wants_signal = len(self._router.replicas) > 1 and now - replica.asked_at > SIGNAL_S
        asks = is_silent or wants_signal
        for attempt in list(replica.attempts):
            over_at = max(attempt.begun_at, replica.moved_at) + self._timeout_s
            if attempt.is_taken or now <= over_at:
                continue
            if replica.asked_at <= over_at:
                asks = True  # it may be paused
            else:
                attempt.end(
                    RolloutTimeout(
                        f"a request waited in vain: engine {replica.index} lives, but has begun none of its "
                        f"{len(replica.attempts)} requests and ended none for rollout.timeout_s = "
                        f"{self._timeout_s:g} s; raise the limit, or lower rollout.max_running"
                    )
                )
        if asks:
            self._start_probe(replica)

    def _start_probe(self, replica: Replica) -> asyncio.Task[None]:
        if replica.probe is None:
            replica.probe = asyncio.create_task(self._ask(replica))
        return replica.probe

    async def _probe(self, replica: Replica) -> None:
        """Find out whether it lives; together with all who want to know."""
        if not replica.cause:
            await asyncio.wait([self._start_probe(replica)])

    async def _ask(self, replica: Replica) -> None:
        begun = asyncio.get_running_loop().time()
        try:
            numbers = await self._healthy(replica.engine)
        except Exception as error:  # noqa: BLE001  (whatever it is, the engine cannot do its work)
            is_busy = isinstance(error, TimeoutError) and replica.heard_at > begun
            if not is_busy:
                self._lose(replica, _sentence(error))
        else:
            replica.learn(numbers, asyncio.get_running_loop().time())
            self._router.dispatch()
        finally:
            replica.probe = None

    async def _healthy(self, engine: RolloutEngine) -> Mapping[str, float]:
        """Health of an engine, after it has generated a token.

        Raises:
            TimeoutError: it did not answer in time.
            Exception: it cannot.
        """
        try:
            async with asyncio.timeout(self._probe_s) as deadline:
                return await engine.health()
        except TimeoutError:
            if not deadline.expired():
                raise
            raise TimeoutError(f"it did not answer a probe within {self._probe_s:g} s") from None

    def _lose(self, replica: Replica, cause: str) -> None:
        """Give an engine up; its requests go elsewhere."""
        logger.warning("rollout engine %d does not serve any more: %s", replica.index, cause)
        replica.cause = cause
        replica.retry_at = asyncio.get_running_loop().time() + RETRY_S
        for attempt in list(replica.attempts):
            attempt.end(_Lost(f"engine {replica.index}: {cause}"))
        if self._restart is not None:
            self._revive(replica)
        self._end_waits()

    def _revive(self, replica: Replica) -> None:
        replica.revival = asyncio.create_task(self._renew(replica))

    async def _renew(self, replica: Replica) -> None:
        """One attempt to have an engine serve again."""
        try:
            if self._restart is not None and replica.started is None:
                async with asyncio.timeout(RESTART_S):
                    replica.started = await self._restart(replica.index)
            if self.counts.open == 0:  # the loop may stand still from now on: the next request finds out
                replica.retry_at = -math.inf
                return
            engine = replica.started or replica.engine
            numbers = await self._proven(engine)
        except Exception as error:  # noqa: BLE001  (it goes on not serving, and says why)
            replica.started = None
            label = "" if self._restart is None else "its replacement: "
            replica.cause = f"{replica.cause.partition('; its replacement: ')[0]}; {label}{_sentence(error)}"
            replica.retry_at = asyncio.get_running_loop().time() + RETRY_S
        else:
            logger.warning("rollout engine %d serves again, at version %d", replica.index, engine.version)
            self._router.admit(replica, engine)
            replica.learn(numbers, asyncio.get_running_loop().time())
            self._router.dispatch()
        finally:
            if replica.revival is asyncio.current_task():
                replica.revival = None
            self._end_waits()

    async def _proven(self, engine: RolloutEngine) -> Mapping[str, float]:
        """Health of an engine that has generated a token at the current version.

        Raises:
            Exception: it has not.
        """
        numbers = await self._healthy(engine)
        if engine.version != self.version:
            raise ValueError(f"it holds version {engine.version}, and version {self.version} is current")
        if self._restart is None:
            async with asyncio.timeout(self._probe_s):
                await engine.abort()  # what it had when it was given up has gone elsewhere
        return numbers

    def _end_waits(self) -> None:
        """Nobody waits for an engine when none serves and none is about to."""
        replicas = self._router.replicas
        if all(replica.cause and replica.revival is None for replica in replicas):
            self._router.give_up(NoEngine(f"no rollout engine is left: {self._router.causes()}"))

    def _rest(self) -> None:
        """No request is open: nothing goes on, so that the loop can stand still until the next one; but an engine that
        is being started is not ended for another one to be started."""
        tasks = [self._clock]
        self._clock = None
        for replica in self._router.replicas:
            tasks.append(replica.probe)
            replica.probe = None
            if self._restart is None or replica.started is not None:
                tasks.append(replica.revival)
                replica.revival = None
            if replica.started is not None:
                replica.retry_at = -math.inf
        for task in tasks:
            if task is not None:
                task.cancel()


@contextmanager
def _held(replica: Replica, attempt: RequestAttempt) -> Iterator[None]:
    """The time of a request at an engine."""
    if not replica.attempts:
        replica.heard_at = attempt.begun_at
    replica.attempts.add(attempt)
    try:
        yield
    finally:
        replica.attempts.discard(attempt)
        replica.moved_at = asyncio.get_running_loop().time()


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__
