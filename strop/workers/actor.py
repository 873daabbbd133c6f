"""The policy: log-probs under its current weights, and policy updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from strop.algorithms.aggregation import weighted_sum
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.kl import kl_penalty
from strop.algorithms.losses import policy_loss_terms
from strop.algorithms.reduce import Max, Mean, Reduction
from strop.controller import Dispatch, Worker, register
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.packing import Row
from strop.engines.training import TrainEngine, make_rows
from strop.protocol import DataProto, columns
from strop.workers.config import ActorConfig


class ActorWorker(Worker):
    """Holds the policy and its optimizer."""

    def __init__(
        self,
        model: ModelConfig,
        actor: ActorConfig,
        algorithm: AlgorithmConfig,
        *,
        device: str,
        num_updates: int | None,
        checkpoint: Path | None = None,
    ) -> None:
        super().__init__()
        self._algorithm = algorithm
        self._share = 1 / self.dp_size  # losses of the ranks add up to that of the optimizer batch
        weights = None if checkpoint is None else checkpoint / "model"
        policy = load_model(model, device=device, weights_from=weights)
        self.engine = TrainEngine(policy, actor.engine, actor.optim, total_steps=num_updates)
        if checkpoint is not None:
            self.engine.load_optimizer(checkpoint)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Columns old_log_probs and entropys [B, R~] of the responses under the current weights."""
        rows = data_rows(data)
        log_probs, entropies = self.engine.log_probs(rows, temperature=data.meta_info["temperature"])
        return DataProto.from_dict(
            {
                "old_log_probs": columns.jagged_like(data.tensors()["responses"], log_probs),
                "entropys": columns.jagged_like(data.tensors()["responses"], entropies),
            }
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_policy(self, data: DataProto) -> DataProto:
        """One optimizer step on these rows: the whole of one optimizer batch.

        Args:
            data: columns prompts, responses [B, P~], [B, R~]; advantages and loss_weights [B, R~], the weights
                counted over the whole optimizer batch (algorithms.aggregation); old_log_probs [B, R~], or
                none, in which case the log-probs of this very pass are the old ones (ratio 1 in value, not in
                gradient); ref_log_prob [B, R~] when there is a KL loss.

        Returns:
            Columns log_probs and entropys [B, R~] of this pass, before the step; meta_info["metrics"].
        """
        rows = data_rows(data)
        loss = _PolicyLoss(data, self._algorithm)
        temperature = data.meta_info["temperature"]
        trained = [row for row, needed in zip(rows, loss.needs_gradient(rows), strict=True) if needed]
        trained_ids = set(map(id, trained))
        value = self.engine.accumulate(trained, loss, temperature=temperature)
        self._measure([row for row in rows if id(row) not in trained_ids], loss, temperature)
        report = self.engine.step()
        metrics = loss.metrics(self._share)
        metrics["actor/loss"] = Mean(value, self._share)
        metrics["actor/grad_norm"] = Mean(report.grad_norm, 1)
        metrics["actor/lr"] = Mean(report.lr, 1)
        metrics["actor/skipped_updates"] = Max(1.0 if report.skipped else 0.0)
        result = DataProto.from_dict(
            {
                "log_probs": columns.jagged_like(data.tensors()["responses"], loss.log_probs),
                "entropys": columns.jagged_like(data.tensors()["responses"], loss.entropies),
            }
        )
        result.meta_info["metrics"] = metrics
        result.meta_info["skipped"] = report.skipped
        return result

    def _measure(self, rows: list[Row], loss: _PolicyLoss, temperature: float) -> None:
        """Rows that cannot move the policy (advantage 0, no other term) are measured without a gradient."""
        if rows:
            index = torch.cat([torch.arange(r.first_token, r.first_token + len(r.response)) for r in rows])
            packed = make_rows([row.prompt for row in rows], [row.response for row in rows])
            log_probs, entropies = self.engine.log_probs(packed, temperature=temperature)
            with torch.no_grad():
                loss(log_probs.to(self.engine.model.device), entropies.to(self.engine.model.device), index)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path) -> None:
        """Weights and optimizer state into `folder`."""
        self.engine.save(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        """Digest of all weights."""
        return self.engine.checksum()


class _PolicyLoss:
    """The loss of one optimizer batch as a function of some of its tokens, and what was seen on the way.

    L = sum_t w_t (policy_t - entropy_coeff * H_t + kl_loss_coef * kl_t), w_t fixed for the whole batch.
    """

    def __init__(self, data: DataProto, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        names = ["advantages", "loss_weights", "old_log_probs", "ref_log_prob"]
        self._columns = {name: _flat(data, name) for name in names if name in data.tensors()}
        weights = self._columns["loss_weights"]
        self.log_probs, self.entropies = torch.zeros_like(weights), torch.zeros_like(weights)
        self._num_tokens = int((weights != 0).sum())
        self._losses = {"pg_loss": 0.0}
        self._token_sums: dict[str, float] = {}

    def needs_gradient(self, rows: list[Row]) -> list[bool]:
        """Rows with a term that depends on the policy."""
        if self._algorithm.entropy_coeff != 0 or self._algorithm.use_kl_loss:
            return [True] * len(rows)
        moving = (self._columns["advantages"] * self._columns["loss_weights"]) != 0
        return [bool(moving[r.first_token : r.first_token + len(r.response)].any()) for r in rows]

    def __call__(self, log_probs: Tensor, entropies: Tensor, token_index: Tensor) -> Tensor:
        algorithm = self._algorithm
        columns_here = {name: c[token_index].to(log_probs) for name, c in self._columns.items()}
        weights = columns_here.pop("loss_weights")
        columns_here.setdefault("old_log_probs", log_probs.detach())
        sampled = weights != 0
        policy = policy_loss_terms(
            algorithm.policy_loss,
            mask=sampled,
            columns={**columns_here, "log_probs": log_probs},
            settings={
                "clip_low": algorithm.clip_low,
                "clip_high": algorithm.clip_high,
                "clip_c": algorithm.clip_ratio_c,
            },
        )
        loss = weighted_sum(policy.terms, weights)
        self._losses["pg_loss"] += float(loss.detach())
        seen = {**policy.statistics, "entropy": entropies}
        if algorithm.entropy_coeff != 0:
            loss = loss - algorithm.entropy_coeff * weighted_sum(entropies, weights)
        if algorithm.use_kl_loss:
            kl = kl_penalty(log_probs, columns_here["ref_log_prob"], algorithm.kl_loss_type)
            loss = loss + algorithm.kl_loss_coef * weighted_sum(kl, weights)
            seen["kl_loss"] = kl
        self._record(log_probs, entropies, token_index, seen, sampled)
        return loss

    @torch.no_grad()
    def _record(
        self,
        log_probs: Tensor,
        entropies: Tensor,
        token_index: Tensor,
        seen: Mapping[str, Tensor],
        sampled: Tensor,
    ) -> None:
        self.log_probs[token_index] = log_probs.detach().to(self.log_probs)
        self.entropies[token_index] = entropies.detach().to(self.entropies)
        for name, values in seen.items():
            total = float(torch.where(sampled, values.detach(), 0.0).sum(dtype=torch.float64))
            self._token_sums[name] = self._token_sums.get(name, 0.0) + total

    def metrics(self, share: float) -> dict[str, Reduction]:
        """Metrics under the field's names; token means carry their count, losses this worker's share of 1."""
        metrics: dict[str, Reduction] = {f"actor/{name}": Mean(v, share) for name, v in self._losses.items()}
        metrics |= {f"actor/{name}": Mean(v, self._num_tokens) for name, v in self._token_sums.items()}
        if self._algorithm.use_kl_loss:
            metrics["actor/kl_coef"] = Mean(self._algorithm.kl_loss_coef, 1)
        return metrics


def data_rows(data: DataProto) -> list[Row]:
    """The rows of a batch for the engine."""
    return make_rows(columns.rows(data.tensors()["prompts"]), columns.rows(data.tensors()["responses"]))


def _flat(data: DataProto, name: str) -> Tensor:
    return columns.flat(data.tensors()[name])
