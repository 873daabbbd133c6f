"""Training steps in plain torch and transformers: right-padded batches with a mask, log_softmax, AdamW.

No packing, no shared prompt, no chunked head, no ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Prompt [P] and response [R]."""


def token_weights(first: int, count: int) -> Tensor:
    """Weights of the tokens `first` ... of the flat token axis, of both signs."""
    return torch.cos(1.0 + torch.arange(first, first + count, dtype=torch.float64))


def policy_terms(log_probs: Tensor, entropies: Tensor, weights: Tensor) -> Tensor:
    """A loss that is not linear in the log-probs: sum_t w_t (l_t + 0.3 exp(l_t) + 0.2 H_t)."""
    return (weights.to(log_probs) * (log_probs + 0.3 * torch.exp(log_probs) + 0.2 * entropies)).sum()


def value_terms(values: Tensor, weights: Tensor) -> Tensor:
    """sum_t (v_t - w_t)^2 / 2: the weights are the returns."""
    return 0.5 * (values - weights.to(values)).square().sum()


class PlainTraining:
    """Steps of one model on all rows at once."""

    def __init__(
        self,
        folder: Path,
        *,
        lr: float,
        eps: float,
        weight_decay: float,
        max_grad_norm: float,
        values: bool = False,
    ) -> None:
        kind: Any = (
            transformers.AutoModelForSequenceClassification if values else transformers.AutoModelForCausalLM
        )
        options = {"num_labels": 1} if values else {}
        self.model: Any = kind.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="sdpa", **options
        ).eval()
        self._values = values
        self._max_grad_norm = max_grad_norm
        parameters = list(self.model.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
                {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
            ],
            lr=lr,
            eps=eps,
        )

    def outputs(self, pairs: Sequence[Pair]) -> list[tuple[Tensor, Tensor]]:
        """(log-probs, entropies) [R] of each row, or (values, values)."""
        length = max(len(p) + len(r) for p, r in pairs)
        ids = torch.zeros(len(pairs), length, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, response) in enumerate(pairs):
            size = len(prompt) + len(response)
            ids[row, :size] = torch.cat([prompt, response])
            mask[row, :size] = 1
        if self._values:
            hidden = self.model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state
            each = self.model.score(hidden)[..., 0]
            return [(each[i, len(p) - 1 : len(p) + len(r) - 1],) * 2 for i, (p, r) in enumerate(pairs)]
        logits = self.model(input_ids=ids, attention_mask=mask).logits
        result = []
        for row, (prompt, response) in enumerate(pairs):
            here = logits[row, len(prompt) - 1 : len(prompt) + len(response) - 1].log_softmax(-1)
            log_probs = here[torch.arange(len(response)), response]
            result.append((log_probs, -(here.exp() * here).sum(-1)))
        return result

    def step(self, pairs: Sequence[Pair], first_tokens: Sequence[int]) -> tuple[float, float]:
        """Loss and gradient norm of one step on these rows, each with its place in the flat token axis."""
        loss = torch.zeros((), dtype=torch.float64)
        for (a, b), first in zip(self.outputs(pairs), first_tokens, strict=True):
            weights = token_weights(first, len(a))
            loss = loss + (value_terms(a, weights) if self._values else policy_terms(a, b, weights))
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self._optimizer.step()
        return float(loss.detach()), float(norm)

    def weights(self) -> dict[str, NDArray[np.float64]]:
        """All parameters, tied ones once."""
        return {name: p.detach().numpy().copy() for name, p in self.model.named_parameters()}
