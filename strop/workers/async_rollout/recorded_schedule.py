"""Requests that wait for the weights that sampled them before: how a run that was ahead of training is made again.

Concurrency: one asyncio loop; `reach` is called on it.
"""

from __future__ import annotations

import asyncio
import sys

from strop.run.replay_schedule import Spans


class RecordedSchedule:
    """Says of each request how many tokens it may have with the weights of the moment."""

    def __init__(self, version: int) -> None:
        """Args:
        version: of the weights.
        """
        self._version = version
        # By sample and by request: pairs of a version, and how many tokens the request has when it is through.
        self._spans: dict[str, dict[str, list[tuple[int, int]]]] = {}
        self._num_tokens: dict[str, int] = {}
        self._changed = asyncio.Event()

    def follow(self, uid: str, spans: Spans) -> None:
        """The requests of this prompt are to be as they were."""
        for tail, pairs in spans.items():
            until, ends = 0, []
            for version, count in pairs:
                until += count
                ends.append((version, until))
            name = f"{uid}/{tail}"
            self._spans.setdefault(_sample(name), {})[name] = ends

    async def reach(self, version: int) -> None:
        """The weights have this version from now on."""
        self._version = version
        self._tell()

    async def allowance(self, request_id: str, num_tokens: int) -> int:
        """Number of tokens that a request may have before it asks again; waits until it may have some.

        Args:
            request_id: of it.
            num_tokens: that it has.
        """
        spans = self._spans.get(_sample(request_id), {}).get(request_id, [])
        for number, (version, until) in enumerate(spans):
            if num_tokens < until:
                while self._version < version:
                    await self._wait()
                return until - num_tokens if number + 1 < len(spans) else sys.maxsize
        return sys.maxsize

    def heard(self, request_id: str, num_tokens: int) -> None:
        """A request has so many tokens now."""
        self._num_tokens[request_id] = num_tokens
        self._tell()

    def answered(self, request_id: str) -> None:
        """A request has its answer, whatever it was."""
        self._spans.get(_sample(request_id), {}).pop(request_id, None)
        self._num_tokens.pop(request_id, None)
        self._tell()

    def ended(self, sample_id: str) -> None:
        """A sample asks no more."""
        self._spans.pop(sample_id, None)
        self._tell()

    async def caught_up(self) -> None:
        """Wait until everything that the weights of the moment, and those before, sampled has been sampled."""
        while any(
            self._owes(name, spans) for requests in self._spans.values() for name, spans in requests.items()
        ):
            await self._wait()

    def _owes(self, name: str, spans: list[tuple[int, int]]) -> bool:
        limit = max((until for version, until in spans if version <= self._version), default=0)
        return self._num_tokens.get(name, 0) < limit

    async def _wait(self) -> None:
        changed = self._changed
        await changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _sample(request_id: str) -> str:
    return request_id.rpartition("#")[0]
