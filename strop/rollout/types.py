"""What goes into a rollout engine and what comes out: the contract that every engine keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

StopReason = Literal["stop", "length", "aborted"]


class EngineDied(RuntimeError):
    """An engine in processes of its own has ended or does not answer; the message says what its log says."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request samples."""

    key: int
    """64-bit key of the request's random stream (strop.utils.rng.random_key)."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: float = 1.0
    """Keep the smallest set of tokens with this probability; 1 is off."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 is off."""
    max_tokens: int
    """Most tokens to generate."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response; the one that did is its last token."""
    position: int = 0
    """Numbers of the random stream already used, when a response is continued."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; a request generates at least 1 token")
        if self.temperature < 0:
            raise ValueError(
                f"temperature is {self.temperature}; use 0 for greedy decoding or a value above it"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; use a probability in (0, 1], 1 for off")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; use 0 for off")
        if not 0 <= self.key < 1 << 64:
            raise ValueError(
                f"key is {self.key}; use a 64-bit number such as strop.utils.rng.random_key gives"
            )
        if self.position < 0:
            raise ValueError(f"position is {self.position}; it counts the numbers already used, from 0")


@dataclass(frozen=True, kw_only=True)
class TokenOutput:
    """What one request generated; the fields have one entry per token."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Natural log at the sampling temperature, over the whole vocabulary."""
    versions: tuple[int, ...]
    """Policy version that sampled each token."""
    stop_reason: StopReason


OnToken = Callable[[int, float, int], None]
"""Hears of each token as it is sampled: its id, log-prob and policy version."""

Ability = Literal["keyed", "continues_stream", "update_in_flight", "frees_weights", "media"]
"""What not every engine can do.

keyed: the tokens of a request depend on its key alone, whatever runs beside it (but for rounding).
continues_stream: with `Sampling.position`, what follows is what an undisturbed request would have sampled.
update_in_flight: `set_version` while requests run; they go on with the new weights.
frees_weights: `sleep(2)` gives the memory of the weights back, too.
media: prompts may be `MediaTokens`.
"""


class RolloutEngine(Protocol):
    """Generates tokens. One asyncio loop calls it; every method returns or raises within a deadline.

    Weights do not pass through here: they are written in place (by the actor that shares them, or into the engine's
    `sync.target.WeightTarget`), and `set_version` says so.
    """

    @property
    def abilities(self) -> frozenset[Ability]:
        """Which of the things that not every engine can do this one does."""
        ...

    @property
    def version(self) -> int:
        """Policy version that the weights hold."""
        ...

    async def generate(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        on_token: OnToken | None = None,
    ) -> TokenOutput:
        """Continue `prompt_ids` until a stop token, `max_tokens`, or an abort.

        `on_token` is called for each token, in order, before the whole is returned. A caller that is cancelled ends
        its request.

        Raises:
            ValueError: the request cannot be served by this model, or its id is already running.
        """
        ...

    async def set_version(self, version: int) -> None:
        """The weights now hold this policy version: forget everything computed with the one before.

        Raises:
            ValueError: the version goes backwards; or requests run, and the engine is not able to `update_in_flight`.
        """
        ...

    async def pause(self) -> None:
        """Hold every request where it is."""
        ...

    async def resume(self) -> None:
        """Go on after a pause."""
        ...

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests, or all, with the tokens they have; ids that do not run are passed over."""
        ...

    async def flush_cache(self) -> None:
        """Forget computed prompts, which would be used again."""
        ...

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give memory back: that of the cache (1), that of the engine's own weights as well (2).

        Raises:
            ValueError: a request is running; or the engine's weights stay where they are (2).
        """
        ...

    async def wake_up(self) -> None:
        """Take the memory again. Weights that were given back hold nothing until they are written and `set_version`."""
        ...

    async def health(self) -> Mapping[str, float]:
        """Generate one token for real, unless paused or asleep; numbers about the engine.

        Raises:
            Exception: it cannot do its work; the message says why.
        """
        ...

    async def close(self) -> None:
        """End the requests and whatever the engine started. A second call does nothing."""
        ...
