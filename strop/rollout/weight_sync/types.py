"""Types of a weight sync: its place, its report and its errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

REFUSAL = "the rollout worker keeps refusing to generate until a complete sync arrives"
"""End of every error of a sync: its meaning for the rollout."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Address at which the receivers of one sender meet it; plain data that the controller hands on."""

    host: str
    """Address of the sender's node, as the receivers reach it."""
    port: int
    """Port the sender listens on, on that address only."""
    session: str = field(repr=False)
    """Secret of the sender's session: only who proves to know it may join."""
    memory: str
    """A file in shared memory by which a receiver finds out whether it is on the sender's node; "" for none."""
    num_receivers: int
    """Rollout workers that will join, numbered from 0."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One sync, complete and verified or failed, as one process saw it."""

    version: int
    """Policy version of the weights."""
    transport: str
    """`cuda_ipc`, `shared_memory`, `store` or `collective`; `shards` on ranks that put theirs into shared memory."""
    num_tensors: int
    """Tensors sent or loaded, tied ones counted once."""
    num_bytes: int
    """Bytes of these tensors."""
    sent_bytes: int
    """Bytes that went to each receiver, over the network often fewer than `num_bytes`: tensors that did not change stay
    away, and of others the changed elements may be enough. On a rank of the actor those that it sent itself; of shared
    memory rank 0 says what all have put there."""
    seconds: float
    """From begin to verdict, in seconds, with the wait for the other side."""
    digest: str
    """`engines.checksum.models.combine_digests` of what was sent and what is live; "" on ranks of the actor but 0."""
    failure: str = ""
    """Reason for which the sync was not completed; "" where it was."""

    @classmethod
    def failed(cls, version: int, error: SyncError) -> Self:
        """Report of a sync that was not completed."""
        return cls(
            version=version,
            transport="",
            num_tensors=0,
            num_bytes=0,
            sent_bytes=0,
            seconds=0.0,
            digest="",
            failure=str(error),
        )


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A text, and what the trainer's model says of it, for engines whose weights cannot be read back."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    """Of all tokens but the first, at temperature 1."""


class SyncError(RuntimeError):
    """A sync that did not succeed; the rollout worker has no verified weights, unless the message says so."""


class SyncIncomplete(SyncError):
    """Not every tensor arrived."""


class SyncCorrupted(SyncError):
    """Something arrived that is not what was sent, or the engine does not hold what arrived."""


class SyncRefused(SyncError):
    """The receiver did not let the sync begin, so nothing was overwritten."""


class UnverifiedWeights(RuntimeError):
    """Tokens were asked of a rollout worker that holds no complete, verified version."""
