"""The policy's whole loss of some tokens: the policy's term, entropy, KL and the distance to a teacher.

A pure function of tensors and of a resolved `LossSpec`. The loss of an optimizer batch is the sum over its
micro-batches and ranks, whose tokens bring weights that were computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, valid_tokens_per_row, weighted_sum
from strop.algorithms.kl import kl_penalty
from strop.algorithms.losses import distillation, verl_convention
from strop.algorithms.losses.spec import LossSpec
from strop.algorithms.losses.terms import policy_loss_terms
from strop.utils.device import sent
from strop.utils.metrics import Metric
from strop.utils.tensor_metrics import TensorMetrics

PG_LOSS = Metric("actor/pg_loss", "reward", "the policy's term of the loss, as it is reduced")
ENTROPY = Metric("actor/entropy", "nats", "of the policy, mean over trained tokens")
ENTROPY_LOSS = Metric(
    "actor/entropy_loss", "nats", "the same as it is reduced, where it is a term of the loss"
)
KL_LOSS = Metric(
    "actor/kl_loss", "nats", "KL to the reference in the loss, if there is one, mean over trained tokens"
)
STATISTIC = Metric("actor/<statistic>", "", "what a policy loss of your own notes, mean over trained tokens")
DISTILLATION_LOSS = Metric(
    "distillation/loss", "nats", "distance to the teacher, when there is one, as it is reduced"
)
DISTILLATION_STATISTIC = Metric(
    "distillation/{reverse_kl,student_mass,teacher_mass,overlap_ratio,overlap_token_advantage}",
    "nats; shares; nats",
    "difference of log-probs; probability inside the teacher's top k; what both have in it; mean over trained tokens",
)
DISTILLATION_ABS_LOSS = Metric("distillation/abs_loss", "nats", "its size, mean over trained tokens")
DISTILLATION_EXTREME = Metric(
    "distillation/loss_{min,max}", "nats", "smallest and largest of a trained token"
)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """The loss of some tokens and its statistics, without gradient and on the device."""

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


def rows_with_gradient(spec: LossSpec, columns: Mapping[str, Tensor], row_lengths: Tensor) -> list[bool]:
    """[B]: rows with a term that depends on the policy.

    Args:
        spec: of the loss.
        columns: advantages and weights [N], of all tokens of the rows.
        row_lengths: [B] int64.
    """
    if spec.has_gradient_in_every_row:
        return [True] * len(row_lengths)
    moving = (columns["advantages"] * columns["weights"]) != 0
    per_row: list[int] = valid_tokens_per_row(moving, row_lengths).tolist()
    return [count > 0 for count in per_row]


def policy_loss(
    spec: LossSpec,
    log_probs: Tensor,
    entropies: Tensor,
    columns: Mapping[str, Tensor],
    *,
    row_ids: Tensor,
    totals: BatchTotals,
    chosen_log_probs: Tensor | None = None,
    is_likely: Tensor | None = None,
) -> PolicyLoss:
    """The part of the loss that some tokens have; see `LossSpec` for the formula.

    Args:
        spec: the loss.
        log_probs, entropies: [M], of the current policy, with gradient.
        columns: [M] (or [M, K]) by the loss's own names, on the same device; among them `weights`, that of each token
            in the loss of the whole optimizer batch, 0 where it is not trained on. Without old_log_probs, the
            log-probs are the old ones (ratio 1 in value, not in gradient).
        row_ids: [M], in host memory: the row of each token; the tokens are those of whole rows.
        totals: counts of the whole optimizer batch, over all ranks.
        chosen_log_probs: [M, K], with gradient: of `teacher_ids`, where the loss takes them.
        is_likely: [M, K] bool: which of those are among the policy's own K most likely tokens.
    """
    arguments = {
        name: column.to(log_probs) if column.is_floating_point() else column
        for name, column in columns.items()
    }
    weights = arguments.pop("weights")
    arguments["log_probs"] = log_probs
    if "row_ids" in spec.declaration.needs:
        arguments["row_ids"] = sent(row_ids, log_probs.device)
    arguments.setdefault("old_log_probs", log_probs.detach())
    trained = weights != 0
    statistics_by_name: dict[str, Tensor] = {ENTROPY.last: entropies}
    own_means: Mapping[str, Tensor] = {}
    if spec.declaration.is_user_convention and len(
        log_probs
    ):  # such a loss need not expect a rank without rows
        loss, own_means = verl_convention.loss_of_tokens(spec, arguments, trained, row_ids, totals)
    else:
        loss, statistics = _policy_term(spec, arguments, weights)
        statistics_by_name |= statistics
    shares: dict[str, Tensor] = {PG_LOSS: loss.detach()}
    algorithm = spec.algorithm
    if spec.policy_coef != 1:
        loss = spec.policy_coef * loss if spec.policy_coef else loss.new_zeros(())
    if algorithm.entropy_coeff != 0:
        entropy = weighted_sum(entropies, weights)
        loss = loss - algorithm.entropy_coeff * entropy
        shares[ENTROPY_LOSS] = entropy.detach()
    if algorithm.use_kl_loss:
        kl = kl_penalty(log_probs, arguments["ref_log_prob"], algorithm.kl_loss_type)
        loss = loss + algorithm.kl_loss_coef * weighted_sum(kl, weights)
        statistics_by_name[KL_LOSS.last] = kl
    means = {STATISTIC.of(name): values.detach() for name, values in statistics_by_name.items()}
    distances: Tensor | None = None
    if spec.distillation is not None:
        taught = distillation.distance(spec, log_probs, arguments, chosen_log_probs, is_likely)
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


def record_loss(metrics: TensorMetrics, outputs: PolicyLoss, *, num_trained: int, share: float) -> None:
    """Add the outputs of some tokens to the metrics of their optimizer batch, under the names that people chart.

    Args:
        metrics: of the optimizer batch.
        outputs: of some of its tokens.
        num_trained: all tokens of it that are trained on and that this rank has.
        share: weight of this rank in the mean of losses: 1 where it counts, 0 where another rank has the same rows.
    """
    for name, total in outputs.shares.items():
        metrics.add_mean(name, total, share)
    for name, values in outputs.tokens.items():
        metrics.add_tokens(name, values, outputs.trained, count=num_trained)
    if outputs.distances is not None:
        metrics.add_extremes(
            DISTILLATION_EXTREME.of("min"), DISTILLATION_EXTREME.of("max"), outputs.distances, outputs.trained
        )
    count = outputs.trained.sum()
    for name, mean in outputs.own_means.items():
        metrics.add_mean(name, mean.to(count.device) * count, count)


def _policy_term(
    spec: LossSpec, columns: Mapping[str, Tensor], weights: Tensor
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """The policy's term of the loss of these tokens, and its per-token statistics."""
    if not len(weights):  # of a rank without rows
        return 0.0 * columns["log_probs"].sum(), {}
    policy = policy_loss_terms(spec.name, mask=weights != 0, columns=columns, settings=spec.settings)
    return weighted_sum(policy.terms, weights * columns.get("rollout_is_weights", 1.0)), policy.statistics
