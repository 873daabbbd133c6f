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
    records_routing: bool = False
    """Its output has the experts of its tokens (rollout.router_replay), and is not whole without."""
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
        """Enter a token, and tell the caller. One behind the last counts for nothing."""
        if self._end() is not None:
            return
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
        """Reason of its end where no engine said so; None: more is to come, be it the experts of its tokens."""
        return None if self.records_routing else self._end()

    def answered(self, output: TokenOutput, *, heard: int) -> TokenOutput:
        """Output for the caller.

        Args:
            output: of the engine that answered last.
            heard: tokens of it that have been entered: none of an engine that says only the whole.
        """
        for token in list(zip(output.token_ids, output.log_probs, output.versions, strict=True))[heard:]:
            self.hear(*token)
        self.routed_experts = output.routed_experts
        return self.output(self._end() or output.stop_reason)

    def _end(self) -> StopReason | None:
        """Reason for which no token follows."""
        if self.token_ids and self.token_ids[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.token_ids) >= self.sampling.max_tokens else None

    def rest(self) -> tuple[str, Sequence[int], Sampling]:
        """Request for the rest, of one more attempt: an id of its own, the prompt with the tokens so far, and the
        sampling. Where only the experts are missing, an engine reads all tokens but the last one for them, as a model
        has read them, and samples one that counts for nothing."""
        self.num_attempts += 1
        if self.num_attempts == 1:
            return self.request_id, self.prompt_ids, self.sampling
        used = len(self.token_ids) if self._end() is None else len(self.token_ids) - 1
        ids: Sequence[int] = [*self.prompt_ids, *self.token_ids[:used]]
        if media := media_of(self.prompt_ids):
            ids = MediaTokens(ids, media)
        sampling = dataclasses.replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - used if self._end() is None else 1,
            position=self.sampling.position + used,
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
