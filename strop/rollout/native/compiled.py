"""Functions of the engine compiled for the processor; torch computes what is not."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.attention_form import AttentionForm


class CompiledDecoding(Protocol):
    """Functions of a decode step; each gives None where it is not for such tensors, or nothing can be compiled."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        keys: Tensor,
        values: Tensor,
        lengths: Tensor,
        form: AttentionForm,
    ) -> Tensor | None:
        """Attention output [B, H, D] for query [B, H, D]; key and value [B, Hkv, D] enter the cache.

        Args:
            query, key, value: of one new token per sequence.
            keys, values: [B, Hkv, T, D], the cache.
            lengths: [B] int64, tokens already there; each is below T.
            form: of the layer, without chunks, sinks and caps.
        """

    def sample(
        self,
        logits: Tensor,
        temperature: NDArray[np.float64],
        key: NDArray[np.uint64],
        position: NDArray[np.int64],
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [B] int64 and their log-probs [B] of the whole distribution of logits [B, V].

        Args:
            logits: as they are; V is not 0.
            temperature: [B]; 0 takes the likeliest token, and gives its log-prob at 1.
            key, position: [B] of the random number of each row.
        """
