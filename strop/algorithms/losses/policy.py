"""The policy's whole loss of some tokens: the policy's term, entropy, KL and the distance to a teacher.

A pure function of tensors and of a resolved `LossSpec`. The loss of an optimizer batch is the sum over its
micro-batches and ranks, whose tokens bring weights that were computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, row_numbers, valid_tokens_per_row, weighted_sum
from strop.algorithms.kl import kl_penalty
from strop.algorithms.losses.distillation import DISTILLATION_STATISTIC, reverse_kl_terms, topk_forward_kl
from strop.algorithms.losses.spec import LossSpec
from strop.algorithms.losses.terms import PolicyLossTerms, policy_loss_terms, prepare_columns
from strop.algorithms.registry import verl_convention
from strop.base.metrics import Metric
from strop.base.tensor_metrics import TensorMetrics

PG_LOSS = Metric("actor/pg_loss", "reward", "the policy's term of the loss, as it is reduced")
ENTROPY = Metric("actor/entropy", "nats", "of the policy, mean over trained tokens")
KL_LOSS = Metric(
    "actor/kl_loss", "nats", "KL to the reference in the loss, if there is one, mean over trained tokens"
)
STATISTIC = Metric("actor/<statistic>", "", "what a policy loss of your own notes, mean over trained tokens")
DISTILLATION_LOSS = Metric(
    "distillation/loss", "nats", "distance to the teacher, when there is one, as it is reduced"
)
DISTILLATION_ABS_LOSS = Metric("distillation/abs_loss", "nats", "its size, mean over trained tokens")
DISTILLATION_EXTREME = Metric(
    "distillation/loss_{min,max}", "nats", "smallest and largest of a trained token"
)


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """The rows of one optimizer batch that this rank has, their tokens end to end, as the loss takes them."""

    columns: Mapping[str, Tensor]
    """[N] (or [N, K]) by the loss's own names, `row_ids` among them."""
    weights: Tensor
    """[N]: of each token in the loss of the whole optimizer batch; 0 where it is not trained on."""
    num_trained: int
    """Tokens of these rows that are trained on."""
    row_lengths: Tensor
    """[B] int64, in host memory: tokens of each row."""
    totals: BatchTotals
    """Counts of the whole optimizer batch, over all ranks."""

    def rows_that_move(self, spec: LossSpec) -> list[bool]:
        """[B]: which rows have a term that depends on the policy."""
        if spec.moves_every_row:
            return [True] * len(self.row_lengths)
        moving = (self.columns["advantages"] * self.weights) != 0
        per_row: list[int] = valid_tokens_per_row(moving, self.row_lengths).tolist()
        return [count > 0 for count in per_row]

    def prepared(self, spec: LossSpec, whole: Mapping[str, Tensor], mask: Tensor, own: slice) -> PolicyBatch:
        """With what the loss computes once from all tokens of the optimizer batch, over all ranks.

        Args:
            whole: log_probs (before the update), old_log_probs and advantages [N of all ranks], end to end.
            mask: [N of all ranks], true on tokens that are trained on.
            own: where the tokens of these rows are among them.
        """
        made = prepare_columns(spec.name, mask=mask, columns=whole, settings=spec.settings)
        return replace(self, columns={**self.columns, **{name: made[name][own] for name in made}})

    def to(self, device: torch.device) -> PolicyBatch:
        """On a device, without waiting for it."""
        columns = {name: column.to(device, non_blocking=True) for name, column in self.columns.items()}
        return replace(self, columns=columns, weights=self.weights.to(device, non_blocking=True))

    def at(self, index: Tensor) -> PolicyTokens:
        """The tokens at these places [M], in host memory, of whole rows."""
        here = index.to(self.weights.device, non_blocking=True)
        return PolicyTokens(
            columns={name: column[here] for name, column in self.columns.items()},
            weights=self.weights[here],
            batch=self,
            index=index,
        )


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """Some tokens of whole rows of an optimizer batch."""

    columns: Mapping[str, Tensor]
    """[M] by name."""
    weights: Tensor
    """[M]."""
    batch: PolicyBatch
    """Which they are of."""
    index: Tensor
    """[M], in host memory: their places in it."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of some tokens, and what is seen on the way, without gradient and on the device."""

    loss: Tensor
    """Scalar, with gradient."""
    trained: Tensor
    """[M] bool."""
    shares: Mapping[str, Tensor]
    """Scalars by metric name, of which the optimizer batch has the sum: parts of the loss."""
    tokens: Mapping[str, Tensor]
    """[M] by metric name, of which the optimizer batch has the mean over trained tokens."""
    distances: Tensor | None = None
    """[M]: distance to the teacher."""
    own_means: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars by metric name: means over these tokens that a user's loss returned."""


def policy_batch(
    spec: LossSpec,
    columns: Mapping[str, Tensor],
    *,
    mask: Tensor,
    row_lengths: Tensor,
    totals: BatchTotals,
) -> PolicyBatch:
    """Rows of an optimizer batch, with the weight of each token.

    Args:
        spec: of the loss.
        columns: [N] (or [N, K]) by the loss's own names, in host memory.
        mask: [N], true on tokens that are trained on.
        row_lengths: [B] int64.
        totals: counts of the whole optimizer batch, over all ranks.
    """
    weights = spec.aggregation.weights(mask, totals, row_lengths, dtype=columns["advantages"].dtype)
    return PolicyBatch(
        columns={**columns, "row_ids": row_numbers(row_lengths)},
        weights=weights,
        num_trained=int((weights != 0).sum()),
        row_lengths=row_lengths,
        totals=totals,
    )


def policy_loss(
    spec: LossSpec,
    log_probs: Tensor,
    entropies: Tensor,
    tokens: PolicyTokens,
    *,
    chosen_log_probs: Tensor | None = None,
    is_likely: Tensor | None = None,
) -> PolicyLoss:
    """The part of the loss that some tokens have; see `LossSpec` for the formula.

    Args:
        spec: the loss.
        log_probs, entropies: [M], of the current policy, with gradient.
        tokens: their columns and weights, on the same device; without old_log_probs, the log-probs are the old ones
            (ratio 1 in value, not in gradient).
        chosen_log_probs: [M, K], with gradient: of `teacher_ids`, where the loss takes them.
        is_likely: [M, K] bool: which of those are among the policy's own K most likely tokens.
    """
    here = {name: _like(column, log_probs) for name, column in tokens.columns.items()}
    weights = tokens.weights.to(log_probs)
    here["log_probs"] = log_probs
    here.setdefault("old_log_probs", log_probs.detach())
    trained = weights != 0
    seen: dict[str, Tensor] = {ENTROPY.last: entropies}
    own_means: Mapping[str, Tensor] = {}
    if not len(log_probs):  # of a rank without rows; a user's loss need not expect that
        loss = 0.0 * log_probs.sum()
    elif spec.declaration.is_user_convention:
        convention = verl_convention(f"policy loss {spec.name!r}")
        loss, own_means = convention.loss_of_tokens(spec, here, trained, tokens)
    else:
        policy = policy_loss_terms(spec.name, mask=trained, columns=here, settings=spec.settings)
        seen |= policy.statistics
        loss = weighted_sum(policy.terms, weights * here.get("rollout_is_weights", 1.0))
    shares: dict[str, Tensor] = {PG_LOSS: loss.detach()}
    algorithm = spec.algorithm
    if algorithm.policy_coef != 1:
        loss = algorithm.policy_coef * loss if algorithm.policy_coef else loss.new_zeros(())
    if algorithm.entropy_coeff != 0:
        loss = loss - algorithm.entropy_coeff * weighted_sum(entropies, weights)
    if algorithm.use_kl_loss:
        kl = kl_penalty(log_probs, here["ref_log_prob"], algorithm.kl_loss_type)
        loss = loss + algorithm.kl_loss_coef * weighted_sum(kl, weights)
        seen[KL_LOSS.last] = kl
    means = {STATISTIC.of(name): values.detach() for name, values in seen.items()}
    distances: Tensor | None = None
    if spec.distillation.is_on:
        taught = _distance(spec, log_probs, here, chosen_log_probs, is_likely)
        distance = weighted_sum(taught.terms, weights)
        loss = loss + spec.distillation.coef * distance
        shares[DISTILLATION_LOSS], distances = distance.detach(), taught.terms.detach()
        means[DISTILLATION_ABS_LOSS] = distances.abs()
        means |= {
            DISTILLATION_STATISTIC.of(name): values.detach() for name, values in taught.statistics.items()
        }
    return PolicyLoss(
        loss=loss, trained=trained, shares=shares, tokens=means, distances=distances, own_means=own_means
    )


def note_policy_loss(metrics: TensorMetrics, seen: PolicyLoss, batch: PolicyBatch, *, share: float) -> None:
    """Add what was seen on some tokens to the metrics of their optimizer batch, under the names that people chart.

    Args:
        metrics: of the optimizer batch.
        seen: on some of its tokens.
        batch: all its rows that this rank has.
        share: weight of this rank in the mean of losses: 1 where it counts, 0 where another rank has the same rows.
    """
    for name, total in seen.shares.items():
        metrics.add_mean(name, total, share)
    for name, values in seen.tokens.items():
        metrics.add_tokens(name, values, seen.trained, count=batch.num_trained)
    if seen.distances is not None:
        metrics.add_extremes(
            DISTILLATION_EXTREME.of("min"), DISTILLATION_EXTREME.of("max"), seen.distances, seen.trained
        )
    count = seen.trained.sum()
    for name, mean in seen.own_means.items():
        metrics.add_mean(name, mean.to(count.device) * count, count)


def _distance(
    spec: LossSpec,
    log_probs: Tensor,
    here: Mapping[str, Tensor],
    chosen_log_probs: Tensor | None,
    is_likely: Tensor | None,
) -> PolicyLossTerms:
    """How far the policy is from the teacher at each of these tokens."""
    distillation = spec.distillation
    if distillation.kind == "reverse_kl":
        return reverse_kl_terms(log_probs, here["teacher_log_prob"], kind=distillation.kl_kind)
    assert chosen_log_probs is not None, "asked for where spec.takes_chosen_tokens"
    return topk_forward_kl(
        chosen_log_probs,
        here["teacher_logprobs"].to(chosen_log_probs),
        with_tail=distillation.with_tail,
        is_likely=is_likely,
    )


def _like(column: Tensor, other: Tensor) -> Tensor:
    """Of the dtype of the other, unless it is a mask or counts something."""
    return column.to(other) if column.is_floating_point() else column
