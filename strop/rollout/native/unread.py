"""Sampled tokens on their way to host memory.

On an accelerator the next decode step is launched with the tokens where they are, and they are read while it runs: the
device never waits for the host. That a sequence has ended at a stop token is then seen one step late; what it computed
in that step is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.rollout.native.request import Request
from strop.utils.device import sent
from strop.utils.host_copy import HostCopy


@dataclass(frozen=True, kw_only=True)
class Unread:
    """One token of each of some running sequences, in consecutive slots."""

    requests: Sequence[Request]
    first: int
    """Slot of the first."""
    version: int
    """Of the weights that gave them."""
    tokens: Tensor
    """[n] int64 on the device."""
    copy: HostCopy
    places: Sequence[int]
    """Of these sequences in the copy, which may have more."""

    @classmethod
    def of(
        cls, requests: Sequence[Request], tokens: Tensor, log_probs: Tensor, *, first: int, version: int
    ) -> Unread:
        """Begin to copy tokens [n] and log-probs [n]."""
        places = range(len(requests))
        copy = HostCopy({"tokens": tokens, "log_probs": log_probs})
        return cls(requests=requests, first=first, version=version, tokens=tokens, copy=copy, places=places)

    def read(self) -> tuple[list[int], list[float]]:
        """Tokens and log-probs, when they are there."""
        tokens, log_probs = (values.tolist() for values in self.copy.wait().values())
        return [tokens[place] for place in self.places], [log_probs[place] for place in self.places]

    def of_running(self, running: Sequence[Request]) -> Unread | None:
        """Tokens of the sequences that still run, in the order of their slots; None where none does."""
        if len(running) == len(self.requests):
            return self
        at = {id(request): place for place, request in enumerate(self.requests)}
        chosen = [at[id(request)] for request in running]
        if not chosen:
            return None
        return Unread(
            requests=list(running),
            first=0,
            version=self.version,
            tokens=self.tokens[sent(torch.tensor(chosen), self.tokens.device)],
            copy=self.copy,
            places=[self.places[place] for place in chosen],
        )

    @property
    def may_end(self) -> bool:
        """One of these tokens is the last that its sequence may have."""
        return any(len(request.token_ids) + 1 >= request.sampling.max_tokens for request in self.requests)
