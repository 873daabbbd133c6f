"""The loss of one optimizer batch of the policy, as the training engine calls it: on some tokens at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, row_numbers, weighted_sum
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.kl import kl_penalty
from strop.algorithms.losses import (
    PolicyLossTerms,
    get_policy_loss_fn,
    policy_loss_declaration,
    policy_loss_terms,
    prepare_columns,
    reverse_kl_terms,
    topk_forward_kl,
)
from strop.algorithms.reduce import Max, Mean, Min, Reduction, merge_metrics
from strop.algorithms.user_functions import call_policy_loss, loss_config
from strop.engines.head import ChosenTokens
from strop.engines.packing import Row
from strop.engines.parallel import Parallel
from strop.protocol import DataProto, columns
from strop.workers.rows import flat, loss_weights

SOURCES = ("advantages", "ref_log_prob", "rollout_log_probs", "rollout_is_weights")
"""Columns that a loss may take under their own names, where the batch has them."""
TEACHER_COLUMNS = {"reverse_kl": ("teacher_log_prob",), "forward_kl": ("teacher_ids", "teacher_logprobs")}
"""Columns of each kind of distillation."""


class PolicyLoss:
    """A function of some tokens of an optimizer batch, and what was seen on the way.

    L = sum_t w_t (policy_coef * policy_t - entropy_coeff * H_t + kl_loss_coef * kl_t + distillation.coef * d_t), w_t
    fixed for the whole batch. Importance weights of a corrected rollout multiply the policy's term alone: entropy, KL
    and the distance d_t to a teacher are those of the current policy.
    """

    def __init__(self, data: DataProto, totals: BatchTotals, algorithm: AlgorithmConfig) -> None:
        """Read the columns of this rank's rows.

        Args:
            data: as for `ActorWorker.update_policy`.
            totals: counts of the whole optimizer batch, over all ranks.
            algorithm: of the run.

        Raises:
            ValueError: a column is missing.
        """
        self._algorithm = algorithm
        self._declaration = policy_loss_declaration(algorithm.policy_loss)
        self._mode = self._declaration.aggregation_mode(algorithm.loss_agg_mode)
        self._totals = totals
        self._columns = _columns(data, algorithm)
        lengths = columns.row_lengths(data.tensors()["response_mask"])
        self._row_ids = row_numbers(lengths)
        self._row_starts = lengths.cumsum(0) - lengths
        self._weights = loss_weights(
            data,
            totals,
            mask="loss_mask" if "loss_mask" in data.tensors() else "response_mask",
            mode=self._mode,
            scale=algorithm.loss_scale_factor,
            dtype=self._columns["advantages"].dtype,
        )
        self._teacher = _teacher_columns(data, algorithm)
        self.log_probs, self.entropies = torch.zeros_like(self._weights), torch.zeros_like(self._weights)
        self._num_tokens = int((self._weights != 0).sum())
        self._pg_loss = self._distillation_loss = 0.0
        self._smallest, self._largest = Min(math.inf), Max(-math.inf)
        self._token_sums: dict[str, float] = {}
        self._user_metrics: list[Mapping[str, Reduction]] = []

    @property
    def chosen_ids(self) -> Tensor | None:
        """[N, K]: tokens whose log-probs the loss takes beside those that were sampled; None without any."""
        return self._teacher.get("teacher_ids")

    @property
    def wants_whole_batch(self) -> bool:
        """`prepare` must be called before the first tokens."""
        return self._declaration.prepare is not None

    def prepare(self, log_probs: Tensor, parallel: Parallel) -> None:
        """Compute what the loss takes from all tokens of the optimizer batch, on all ranks.

        Args:
            log_probs: [N], of this rank's tokens under the current policy, without gradient.
            parallel: the ranks; all of them call this.
        """
        own = {"log_probs": log_probs.to(self._weights), "advantages": self._columns["advantages"]}
        own["old_log_probs"] = self._columns.get("old_log_probs", own["log_probs"])
        shares = {name: parallel.gather(column) for name, column in own.items()}
        masks = parallel.gather((self._weights != 0).to(torch.uint8))
        prepared = prepare_columns(
            self._algorithm.policy_loss,
            mask=torch.cat(masks).bool(),
            columns={name: torch.cat(parts) for name, parts in shares.items()},
            settings=self._settings,
        )
        start = sum(len(part) for part in masks[: parallel.dp_rank])
        end = start + len(masks[parallel.dp_rank])
        self._columns |= {name: column[start:end] for name, column in prepared.items()}

    def needs_gradient(self, rows: list[Row]) -> list[bool]:
        """Rows with a term that depends on the policy."""
        algorithm = self._algorithm
        moves_anyway = self._declaration.moves_without_advantage or self._declaration.is_user_convention
        has_other_terms = (
            algorithm.entropy_coeff != 0 or algorithm.use_kl_loss or algorithm.distillation.is_on
        )
        if has_other_terms or moves_anyway:
            return [True] * len(rows)
        moving = (self._columns["advantages"] * self._weights) != 0
        return [bool(moving[r.first_token : r.first_token + len(r.response)].any()) for r in rows]

    def __call__(
        self,
        log_probs: Tensor,
        entropies: Tensor,
        token_index: Tensor,
        chosen: ChosenTokens | None = None,
    ) -> Tensor:
        """The part of L of some tokens of whole rows: log_probs, entropies and token_index [M], chosen [M, K]."""
        algorithm = self._algorithm
        here = {name: _like(column[token_index], log_probs) for name, column in self._columns.items()}
        weights = _like(self._weights[token_index], log_probs)
        here["log_probs"] = log_probs
        here["row_ids"] = self._row_ids[token_index].to(log_probs.device)
        here.setdefault("old_log_probs", log_probs.detach())
        sampled = weights != 0
        seen: dict[str, Tensor] = {"entropy": entropies}
        if self._declaration.is_user_convention:
            loss = self._user_loss(here, sampled, token_index)
        else:
            policy = policy_loss_terms(
                algorithm.policy_loss, mask=sampled, columns=here, settings=self._settings
            )
            seen |= policy.statistics
            loss = weighted_sum(policy.terms, weights * here.get("rollout_is_weights", 1.0))
        self._pg_loss += float(loss.detach())
        if algorithm.policy_coef != 1:
            loss = algorithm.policy_coef * loss if algorithm.policy_coef else loss.new_zeros(())
        if algorithm.entropy_coeff != 0:
            loss = loss - algorithm.entropy_coeff * weighted_sum(entropies, weights)
        if algorithm.use_kl_loss:
            kl = kl_penalty(log_probs, here["ref_log_prob"], algorithm.kl_loss_type)
            loss = loss + algorithm.kl_loss_coef * weighted_sum(kl, weights)
            seen["kl_loss"] = kl
        keys = {f"actor/{name}": values for name, values in seen.items()}
        if self._teacher:
            taught = self._distance(log_probs, token_index, chosen)
            distance = weighted_sum(taught.terms, weights)
            loss = loss + algorithm.distillation.coef * distance
            self._distillation_loss += float(distance.detach())
            self._note_distances(taught.terms.detach()[sampled])
            keys["distillation/abs_loss"] = taught.terms.abs()
            keys |= {f"distillation/{name}": values for name, values in taught.statistics.items()}
        self._record(log_probs, entropies, token_index, keys, sampled)
        return loss

    def _distance(
        self, log_probs: Tensor, token_index: Tensor, chosen: ChosenTokens | None
    ) -> PolicyLossTerms:
        """How far the policy is from the teacher at each of these tokens."""
        distillation = self._algorithm.distillation
        if distillation.kind == "reverse_kl":
            teacher = _like(self._teacher["teacher_log_prob"][token_index], log_probs)
            return reverse_kl_terms(log_probs, teacher, kind=distillation.kl_kind)
        assert chosen is not None, "the engine was asked for chosen_ids"
        return topk_forward_kl(
            chosen.log_probs,
            _like(self._teacher["teacher_logprobs"][token_index], chosen.log_probs),
            with_tail=distillation.with_tail,
            is_likely=chosen.is_likely,
        )

    def _note_distances(self, terms: Tensor) -> None:
        """Smallest and largest term of trained tokens so far."""
        if len(terms):
            self._smallest = self._smallest.merge(Min(float(terms.min())))
            self._largest = self._largest.merge(Max(float(terms.max())))

    @property
    def _settings(self) -> dict[str, object]:
        algorithm = self._algorithm
        shared: dict[str, object] = {
            "clip_low": algorithm.clip_low,
            "clip_high": algorithm.clip_high,
            "clip_c": algorithm.clip_ratio_c,
        }
        return shared | dict(algorithm.loss_settings)

    def _user_loss(self, here: Mapping[str, Tensor], sampled: Tensor, token_index: Tensor) -> Tensor:
        """A user's loss in the field's convention, on padded rows."""
        starts, own = torch.unique(self._row_ids[token_index], return_inverse=True)
        place = token_index.cpu() - self._row_starts[starts][own]
        at = (own.to(sampled.device), place.to(sampled.device))
        shape = (len(starts), int(place.max()) + 1)
        padded = {
            name: column.new_zeros(shape).index_put(at, column)
            for name, column in here.items()
            if name != "row_ids"
        }
        result = call_policy_loss(
            get_policy_loss_fn(self._algorithm.policy_loss),
            columns=padded,
            mask=sampled.new_zeros(shape).index_put(at, sampled),
            loss_agg_mode=self._mode,
            config=loss_config(
                self._algorithm,
                name=self._algorithm.policy_loss,
                totals=self._totals,
                loss_agg_mode=self._mode,
                settings=self._algorithm.loss_settings,
            ),
        )
        self._user_metrics.append(result.metrics)
        return result.loss

    @torch.no_grad()
    def _record(
        self,
        log_probs: Tensor,
        entropies: Tensor,
        token_index: Tensor,
        keys: Mapping[str, Tensor],
        sampled: Tensor,
    ) -> None:
        """Add up the values of trained tokens under each metric's key."""
        self.log_probs[token_index] = log_probs.detach().to(self.log_probs)
        self.entropies[token_index] = entropies.detach().to(self.entropies)
        for key, values in keys.items():
            total = float(torch.where(sampled, values.detach(), 0.0).sum(dtype=torch.float64))
            self._token_sums[key] = self._token_sums.get(key, 0.0) + total

    def metrics(self, share: float) -> dict[str, Reduction]:
        """Metrics under the field's names; token means carry their count, losses this worker's share of 1."""
        metrics: dict[str, Reduction] = {"actor/pg_loss": Mean(self._pg_loss, share)}
        metrics |= {key: Mean(total, self._num_tokens) for key, total in self._token_sums.items()}
        if self._teacher:
            metrics["distillation/loss"] = Mean(self._distillation_loss, share)
            metrics |= {"distillation/loss_min": self._smallest, "distillation/loss_max": self._largest}
        metrics |= merge_metrics(self._user_metrics)
        if self._algorithm.use_kl_loss:
            metrics["actor/kl_coef"] = Mean(self._algorithm.kl_loss_coef, 1)
        return metrics


def _columns(data: DataProto, algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """Flat columns [N] that the loss may take."""
    tensors = data.tensors()
    old = "rollout_log_probs" if algorithm.old_log_probs == "rollout" else "old_log_probs"
    if old == "rollout_log_probs" and old not in tensors:
        raise ValueError(
            f"algorithm.old_log_probs=rollout needs the column rollout_log_probs, but the batch has "
            f"{', '.join(sorted(tensors))}"
        )
    found = {name: flat(data, name) for name in SOURCES if name in tensors}
    if old in tensors:
        found["old_log_probs"] = flat(data, old)
    return found


def _teacher_columns(data: DataProto, algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """What the teacher said: flat columns [N] or [N, K]; none without distillation."""
    names = TEACHER_COLUMNS.get(algorithm.distillation.kind, ())
    tensors = data.tensors()
    for name in names:
        if name not in tensors:
            raise ValueError(
                f"algorithm.distillation.kind={algorithm.distillation.kind} needs the column {name}, but the batch has "
                f"{', '.join(sorted(tensors))}"
            )
    return {name: flat(data, name) for name in names}


def _like(column: Tensor, other: Tensor) -> Tensor:
    """On the device of the other, and of its dtype unless it is a mask."""
    return column.to(other.device) if column.dtype == torch.bool else column.to(other)
