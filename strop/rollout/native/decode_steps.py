"""Decode steps in place of the model's own forward pass: their contract, and how far they may be from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from strop.engines.head import BANNED_LOGIT
from strop.rollout.native.key_values import KeyValueCache

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Share of the largest logit of a token that may be sampled, by which another step may differ from that of the model's
own forward pass."""


class DecodeSteps(Protocol):
    """Decode steps in place of the model's own forward pass."""

    is_disabled: bool
    """They are not used any more."""

    def logits(
        self,
        ids: Tensor,
        lengths: Tensor,
        positions: Tensor,
        cache: KeyValueCache,
        *,
        num_tokens: int,
        forward: Callable[[], Tensor],
    ) -> Tensor:
        """Logits [B, V] behind one token of each sequence; `forward` gives them by the model's own forward pass."""

    def weights_changed(self) -> None:
        """The weights may be others from now on."""

    def free(self) -> None:
        """Give memory back."""


def agrees(found: Tensor, expected: Tensor, dtype: torch.dtype, *, what: str) -> bool:
    """True if something gave what the model's own forward pass gives, which is finite; logs a warning where not.

    Args:
        found: what it gave.
        expected: by the model's own forward pass.
        dtype: of the products.
        what: these numbers, in words.
    """
    difference = float((found - expected).abs().max())
    # Beside the logit of a token that is never sampled, nothing would be a difference.
    largest = float(torch.where(expected > BANNED_LOGIT / 2, expected.abs(), 0.0).max())
    if difference <= TOLERANCE.get(dtype, 0.1) * largest:
        return True
    logger.warning(
        "generation goes through the model's own forward pass, which is slower: %s differ from its own by %.3g",
        what,
        difference,
    )
    return False
