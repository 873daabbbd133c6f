"""Log-probs and entropy of tokens, through the language-model head, without a [tokens, vocabulary] tensor.

The head runs over chunks of tokens; the backward pass computes each chunk's logits again instead of
keeping them. For a vocabulary of 49 k and 10 k tokens the whole logits would be 2 GB in float32, twice.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from strop.engines import head_kernels
from strop.engines.cpu_products import add_weight_gradient, linear
from strop.engines.parallel.vocabulary import VocabularyShard
from strop.utils.glibc import LARGEST_HEAP_BYTES
from strop.utils.triton import has_kernels

HEAD_CHUNK_ELEMENTS = LARGEST_HEAP_BYTES // 4
"""Logits held at one time on a CPU, in numbers of float32, at least. Less would lie in the heap, where a chunk finds no
place between what was kept of those before."""
DEVICE_CHUNK_ELEMENTS = 1 << 28
"""The same on an accelerator: 1 GiB, since products of few rows leave it idle, and read the whole head each time."""
BANNED_LOGIT = -1e9
"""Logit of a token that is never sampled: finite, so that its part of an entropy is 0 and not 0 * inf."""


@dataclass(frozen=True, kw_only=True)
class ChosenTokens:
    """Log-probs of K chosen tokens at each of N places."""

    log_probs: Tensor
    """[N, K], with gradient."""
    is_likely: Tensor
    """[N, K] bool: the token is one of the policy's own most likely ones there."""


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
    product_dtype: torch.dtype | None = None
    """Half precision of the products on an accelerator, of which sums, logits and all that follows are float32; None:
    that of the hidden states."""
    vocabulary: VocabularyShard | None = None
    """Part of the vocabulary that the weight has the rows of; ids are those of the whole one. None: all of it."""

    def logits(self, hidden: Tensor, *, temperature: float | Tensor = 1.0) -> Tensor:
        """Logits divided by the temperature: [N, V] in at least float32, of the tokens of `vocabulary`. One definition
        for rollout and training.

        Banned tokens have BANNED_LOGIT, of which the exponential is 0 beside that of any other.
        """
        if self.product_dtype is not None:
            products = half_product(hidden.to(self.product_dtype), self.weight.to(self.product_dtype).T)
            return self.formed(
                products if self.bias is None else products.add_(self.bias), temperature=temperature
            )
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
            banned = self.banned
            if self.vocabulary is not None:
                banned = self.vocabulary.places(banned)
                banned = banned[banned >= 0]
            logits.index_fill_(1, banned, BANNED_LOGIT)
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
        self, hidden: Tensor, targets: Tensor, chosen: Tensor, *, temperature: float, num_likely: int
    ) -> tuple[Tensor, Tensor, ChosenTokens]:
        """As `log_probs`, with what there is to say of further tokens [N, K] at each place, from the same logits.

        The target may be among them. Tokens are likely that are among the `num_likely` most likely ones.
        """
        columns = torch.cat([targets[:, None], chosen], dim=1)
        log_probs, entropies, is_likely = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
            hidden, self.weight, self.bias, self, columns, temperature, num_likely
        )
        at = ChosenTokens(log_probs=log_probs[:, 1:], is_likely=is_likely[:, 1:])
        return log_probs[:, 0], entropies, at

    @torch.no_grad()
    def top_k(self, hidden: Tensor, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
        """The k most likely tokens, most likely first: ids [N, k] int64 and log-probs [N, k], without gradient."""
        ids = [torch.zeros((0, k), dtype=torch.int64, device=hidden.device)]
        log_probs = [hidden.new_zeros((0, k), dtype=_wide(hidden))]
        for logits in self._chunks(hidden, temperature):
            if self.vocabulary is None:
                values, places = torch.topk(logits, k, dim=-1)
            else:
                values, places = self.vocabulary.top_k(logits, k)
            ids.append(places)
            log_probs.append(values - self._logsumexp(logits)[:, None])
        return torch.cat(ids), torch.cat(log_probs)

    @torch.no_grad()
    def sum_pi_squared(self, hidden: Tensor, *, temperature: float) -> Tensor:
        """Sum over the vocabulary of p_v^2 [N], without gradient: exp(logsumexp(2 z) - 2 logsumexp(z))."""
        parts = [hidden.new_zeros(0, dtype=_wide(hidden))]
        for logits in self._chunks(hidden, temperature):
            parts.append(torch.exp(self._logsumexp(2 * logits) - 2 * self._logsumexp(logits)))
        return torch.cat(parts)

    def values(self, hidden: Tensor) -> Tensor:
        """Values [N] of a value head."""
        dtype = _wide(hidden)
        values = hidden.to(dtype) @ self.weight[0].to(dtype)
        return values if self.bias is None else values + self.bias[0].to(dtype)

    def with_products_ready(self) -> Head:
        """The same head, with its weight in the precision of the products."""
        if self.product_dtype is None or self.weight.dtype == self.product_dtype:
            return self
        return replace(self, weight=self.weight.to(self.product_dtype))

    def _logsumexp(self, logits: Tensor) -> Tensor:
        if self.vocabulary is not None:
            return self.vocabulary.logsumexp(logits)
        return torch.logsumexp(logits, dim=-1)

    def _chunks(self, hidden: Tensor, temperature: float) -> Iterator[Tensor]:
        """Logits [c, V] of some hidden states at a time."""
        head = self.with_products_ready()
        for rows in torch.split(hidden, chunk_rows(self.weight.shape[0], hidden.device)):
            yield head.logits(rows, temperature=temperature)


def _wide(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """Tokens per chunk of the head."""
    if device.type == "cpu":
        return -(-HEAD_CHUNK_ELEMENTS // vocab_size)
    rows = max(1, DEVICE_CHUNK_ELEMENTS // vocab_size)
    # What belongs to a chunk then begins at an aligned address: Triton makes another kernel for others.
    return rows // 16 * 16 or rows


def half_product(left: Tensor, right: Tensor) -> Tensor:
    """left [N, K] times right [K, M], of half precision, in float32 [N, M]."""
    if left.device.type == "cuda" and not (
        torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    ):
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_half_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add such a product to a total [N, M] in float32, on an accelerator without a tensor of its own for it."""
    if left.device.type == "cuda" and _adds_to_wide_totals():
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(half_product(left, right))


@functools.cache
def _adds_to_wide_totals() -> bool:
    """True where torch adds a product of half precision to a tensor in float32: earlier versions want the tensor to be
    of the precision of the factors (`_addmm_dtype_out_cuda`)."""
    half = torch.zeros(16, 16, dtype=torch.bfloat16, device="cuda")
    total = half.float()
    try:
        torch.addmm(total, half, half, out_dtype=torch.float32, out=total)
    except RuntimeError:
        return False
    return True


def _statistics(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp_v z_v [N] and sum_v p_v z_v [N] of logits z [N, V]."""
    if has_kernels(logits.device) and logits.dtype == torch.float32:
        return head_kernels.statistics(logits)
    normalizers = torch.logsumexp(logits, dim=-1)
    probs = torch.exp(logits - normalizers[:, None])
    return normalizers, torch.einsum("nv,nv->n", probs, logits)


def _gradient(
    logits: Tensor,
    statistics: tuple[Tensor, Tensor],
    targets: Tensor,
    grad_log_probs: Tensor,
    grad_entropies: Tensor | None,
    *,
    slope: Tensor | float,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient [N, V] by hidden W^T + b: of log-probs of targets [N, C] and of entropies [N], through logits [N, V].

    A target of -1 is none of these tokens.
    """
    normalizers, means = statistics
    if isinstance(slope, float) and has_kernels(logits.device) and logits.dtype == torch.float32:
        return head_kernels.gradient(
            logits, normalizers, means, targets, grad_log_probs, grad_entropies, slope=slope, dtype=dtype
        )
    probs = torch.exp(logits - normalizers[:, None])
    grad = probs * -grad_log_probs.sum(dim=-1, keepdim=True)
    at_targets = grad_log_probs.to(grad.dtype).masked_fill(targets < 0, 0)
    grad.scatter_add_(1, targets.clamp(min=0), at_targets)
    if grad_entropies is not None:  # dH/dz_v = -p_v (z_v - sum_u p_u z_u)
        grad.addcmul_(probs * (logits - means[:, None]), -grad_entropies[:, None])
    if not isinstance(slope, float) or slope != 1.0:
        grad.mul_(slope)
    return grad.to(dtype)


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
        step, vocabulary = chunk_rows(weight.shape[0], hidden.device), head.vocabulary
        head = head.with_products_ready()
        places = targets if vocabulary is None else vocabulary.places(targets)
        log_probs, normalizers, means, are_likely = [], [], [], []
        for start in range(0, len(targets), step):
            rows = slice(start, start + step)
            logits = head.logits(hidden[rows], temperature=temperature)  # [c, V]
            normalizer, mean = _statistics(logits)
            if vocabulary is None:
                at_targets = logits.gather(-1, places[rows])  # [c, C]
            else:
                normalizer, mean = vocabulary.statistics(normalizer, mean)
                at_targets = vocabulary.at(logits, places[rows])
            log_probs.append(at_targets - normalizer[:, None])
            if num_likely:
                top_k = torch.topk if vocabulary is None else vocabulary.top_k
                are_likely.append(at_targets >= top_k(logits, num_likely)[0][:, -1:])
            normalizers.append(normalizer)
            means.append(mean)
        if not log_probs:
            empty = hidden.new_zeros(0, dtype=_wide(hidden))
            log_probs, normalizers, means = [empty.new_zeros((0, targets.shape[1]))], [empty], [empty]
        normalizer, mean = torch.cat(normalizers), torch.cat(means)
        ctx.save_for_backward(hidden, weight, bias, places, head.banned, normalizer, mean)
        ctx.form, ctx.temperature = (head.scale, head.cap, head.product_dtype, vocabulary), temperature
        is_likely = torch.cat(are_likely) if are_likely else torch.zeros_like(targets, dtype=torch.bool)
        ctx.mark_non_differentiable(is_likely)
        return torch.cat(log_probs), normalizer - mean, is_likely

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropies, _ = grads  # None: that the loss does not depend on it
        hidden, weight, bias, places, banned, normalizers, means = ctx.saved_tensors
        head = Head(weight, bias, banned, *ctx.form).with_products_ready()
        step = chunk_rows(weight.shape[0], hidden.device)
        if grad_log_probs is None:
            grad_log_probs = torch.zeros(places.shape, dtype=torch.float32, device=places.device)
        grad_hidden = torch.empty_like(hidden)
        # Chunks are added in at least float32, also when sharding has cast the weight to bfloat16.
        wide = torch.promote_types(weight.dtype, torch.float32)
        _, trains_weight, trains_bias, *_ = ctx.needs_input_grad  # neither in a frozen head
        grad_weight = torch.zeros_like(weight, dtype=wide) if trains_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if trains_bias else None
        for start in range(0, len(places), step):
            rows = slice(start, start + step)
            logits = head.logits(hidden[rows], temperature=ctx.temperature)
            grad = _gradient(
                logits,
                (normalizers[rows], means[rows]),
                places[rows],
                grad_log_probs[rows],
                None if grad_entropies is None else grad_entropies[rows],
                slope=head.slope(logits, temperature=ctx.temperature),
                dtype=head.product_dtype or hidden.dtype,
            )
            if head.product_dtype is not None:
                grad_hidden[rows] = half_product(grad, head.weight).to(hidden.dtype)
            else:
                grad_hidden[rows] = linear(grad, weight.to(hidden.dtype).T)
            if grad_weight is not None and head.product_dtype is not None:
                _add_half_product(grad_weight, grad.T, hidden[rows].to(grad.dtype))
            elif grad_weight is not None and weight.dtype == wide:
                add_weight_gradient(grad_weight, grad.to(wide), hidden[rows].to(wide))
            elif grad_weight is not None:
                grad_weight.add_(grad.T.to(weight.dtype) @ hidden[rows].to(weight.dtype))
            if grad_bias is not None:
                grad_bias.add_(grad.sum(0, dtype=wide))
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )
