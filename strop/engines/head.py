"""Log-probs and entropy of tokens, through the language-model head, without a [tokens, vocabulary] tensor.

The head runs over chunks of tokens; the backward pass computes each chunk's logits again instead of
keeping them. For a vocabulary of 49 k and 10 k tokens the whole logits would be 2 GB in float32, twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strop.engines.products import linear

HEAD_CHUNK_ELEMENTS = 1 << 23
"""Logits held at one time, in numbers: 32 MiB in float32."""
BANNED_LOGIT = -1e9
"""Logit of a token that is never sampled: finite, so that its part of an entropy is 0 and not 0 * inf."""


@dataclass(frozen=True, kw_only=True)
class ChosenTokens:
    """What the policy says about K chosen tokens at each of N places."""

    log_probs: Tensor
    """[N, K], with gradient."""
    is_likely: Tensor
    """[N, K] bool: the token is one of the policy's own K most likely there."""


@dataclass(frozen=True)
class Head:
    """A language-model head, or a value head, over final hidden states [N, D]; results are in at least float32.

    With z = cap(scale (hidden W^T + b)) / temperature, as it was while sampling.
    """

    weight: Tensor
    """[V, D]; [1, D] of a value head."""
    bias: Tensor | None = None
    """[V] or None."""
    banned: Tensor | None = None
    """Ids of tokens with probability zero."""
    scale: float = 1.0
    """Factor of all logits (Cohere, Granite)."""
    cap: float | None = None
    """Logits z become cap tanh(z / cap) (Gemma 2)."""

    def logits(self, hidden: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
        """Logits divided by the temperature: [N, V] in at least float32. One definition for rollout and training.

        Banned tokens have BANNED_LOGIT, of which the exponential is 0 beside that of any other.
        """
        weight, bias = self.weight.to(hidden.dtype), None if self.bias is None else self.bias.to(hidden.dtype)
        return self.formed(linear(hidden, weight, bias), temperature=temperature)

    def formed(self, logits: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
        """The same of hidden W^T + b [N, V], which may be written to."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        if not (isinstance(temperature, float) and temperature == 1.0):
            logits = logits / temperature
        if self.banned is not None:
            logits[:, self.banned] = BANNED_LOGIT
        return logits

    def slope(self, logits: Tensor, *, temperature: float) -> Tensor | float:
        """Derivative of `logits` [N, V] by hidden W^T + b: one number, or [N, V]. Of no use for banned ones."""
        slope: Tensor | float = self.scale / temperature
        if self.cap is not None:
            slope = slope * (1 - (logits * (temperature / self.cap)).square()).clamp_(min=0)
        return slope

    def log_probs(self, hidden: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-prob [N] of each target token [N] and entropy [N] of its distribution, both differentiable.

        log p(y) = z_y - logsumexp(z) and H = logsumexp(z) - sum_v p_v z_v, in natural units.
        """
        log_probs, entropies, _ = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, self, targets[:, None], temperature, 0
        )
        return log_probs[:, 0], entropies

    def log_probs_at(
        self, hidden: Tensor, targets: Tensor, chosen: Tensor, *, temperature: float
    ) -> tuple[Tensor, Tensor, ChosenTokens]:
        """As `log_probs`, with what there is to say of further tokens [N, K] at each place, from the same logits.

        The target may be among them.
        """
        columns = torch.cat([targets[:, None], chosen], dim=1)
        log_probs, entropies, is_likely = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, self, columns, temperature, chosen.shape[1]
        )
        at = ChosenTokens(log_probs=log_probs[:, 1:], is_likely=is_likely[:, 1:])
        return log_probs[:, 0], entropies, at

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
        """The k most likely tokens, most likely first: ids [N, k] int64 and log-probs [N, k], without gradient."""
        ids = [torch.zeros((0, k), dtype=torch.int64, device=hidden.device)]
        log_probs = [hidden.new_zeros((0, k), dtype=_wide(hidden))]
        for logits in self._chunks(hidden, temperature):
            values, places = torch.topk(logits, k, dim=-1)
            ids.append(places)
            log_probs.append(values - torch.logsumexp(logits, dim=-1, keepdim=True))
        return torch.cat(ids), torch.cat(log_probs)

    @torch.no_grad()
    def sum_pi_squared(self, hidden: Tensor, *, temperature: float) -> Tensor:
        """Sum over the vocabulary of p_v^2 [N], without gradient: exp(logsumexp(2 z) - 2 logsumexp(z))."""
        parts = [hidden.new_zeros(0, dtype=_wide(hidden))]
        for logits in self._chunks(hidden, temperature):
            parts.append(torch.exp(torch.logsumexp(2 * logits, dim=-1) - 2 * torch.logsumexp(logits, dim=-1)))
        return torch.cat(parts)

    def values(self, hidden: Tensor) -> Tensor:
        """Values [N] of a value head."""
        dtype = _wide(hidden)
        values = hidden.to(dtype) @ self.weight[0].to(dtype)
        return values if self.bias is None else values + self.bias[0].to(dtype)

    def _chunks(self, hidden: Tensor, temperature: float) -> Iterator[Tensor]:
        """Logits [c, V] of some hidden states at a time."""
        for rows in torch.split(hidden, chunk_rows(self.weight.shape[0])):
            yield self.logits(rows, temperature=temperature)


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def chunk_rows(vocab_size: int) -> int:
    """Tokens per chunk of the head."""
    return max(1, HEAD_CHUNK_ELEMENTS // vocab_size)


class _TokenLogProbs(torch.autograd.Function):
    """Log-probs of targets [N, C] and entropies [N]; with num_likely, also which targets [N, C] are among as many most
    likely tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        head: Head,
        targets: Tensor,
        temperature: float,
        num_likely: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        step = chunk_rows(weight.shape[0])
        log_probs, entropies, are_likely = [], [], []
        for start in range(0, len(targets), step):
            rows = slice(start, start + step)
            logits = head.logits(hidden[rows], temperature=temperature)  # [c, V]
            normalizer = torch.logsumexp(logits, dim=-1)
            at_targets = logits.gather(-1, targets[rows])  # [c, C]
            log_probs.append(at_targets - normalizer[:, None])
            if num_likely:
                least = torch.topk(logits, num_likely, dim=-1).values[:, -1:]
                are_likely.append(at_targets >= least)
            probs = torch.exp(logits - normalizer[:, None])
            entropies.append(normalizer - torch.einsum("nv,nv->n", probs, logits))
        ctx.save_for_backward(hidden, weight, bias, targets, head.banned)
        ctx.form, ctx.temperature = (head.scale, head.cap), temperature
        if not log_probs:
            empty = hidden.new_zeros(0, dtype=_wide(hidden))
            log_probs, entropies = [empty.new_zeros((0, targets.shape[1]))], [empty]
        is_likely = torch.cat(are_likely) if are_likely else torch.zeros_like(targets, dtype=torch.bool)
        ctx.mark_non_differentiable(is_likely)
        return torch.cat(log_probs), torch.cat(entropies), is_likely

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropies, _ = grads  # None: that the loss does not depend on it
        hidden, weight, bias, targets, banned = ctx.saved_tensors
        head = Head(weight, bias, banned, *ctx.form)
        step = chunk_rows(weight.shape[0])
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
        grad_hidden = torch.empty_like(hidden)
        # Chunks are added in at least float32, also when sharding has cast the weight to bfloat16.
        wide = torch.promote_types(weight.dtype, torch.float32)
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad  # neither in a frozen head
        grad_weight = torch.zeros_like(weight, dtype=wide) if trains_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if trains_bias else None
        for start in range(0, len(targets), step):
            rows = slice(start, start + step)
            logits = head.logits(hidden[rows], temperature=ctx.temperature)
            normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
            probs = torch.exp(logits - normalizer)
            grad = probs * -grad_log_probs[rows].sum(dim=-1, keepdim=True)
            grad.scatter_add_(1, targets[rows], grad_log_probs[rows].to(grad.dtype))
            if grad_entropies is not None:
                # dH/dz_v = -p_v (z_v - sum_u p_u z_u)
                mean = torch.einsum("nv,nv->n", probs, logits)[:, None]
                grad.addcmul_(probs * (logits - mean), -grad_entropies[rows, None])
            if (
                not isinstance(slope := head.slope(logits, temperature=ctx.temperature), float)
                or slope != 1.0
            ):
                grad.mul_(slope)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = linear(grad, weight.to(hidden.dtype).T)
            if grad_weight is not None and weight.dtype == wide:
                grad_weight.addmm_(grad.T.to(wide), hidden[rows].to(wide))
            elif grad_weight is not None:
                grad_weight.add_(grad.T.to(weight.dtype) @ hidden[rows].to(weight.dtype))
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )
