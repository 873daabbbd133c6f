"""Engines that generate side by side: which of them serve, how many requests each takes, who gets the next one.

An engine is given up only by a real probe: `health` within a deadline, in which it generates a token. One that is too
busy for that, but gives tokens of other requests meanwhile, is alive.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from strop.rollout.types import RolloutEngine

FIRST_LIMIT = 32
"""Requests that one of several engines gets before it has said how many it takes."""
MAX_HOMES = 1 << 16
"""Episodes whose engine is remembered."""


@dataclass(eq=False)
class RequestAttempt:
    """A request at an engine."""

    begun_at: float
    deadline: asyncio.Timeout
    is_taken: bool = False
    """The engine gave a token of it."""
    cut: Exception | None = None
    """Reason of its end, if not its own deadline."""

    def end(self, why: Exception) -> None:
        """End it now, for this reason."""
        if self.cut is None and not self.deadline.expired():
            self.cut = why
            self.deadline.reschedule(asyncio.get_running_loop().time())


@dataclass(eq=False)
class Replica:
    """One engine, as its client sees it. Times are those of the loop, in seconds."""

    index: int
    engine: RolloutEngine
    limit: float
    """Most requests that it is given at a time."""
    cause: str = ""
    """Reason for which it does not serve; empty: it does."""
    num_given: int = 0
    """Requests that it has been given and that have not ended."""
    attempts: set[RequestAttempt] = field(default_factory=set)
    heard_at: float = -math.inf
    """When a token came, or the first request after none."""
    asked_at: float = -math.inf
    """When it last answered a probe."""
    moved_at: float = -math.inf
    """When it last took a request or ended one, or was paused."""
    retry_at: float = math.inf
    """When one that does not serve is looked at again."""
    probe: asyncio.Task[None] | None = None
    """The question under way whether it lives."""
    revival: asyncio.Task[None] | None = None
    """The attempt under way to have it serve again."""
    started: RolloutEngine | None = None
    """Engine that was started in its place and has not yet answered a probe."""

    @property
    def has_room(self) -> bool:
        """It serves and takes another request."""
        return not self.cause and self.num_given < self.limit

    def learn(self, numbers: Mapping[str, float], now: float) -> None:
        """Take in what it says of itself: how many requests it runs decides how many it is given.

        Those that wait inside are lost with it and cannot go elsewhere; a few keep it busy when others end.
        """
        self.asked_at = now
        if numbers.get("paused"):
            self.moved_at = now
        if math.isinf(self.limit) or numbers.get("paused"):
            return
        if "waiting" not in numbers:
            self.limit = math.inf
        elif numbers["waiting"] > 0:
            running = max(1.0, numbers.get("running", 0.0))
            self.limit = running + max(1.0, running // 8)
        elif self.num_given >= self.limit:
            self.limit *= 2


@dataclass(eq=False)
class _Waiter:
    episode: str
    place: asyncio.Future[Replica]


class Router:
    """Gives requests to engines: to the one that has the fewest, later ones of an episode to the same one."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        """One engine alone gets all requests at once, and queues them itself.

        Args:
            engines: at least one, all with the same weights.
        """
        self._first_limit = FIRST_LIMIT if len(engines) > 1 else math.inf
        self.replicas = [Replica(index, engine, self._first_limit) for index, engine in enumerate(engines)]
        self._queue: deque[_Waiter] = deque()
        self._homes: OrderedDict[str, Replica] = OrderedDict()

    @property
    def serving(self) -> list[Replica]:
        """Engines that serve."""
        return [replica for replica in self.replicas if not replica.cause]

    def causes(self) -> str:
        """Reasons for which engines do not serve."""
        return "; ".join(
            f"engine {replica.index}: {replica.cause}" for replica in self.replicas if replica.cause
        )

    async def place(self, episode: str) -> Replica:
        """Wait for an engine with room, in the order of asking; `leave` gives the place back.

        Raises:
            Exception: what `give_up` was told.
        """
        waiter = _Waiter(episode, asyncio.get_running_loop().create_future())
        self._queue.append(waiter)
        self.dispatch()
        try:
            return await waiter.place
        except asyncio.CancelledError:
            if waiter.place.done() and not waiter.place.cancelled() and waiter.place.exception() is None:
                self.leave(waiter.place.result())
            raise

    def leave(self, replica: Replica) -> None:
        """A request has ended there."""
        replica.num_given -= 1
        self.dispatch()

    def admit(self, replica: Replica, engine: RolloutEngine) -> None:
        """From now on this one serves, with this engine."""
        replica.engine, replica.cause, replica.limit, replica.started = engine, "", self._first_limit, None

    def dispatch(self) -> None:
        """Give out the places that are free."""
        stay: list[_Waiter] = []
        while self._queue and any(replica.has_room for replica in self.replicas):
            waiter = self._queue.popleft()
            if waiter.place.done():  # its caller was cancelled
                continue
            replica = self._choose(waiter.episode)
            if replica is None:
                stay.append(waiter)
            else:
                replica.num_given += 1
                waiter.place.set_result(replica)
        self._queue.extendleft(reversed(stay))

    def give_up(self, why: Exception) -> None:
        """No engine serves, and none will: end the wait of all."""
        for waiter in self._queue:
            if not waiter.place.done():
                waiter.place.set_exception(why)
        self._queue.clear()

    def _choose(self, episode: str) -> Replica | None:
        """The engine of this episode, or a new one; None where it has to wait for its own."""
        home = self._homes.get(episode)
        if home is None or home.cause:
            home = min(
                (replica for replica in self.replicas if replica.has_room),
                key=lambda replica: replica.num_given,
            )
            self._homes[episode] = home
        self._homes.move_to_end(episode)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)
        return home if home.has_room else None
