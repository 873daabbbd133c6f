"""Cache of the answers of episodes that have not been trained: an interrupted run goes on with them.

The cache stands between agents and the engines' client. Of each prompt that it follows it keeps every answer, also
the tokens of one that is still being generated. Given the answers of an earlier process, it answers from them: an agent
is started again, gets its old answers at once, and goes on where it was. Tools and environments do again what they did.
Where an agent asks for something else than the cache has, the rest of its sample is forgotten, and it plays on afresh.

Concurrency: one asyncio loop.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from strop.rollout.client import GenerateClient
from strop.rollout.replicas.partial_request import PartialRequest
from strop.rollout.types import OnToken, Sampling, StopReason, TokenOutput
from strop.run.replay_schedule import Spans, versions_in_spans
from strop.workers.async_rollout.recorded_schedule import RecordedSchedule


@dataclass(kw_only=True)
class RequestState:
    """State of one request of an episode."""

    asked: str
    """Digest of what was asked."""
    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[int]
    stop_reason: StopReason | None = None
    """None: it was still being generated."""


RequestStates = dict[str, RequestState]
"""Requests of one prompt, by their id."""


class GenerationCache:
    """Answers requests, with a client or from earlier answers."""

    def __init__(self, client: GenerateClient, schedule: RecordedSchedule | None = None) -> None:
        """Args:
        client: of the engines.
        schedule: says how many tokens a request may have with the weights of the moment; None: all.
        """
        self._client, self._schedule = client, schedule
        self._current: dict[str, RequestStates] = {}
        self._earlier: dict[str, RequestStates] = {}
        self.differing: list[str] = []
        """Ids of the requests that were not those of an earlier process."""

    def restore(self, uid: str, states: RequestStates | None = None) -> None:
        """Keep the answers of this prompt from now on; `states` are those of an earlier process."""
        self._current[uid] = {}
        if states:
            self._earlier[uid] = dict(states)

    def uids(self) -> list[str]:
        """Prompts whose answers are kept."""
        return list(self._current)

    def forget(self, uids: Collection[str]) -> dict[str, Spans]:
        """Drop the answers of prompts that were trained; gives the versions that sampled them, by uid."""
        spans: dict[str, Spans] = {}
        for uid in uids:
            requests = self._current.pop(uid, None)
            self._earlier.pop(uid, None)
            if requests is not None:
                spans[uid] = {
                    name.removeprefix(f"{uid}/"): versions_in_spans(state.versions)
                    for name, state in requests.items()
                }
        return spans

    async def states(self) -> dict[str, RequestStates]:
        """Copies of the requests of every prompt that is kept, by uid, with restored ones that were not asked for
        again."""
        return {
            uid: {
                name: copy.deepcopy(state)
                for name, state in {**self._earlier.get(uid, {}), **requests}.items()
            }
            for uid, requests in self._current.items()
        }

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """As the client does; what the cache has is not generated again."""
        uid = request_id.partition("/")[0]
        if uid not in self._current:
            options = {} if on_token is None else {"on_token": on_token}
            return await self._client.generate(request_id, prompt_ids, sampling, **options)
        request = PartialRequest(request_id, prompt_ids, sampling, on_token)
        state = RequestState(
            asked=_digest(prompt_ids, sampling),
            token_ids=request.token_ids,
            log_probs=request.log_probs,
            versions=request.versions,
        )
        old = self._old(uid, request_id, state.asked)
        self._current[uid][request_id] = state
        if old is not None:
            for token in zip(old.token_ids, old.log_probs, old.versions, strict=True):
                request.hear(*token)
            state.stop_reason = old.stop_reason or request.end()
        try:
            if state.stop_reason is None:
                state.stop_reason = await self._rest(request)
        finally:  # also of a request that its agent ended at a text
            if self._schedule is not None:
                self._schedule.answered(request_id)
        return request.output(state.stop_reason)

    def _old(self, uid: str, request_id: str, request_digest: str) -> RequestState | None:
        """The earlier state of this request; where it asks for something else, all of its sample is forgotten."""
        earlier = self._earlier.get(uid, {})
        old = earlier.pop(request_id, None)
        if old is None or old.asked == request_digest:
            return old
        sample = request_id.rpartition("#")[0]
        for name in [name for name in earlier if name.rpartition("#")[0] == sample]:
            del earlier[name]
        self.differing.append(request_id)
        return None

    async def _rest(self, request: PartialRequest) -> StopReason:
        """Generate what is missing."""
        while True:
            before = len(request.token_ids)
            limit = sys.maxsize
            if self._schedule is not None:
                limit = await self._schedule.allowance(request.request_id, before)
            if before and not request.num_attempts:
                request.num_attempts = 1  # before it was interrupted: it is asked for behind its tokens
            name, ids, sampling = request.rest()
            part = dataclasses.replace(sampling, max_tokens=min(limit, sampling.max_tokens))
            output = await self._client.generate(name, ids, part, on_token=request.hear)
            heard = len(request.token_ids) - before  # none of an engine that says only the whole
            for token in list(zip(output.token_ids, output.log_probs, output.versions, strict=True))[heard:]:
                request.hear(*token)
            if self._schedule is not None:
                self._schedule.heard(request.request_id, len(request.token_ids))
            if output.stop_reason != "length" or limit >= sampling.max_tokens:
                return output.stop_reason


def _digest(prompt_ids: Sequence[int], sampling: Sampling) -> str:
    request = [list(prompt_ids), sampling.key, sampling.position, sampling.max_tokens, sampling.temperature]
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()[:32]
