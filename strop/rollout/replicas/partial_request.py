"""A request that is answered in several parts: the tokens so far, wherever they came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from strop.protocol.routed_experts import RoutedExperts
from strop.protocol.trajectory import MediaTokens, media_of
from strop.rollout.types import OnToken, Sampling, StopReason, TokenOutput


@dataclass
class PartialRequest:
    """A request, and its tokens so far, from whichever engine."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling
    on_token: OnToken | None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: RoutedExperts | None = None
    """Of the engine that answered last, which read everything before."""
    losses: list[str] = field(default_factory=list)
    """Reasons for which engines lost it, one after another."""
    num_attempts: int = 0
    """Times that `rest` was asked for."""
    _num_told: int = 0

    def hear(self, token: int, log_prob: float, version: int) -> None:
        """Enter a token, and tell the caller."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if self.on_token is not None and len(self.token_ids) > self._num_told:
            self.on_token(token, log_prob, version)

    def begin_again(self) -> None:
        """Forget the tokens so far, which come again; the caller is told of none a second time."""
        self._num_told = max(self._num_told, len(self.token_ids))
        self.token_ids, self.log_probs, self.versions = [], [], []

    def end(self) -> StopReason | None:
        """Reason of its end where no engine said so; None: more is to come."""
        if self.token_ids and self.token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.sampling.max_tokens else None

    def rest(self) -> tuple[str, Sequence[int], Sampling]:
        """Request for the rest, of one more attempt: an id of its own, the prompt with the tokens so far, and the
        sampling."""
        used = len(self.token_ids)
        return self._behind(used, max_tokens=self.sampling.max_tokens - used)

    def reading(self) -> tuple[str, Sequence[int], Sampling]:
        """Request that has an engine read what a model has read of prompt and tokens, all but the last one, for the
        record of their experts. Its own token counts for nothing."""
        return self._behind(len(self.token_ids) - 1, max_tokens=1)

    def _behind(self, used: int, *, max_tokens: int) -> tuple[str, Sequence[int], Sampling]:
        """Request that goes on behind the first `used` tokens."""
        self.num_attempts += 1
        if self.num_attempts == 1:
            return self.request_id, self.prompt_ids, self.sampling
        ids: Sequence[int] = [*self.prompt_ids, *self.token_ids[:used]]
        if media := media_of(self.prompt_ids):
            ids = MediaTokens(ids, media)
        sampling = dataclasses.replace(
            self.sampling, max_tokens=max_tokens, position=self.sampling.position + used
        )
        return f"{self.request_id}~{self.num_attempts - 1}", ids, sampling

    def output(self, stop_reason: StopReason) -> TokenOutput:
        """Output for the caller."""
        return TokenOutput(
            token_ids=tuple(self.token_ids),
            log_probs=tuple(self.log_probs),
            versions=tuple(self.versions),
            stop_reason=stop_reason,
            routed_experts=self.routed_experts,
        )
