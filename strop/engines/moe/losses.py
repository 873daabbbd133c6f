"""Losses of routers: against large logits (z-loss) and against experts that are chosen too often (balance loss).

With T tokens in the optimizer batch, E experts in a layer of which each token goes to k, and logits x_t [E] of token t,
each layer adds

    z:        1 / T  sum_t (log sum_i exp x_ti)^2
    balance:  E sum_i f_i P_i,   f_i = tokens of expert i / (k T),   P_i = 1 / T  sum_t p_ti

with p the softmax of the logits, or for a router that takes sigmoids, these divided by their sum. The balance loss is 1
where all experts are chosen alike, and has no gradient by f. Both are sums over tokens once T and f are known, so the
counts of the whole optimizer batch are taken before, and neither loss depends on how the batch is cut.

Sources: Zoph et al. 2022, arXiv:2202.08906, eq. 5; Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6, whose tokens go to
one expert; with sigmoids: DeepSeek-AI 2024, arXiv:2412.19437, eq. 17 to 20, over the batch in place of a sequence.
Counts over the whole batch: Qiu et al. 2025, arXiv:2501.11873.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.utils.device import sent


class RouterLoss:
    """Losses of the routers of one optimizer batch."""

    def __init__(
        self, *, z_coef: float, balance_coef: float, num_tokens: float, shares: Tensor | None = None
    ) -> None:
        """Args:
        z_coef, balance_coef: factors of the two losses in each layer.
        num_tokens: T.
        shares: f [L, E], of which each layer's add up to 1; needed where `balance_coef` is not 0.
        """
        self._z_coef, self._balance_coef = z_coef, balance_coef
        self._num_tokens, self._shares = num_tokens, shares
        self.values = torch.zeros(2, dtype=torch.float64)
        """z-loss and balance loss of the passes so far, of this rank's tokens, added up over the layers, without their
        factors."""

    def term(
        self, number: int, logits: Tensor, *, is_sigmoid: bool, num_rows: Tensor, is_new: bool
    ) -> Tensor:
        """Loss of some tokens in one layer, differentiable, a scalar in at least float32.

        Args:
            number: of the layer.
            logits: [n, E].
            is_sigmoid: how the router makes probabilities of them.
            num_rows: [n], rows of the batch that each token is part of.
            is_new: these tokens are not among the `values` in this layer.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        rows = num_rows.to(logits) / self._num_tokens
        z = (rows * logits.logsumexp(-1).square()).sum()
        values, term = [z], self._z_coef * z
        if self._shares is not None:
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True) if is_sigmoid else logits.softmax(-1)
            self._shares = sent(self._shares, logits.device)
            shares = self._shares[number].to(logits)
            balance = logits.shape[-1] * (rows * (probabilities @ shares)).sum()
            values.append(balance)
            term = term + self._balance_coef * balance
        if is_new:
            self._note(values)
        return term

    @torch.no_grad()
    def _note(self, values: list[Tensor]) -> None:
        self.values = sent(self.values, values[0].device)
        self.values[: len(values)] += torch.stack(values).double()
