"""Routing table: the load of each replica of a run, and the decisions where a request goes, waits, or goes on.

A replica is a rollout worker with its engines; several may compute together with one copy of the model. Requests of an
episode begin at its home: the worker whose agent plays it, then the replica that had its last request, whose cache
knows the beginning. A home that runs as many as it can lets them wait, and whichever replica has room takes them. Where
none waits, a copy that has had much less to do than another one for `patience_s` takes over half of the difference, in
the middle of their responses: whichever of its replicas from whichever of the other's.

A pure data structure: no clock, no connection. `now` is in seconds of any clock.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

PATIENCE_S = 2.0
"""A request in the middle is taken over from a copy that has had twice the work of another for so long: its tokens
are computed again there, which is not worth a moment, and short steps stay the same to the bit."""
MAX_HOMES = 1 << 18
"""Episodes whose replica is remembered."""


@dataclass(eq=False)
class RoutedRequest:
    """A request that has been given to a replica, or waits."""

    origin: int
    """Worker that asks."""
    number: int
    """Of the request there."""
    episode: str
    stays: bool = False
    """Only the worker that asks can serve it: it has images."""
    excluded: frozenset[int] = frozenset()
    """Replicas that have lost it."""
    home: int = 0
    replica: int | None = None
    """None: it waits."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Message about a request, for the worker that asks."""

    request: RoutedRequest
    replica: int | None
    """Its replica from now on; None: none serves."""
    is_move: bool = False
    """It has begun elsewhere."""


@dataclass(eq=False)
class ReplicaLoad:
    """One replica, its requests, and the time in which it had any."""

    index: int
    capacity: int
    """Requests that it runs at a time."""
    can_continue: bool
    """It goes on in the middle of a response with the tokens that would have followed."""
    copy: ModelCopy
    """The one that it computes with."""
    is_serving: bool = False
    cause: str = "it has not begun"
    """Reason for which it does not serve."""
    version: int = 0
    """Policy version that it generates with."""
    running: dict[RoutedRequest, None] = field(default_factory=dict)
    """In the order in which they came."""
    waiting: deque[RoutedRequest] = field(default_factory=deque)
    """At home here, without a place."""
    busy_s: float = 0.0
    serving_s: float = 0.0
    changed_at: float = 0.0

    @property
    def load(self) -> int:
        """Requests that it has to generate for."""
        return len(self.running) + len(self.waiting)

    @property
    def has_room(self) -> bool:
        """It may be given one more."""
        return self.is_serving and len(self.running) < self.capacity

    def pass_time(self, now: float) -> None:
        """Count the time since the last change, of all that compute together."""
        is_busy = any(replica.running for replica in self.copy.members)
        for replica in self.copy.members:
            if replica.is_serving:
                replica.serving_s += now - replica.changed_at
                replica.busy_s += (now - replica.changed_at) * is_busy
            replica.changed_at = now


@dataclass(eq=False)
class ModelCopy:
    """A copy of the model, and the replicas that compute together with it: what one of them runs, all run."""

    members: list[ReplicaLoad] = field(default_factory=list)
    low_since: float | None = None
    """Time since when it has had much less to do than another."""

    @property
    def total_load(self) -> int:
        """Requests that it has to generate for."""
        return sum(replica.load for replica in self.members)

    @property
    def load(self) -> float:
        """Average of its replicas."""
        return self.total_load / len(self.members)

    @property
    def version(self) -> int | None:
        """Policy version of all its replicas; None while one of them does not serve, or has another one."""
        versions = {replica.version if replica.is_serving else None for replica in self.members}
        return versions.pop() if len(versions) == 1 else None

    @property
    def can_continue(self) -> bool:
        """All its replicas can."""
        return all(replica.can_continue for replica in self.members)


@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """Numbers of some time of routing."""

    serving_s: float
    """Seconds in which replicas served, summed over them."""
    busy_s: float
    """Seconds of these in which they had a request."""
    num_taken_over: int
    """Requests that were given a place away from the worker that asked, or in the middle of a response."""

    @property
    def idle_share(self) -> float:
        """Share of the replicas' time in which they had no request."""
        return 1 - self.busy_s / self.serving_s if self.serving_s > 0 else 0.0


class RoutingTable:
    """Replicas, and the requests that they run or that wait."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        """No replica is there yet.

        Args:
            patience_s: imbalance of this duration moves requests that run.
        """
        self.replicas: dict[int, ReplicaLoad] = {}
        self._copies: dict[int, ModelCopy] = {}
        self._patience_s = patience_s
        self._requests: dict[tuple[int, int], RoutedRequest] = {}
        self._homes: OrderedDict[str, int] = OrderedDict()
        self._num_taken_over = 0
        self._past = (0.0, 0.0)  # serving_s and busy_s of replicas that are gone

    def add(self, index: int, *, capacity: int, can_continue: bool, copy: int | None = None) -> None:
        """A worker has joined; it serves from `begin` on.

        Args:
            index: of the worker.
            capacity, can_continue: as of ReplicaLoad.
            copy: number of the copy of the model, of which several workers may hold parts; None for one of its own.
        """
        shared = self._copies.setdefault(index if copy is None else copy, ModelCopy())
        self.replicas[index] = replica = ReplicaLoad(index, capacity, can_continue, shared)
        shared.members.append(replica)

    def begin(self, index: int, version: int, now: float) -> list[Decision]:
        """The engines of a worker serve, with this policy version."""
        replica = self.replicas[index]
        replica.pass_time(now)
        replica.is_serving, replica.cause, replica.version, replica.copy.low_since = True, "", version, None
        return self._fill(now)

    def stop(self, index: int, cause: str, now: float) -> list[Decision]:
        """The engines of a worker serve no longer; whoever has requests there asks for another place for them."""
        replica = self.replicas[index]
        replica.pass_time(now)
        replica.is_serving, replica.cause = False, cause
        return self._fill(now) + self._hopeless(self._waiting())

    def remove(self, index: int, now: float) -> list[Decision]:
        """A worker is gone, and its own requests with it."""
        for request in [request for request in self._requests.values() if request.origin == index]:
            self._forget(request, now)
        replica = self.replicas.pop(index)
        replica.pass_time(now)
        replica.copy.members.remove(replica)
        self._past = (self._past[0] + replica.serving_s, self._past[1] + replica.busy_s)
        for request in replica.waiting:  # those of others wait at their own
            request.home = request.origin
            self.replicas[request.origin].waiting.append(request)
        return self._fill(now) + self._hopeless(self._waiting())

    def place(self, request: RoutedRequest, now: float) -> list[Decision]:
        """A worker asks for a place; the decision may come with a later change."""
        key = (request.origin, request.number)
        assert key not in self._requests, "each request of a worker has a number of its own"
        self._requests[key] = request
        home = request.origin if request.stays else self._homes.get(request.episode, request.origin)
        request.home = home if home in self.replicas and home not in request.excluded else request.origin
        self.replicas[request.home].waiting.append(request)
        return self._fill(now) + self._hopeless([request])

    def leave(self, origin: int, number: int, now: float) -> list[Decision]:
        """A request has ended, wherever it was."""
        request = self._requests.get((origin, number))
        if request is None:
            return []
        self._forget(request, now)
        return self._fill(now)

    def rebalance(self, now: float) -> list[Decision]:
        """Move requests that run to copies of the model that have had much less to do for `patience_s`."""
        copies = [copy for copy in self._copies.values() if copy.members and copy.can_continue]
        able = [copy for copy in copies if copy.version is not None]
        decisions: list[Decision] = []
        for idle in sorted(able, key=lambda copy: copy.load):
            busier = [
                copy for copy in able if copy.version == idle.version and copy.load >= 2 * idle.load + 2
            ]
            if not busier:
                idle.low_since = None
            elif idle.low_since is None:
                idle.low_since = now
            elif now - idle.low_since >= self._patience_s:
                idle.low_since = now
                decisions += self._take_over(idle, max(busier, key=lambda copy: copy.load), now)
        return decisions

    def take_stats(self, now: float) -> RoutingStats:
        """Numbers since the call before."""
        serving_s, busy_s = self._past
        for replica in self.replicas.values():
            replica.pass_time(now)
            serving_s, busy_s = serving_s + replica.serving_s, busy_s + replica.busy_s
            replica.serving_s = replica.busy_s = 0.0
        stats = RoutingStats(
            serving_s=serving_s,
            busy_s=busy_s,
            num_taken_over=self._num_taken_over,
        )
        self._past, self._num_taken_over = (0.0, 0.0), 0
        return stats

    def causes(self) -> str:
        """Reasons for which replicas do not serve."""
        return "; ".join(
            f"rollout worker {replica.index}: {replica.cause}"
            for replica in self.replicas.values()
            if not replica.is_serving
        )

    # ------------------------------------------------------------------ decisions

    def _fill(self, now: float) -> list[Decision]:
        """Give out the places that are free: first to requests that are at home there."""
        decisions = [
            self._give(replica, request, now)
            for replica in self.replicas.values()
            for request in self._eligible(replica, replica.waiting)
        ]
        rooms = [replica for replica in self.replicas.values() if replica.has_room]
        for home in self.replicas.values() if rooms else ():
            for request in self._eligible_anywhere(home):
                fitting = (other for other in rooms if self._fits(other, request))
                replica = min(fitting, key=lambda other: (other.copy.load, other.load))
                decisions.append(self._give(replica, request, now))
        return decisions

    def _eligible(self, replica: ReplicaLoad, queue: deque[RoutedRequest]) -> Iterator[RoutedRequest]:
        """Requests of a queue that a replica takes, which leave it, in order; as many as it has room for."""
        while replica.has_room and queue and self._fits(replica, queue[0]):
            yield queue.popleft()

    def _eligible_anywhere(self, home: ReplicaLoad) -> Iterator[RoutedRequest]:
        """Requests that wait at a home and that some replica has room for, which leave its queue, in order."""
        kept: list[RoutedRequest] = []
        while home.waiting and any(replica.has_room for replica in self.replicas.values()):
            request = home.waiting.popleft()
            if any(self._fits(replica, request) for replica in self.replicas.values()):
                yield request
            else:
                kept.append(request)
        home.waiting.extendleft(reversed(kept))

    def _fits(self, replica: ReplicaLoad, request: RoutedRequest) -> bool:
        """A replica may be given this request now; it never goes back to weights of an older version."""
        return (
            replica.has_room
            and replica.index not in request.excluded
            and (replica.index == request.origin if request.stays else True)
            and replica.version >= self._oldest_allowed(request)
        )

    def _oldest_allowed(self, request: RoutedRequest) -> int:
        origin = self.replicas[request.origin]
        return origin.version if origin.is_serving else 0

    def _give(self, replica: ReplicaLoad, request: RoutedRequest, now: float) -> Decision:
        self._num_taken_over += replica.index != request.origin
        self._put(replica, request, now)
        return Decision(request=request, replica=replica.index)

    def _put(self, replica: ReplicaLoad, request: RoutedRequest, now: float) -> None:
        replica.pass_time(now)
        request.replica = replica.index
        replica.running[request] = None
        self._homes[request.episode] = replica.index
        self._homes.move_to_end(request.episode)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def _waiting(self) -> list[RoutedRequest]:
        return [request for home in self.replicas.values() for request in home.waiting]

    def _hopeless(self, requests: Iterable[RoutedRequest]) -> list[Decision]:
        """Requests that wait although nobody who serves may take them: they end with an error."""
        hopeless = [
            request
            for request in requests
            if request.replica is None
            and not any(self._may_serve(replica, request) for replica in self.replicas.values())
        ]
        for request in hopeless:
            del self._requests[request.origin, request.number]
            self.replicas[request.home].waiting.remove(request)
        return [Decision(request=request, replica=None) for request in hopeless]

    def _may_serve(self, replica: ReplicaLoad, request: RoutedRequest) -> bool:
        return (
            replica.is_serving
            and replica.index not in request.excluded
            and (not request.stays or replica.index == request.origin)
        )

    def _take_over(self, idle: ModelCopy, busiest: ModelCopy, now: float) -> list[Decision]:
        """As many requests as make both averages the same, or nearly: whichever of its replicas has least to do takes
        the one that came last of the replica that runs most, since it has the fewest tokens to compute again."""
        each, other = len(idle.members), len(busiest.members)
        count = (busiest.total_load * each - idle.total_load * other) // (each + other)
        decisions: list[Decision] = []
        while len(decisions) < count and (move := _next_move(idle, busiest)) is not None:
            request, giver, taker = move
            giver.pass_time(now)
            del giver.running[request]
            self._put(taker, request, now)
            self._num_taken_over += 1
            decisions.append(Decision(request=request, replica=taker.index, is_move=True))
        return decisions + self._fill(now)

    def _forget(self, request: RoutedRequest, now: float) -> None:
        del self._requests[request.origin, request.number]
        if request.replica is None:
            self.replicas[request.home].waiting.remove(request)
        elif (replica := self.replicas.get(request.replica)) is not None:
            replica.pass_time(now)
            replica.running.pop(request, None)  # it came back meanwhile, with none of its requests


def _next_move(idle: ModelCopy, busiest: ModelCopy) -> tuple[RoutedRequest, ReplicaLoad, ReplicaLoad] | None:
    """A request that may go on in another copy, its replica and the next one; None without any."""
    rooms = sorted(
        (replica for replica in idle.members if replica.has_room), key=lambda replica: replica.load
    )
    for giver in sorted(busiest.members, key=lambda replica: -len(replica.running)):
        for request in reversed(giver.running):
            takers = (replica for replica in rooms if replica.index not in request.excluded)
            if not request.stays and (taker := next(takers, None)) is not None:
                return request, giver, taker
    return None
