"""One sequence of a batch: what was asked, and the tokens so far."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from strop.protocol.routed_experts import RoutedExperts
from strop.protocol.trajectory import Media
from strop.rollout.types import OnToken, Sampling, StopReason, TokenOutput


@dataclass(eq=False)
class Request:
    """One sequence: what was asked, and the tokens so far."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    media: tuple[Media, ...] = ()
    """Images and videos that tokens of the prompt stand for."""
    on_token: OnToken | None = None
    """Hears of each token."""
    future: asyncio.Future[TokenOutput] | None = None
    """Gets the output once it has ended."""
    given_ids: tuple[int, ...] = field(init=False)
    """Tokens whose keys and values are computed before it runs: the prompt, and tokens that were sampled before it was
    put back."""
    given_key: Hashable = field(init=False)
    """Equal for equal `given_ids` with equal media; unlike a tuple of tokens it is hashed only once."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed: list[bytes] = field(default_factory=list)
    """Experts of each token that the model read, the first time it did (`RoutedExperts.tokens`); where they are
    recorded."""
    num_routed_layers: int = 0
    """Layers with experts; 0 where they are not recorded."""
    stop_reason: StopReason | None = None
    """Reason it ended."""

    def __post_init__(self) -> None:
        self.put_back()

    def put_back(self) -> None:
        """It will be computed anew from its first token to its last one."""
        self.given_ids = (*self.prompt_ids, *self.token_ids)
        tokens = np.array(self.given_ids, dtype=np.int64).tobytes()
        self.given_key = (tokens, *(item.key for item in self.media)) if self.media else tokens

    @property
    def max_length(self) -> int:
        """Tokens that it may have in the end."""
        return len(self.prompt_ids) + self.sampling.max_tokens

    @property
    def computed_ids(self) -> tuple[int, ...]:
        """Tokens whose keys and values are known while it runs, or when it ended: all but the last one sampled."""
        return (*self.prompt_ids, *self.token_ids[:-1])

    def ends_with(self, token: int, log_prob: float, version: int) -> bool:
        """Take one more token of weights of this version; True where it is the last one."""
        self.token_ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if self.on_token is not None:
            self.on_token(token, log_prob, version)
        if token in self.sampling.stop_token_ids:
            self.end("stop")
        elif len(self.token_ids) >= self.sampling.max_tokens:
            self.end("length")
        else:
            return False
        return True

    def end(self, stop_reason: StopReason) -> None:
        """Nothing more is to come: whoever waits gets what was generated. Only the first call counts."""
        if self.stop_reason is not None:
            return
        self.stop_reason = stop_reason
        if self.future is not None and not self.future.done():
            output = TokenOutput(
                token_ids=tuple(self.token_ids),
                log_probs=tuple(self.log_probs),
                versions=tuple(self.versions),
                stop_reason=stop_reason,
                routed_experts=self._routed_experts(),
            )
            self.future.set_result(output)

    def _routed_experts(self) -> RoutedExperts | None:
        if not self.num_routed_layers or not self.routed:
            return None
        num_chosen = len(self.routed[0]) // (2 * self.num_routed_layers)  # two bytes each
        return RoutedExperts(
            num_layers=self.num_routed_layers, num_chosen=num_chosen, tokens=tuple(self.routed)
        )
