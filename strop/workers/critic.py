"""The critic: values of the states before each token, and value updates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals, weighted_sum
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.extensions import load_extensions
from strop.algorithms.losses import policy_loss_declaration
from strop.algorithms.reduce import Mean, Reduction
from strop.algorithms.value_loss import explained_variance, value_loss_terms
from strop.controller import Dispatch, register
from strop.engines.config import ModelConfig
from strop.engines.model import load_value_model
from strop.engines.training import TrainEngine
from strop.protocol import DataProto
from strop.workers.config import CriticConfig
from strop.workers.joining import join
from strop.workers.rows import data_rows, flat, loss_weights, response_columns, step_metrics
from strop.workers.saving import TrainedWorker


class CriticWorker(TrainedWorker):
    """Holds the value model and its optimizer, or this rank's share of them.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order, each
    with its own rows, also with none.
    """

    def __init__(
        self,
        model: ModelConfig,
        critic: CriticConfig,
        algorithm: AlgorithmConfig,
        *,
        device: str,
        num_updates: int | None,
        checkpoint: Path | None = None,
    ) -> None:
        """Load the value model: a causal language model with a head of zeros, or a classifier with its own.

        Args:
            model: the policy's; its folder is the critic's too where `critic.path` is empty.
            critic, algorithm: of the run.
            device: `auto` or a device name.
            num_updates: optimizer steps of the critic in the whole run, where a schedule needs to know.
            checkpoint: folder that `save_checkpoint` wrote, to continue from.
        """
        super().__init__()
        self._algorithm = algorithm
        load_extensions(algorithm.extensions)
        parallel = join(self.placement, critic.engine, device=device)
        own = dataclasses.replace(model, path=critic.path or model.path, lora=critic.lora)
        values = load_value_model(own, parallel=parallel)
        engine = TrainEngine(values, critic.engine, critic.optim, total_steps=num_updates, parallel=parallel)
        self._hold(engine, role="critic", checkpoint=checkpoint)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_values(self, data: DataProto) -> DataProto:
        """Column values [B, R~]: the return expected before each response token, in reward units."""
        return response_columns(data, {"values": self.engine.values(data_rows(data))})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_critic(self, data: DataProto, totals: BatchTotals) -> DataProto:
        """One optimizer step on the value loss; these rows are this rank's share of its batch.

        Args:
            data: columns prompts [B, P~]; responses, response_mask, values (those at the start of the step) and
                returns [B, R~].
            totals: counts of the whole optimizer batch, over all ranks; the loss divides by them.

        Returns:
            No rows; meta_info["metrics"], and meta_info["skipped"]: why no step was taken, or "".
        """
        loss = _ValueLoss(data, totals, self._algorithm)
        value = self.engine.accumulate_values(data_rows(data), loss)
        report = self.engine.step()
        share = 1 if self.dp_rank == 0 else 0  # losses of the ranks add up to that of the optimizer batch
        metrics = {
            "critic/loss": Mean(value, share),
            "critic/vf_loss": Mean(value, share),
            **loss.metrics(),
            **step_metrics("critic", report),
        }
        return DataProto(meta_info={"metrics": metrics, "skipped": report.skipped})


class _ValueLoss:
    """The value loss of one optimizer batch as a function of some of its tokens, and what was seen on the way.

    Its terms are aggregated in the mode of the policy's, with weights fixed for the whole batch.
    """

    def __init__(self, data: DataProto, totals: BatchTotals, algorithm: AlgorithmConfig) -> None:
        self._clip_range = algorithm.cliprange_value
        self._old_values, self._returns = flat(data, "values"), flat(data, "returns")
        self._weights = loss_weights(
            data,
            totals,
            mask="loss_mask" if "loss_mask" in data.tensors() else "response_mask",
            mode=policy_loss_declaration(algorithm.policy_loss).aggregation_mode(algorithm.loss_agg_mode),
            scale=algorithm.loss_scale_factor,
            dtype=self._returns.dtype,
        )
        self._token_sums = {"vf_clipfrac": 0.0, "vpred_mean": 0.0}

    def __call__(self, values: Tensor, token_index: Tensor) -> Tensor:
        old_values, returns, weights = (
            column[token_index].to(values) for column in (self._old_values, self._returns, self._weights)
        )
        trained = weights != 0
        value_loss = value_loss_terms(values, old_values, returns, mask=trained, clip_range=self._clip_range)
        for name, numbers in value_loss.statistics.items():
            total = torch.where(trained, numbers, 0.0).sum(dtype=torch.float64)
            self._token_sums[name] += float(total)
        return weighted_sum(value_loss.terms, weights)

    def metrics(self) -> dict[str, Reduction]:
        """Metrics under the field's names, as they merge over ranks; the explained variance is the old values'."""
        trained = self._weights != 0
        num_tokens = int(trained.sum())
        metrics: dict[str, Reduction] = {
            f"critic/{name}": Mean(total, num_tokens) for name, total in self._token_sums.items()
        }
        metrics["critic/vf_explained_var"] = explained_variance(self._old_values, self._returns, trained)
        return metrics
