"""A model that imitates: supervised fine-tuning on the tokens of a mask, or on a teacher's word about them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from strop.algorithms.aggregation import Aggregation, BatchTotals, weighted_sum
from strop.algorithms.losses.distillation import topk_forward_kl
from strop.algorithms.losses.policy import DISTILLATION_LOSS, DISTILLATION_STATISTIC
from strop.controller import Dispatch, register
from strop.data.sft.config import SftDistillationConfig
from strop.engines.config import EngineConfig, ModelConfig, MoEConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.moe.losses import RouterLoss
from strop.engines.token_budget import within_memory
from strop.engines.tokens import Tokens
from strop.protocol import DataProto, columns
from strop.utils.device import sent
from strop.utils.metrics import Mean, Metric, merge_metrics
from strop.utils.tensor_metrics import TensorMetrics
from strop.workers.models import TrainedWorker, TrainingInit
from strop.workers.routers import ExpertLoads, loss_parts, router_loss
from strop.workers.rows import Update, flat_mask

LOSS = Metric(
    "train/loss",
    "nats",
    "of `strop sft`: -log p, mean over trained tokens; with `sft.distillation` the weighed sum of distance and it",
)

TEACHER = ("teacher_ids", "teacher_logprobs")
"""Columns of a teacher's word."""


class SupervisedWorker(TrainedWorker):
    """Holds the model and its optimizer, or this rank's share of them.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimizerConfig,
        learning: TrainingInit,
        distillation: SftDistillationConfig | None = None,
        moe: MoEConfig | None = None,
    ) -> None:
        super().__init__()
        self._moe = moe or MoEConfig()
        self._distillation = distillation or SftDistillationConfig()
        self._learn(load_model, model, engine, optim, learning, role="actor")
        self.engine.model.unused_tokens = ()  # texts make them unlikely

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto, totals: BatchTotals) -> Update:
        """One optimizer step on the mean over the trained tokens of its batch: of -log p, or of the distance to a
        teacher with its weight, and -log p with its own.

        Args:
            data: this rank's rows: columns prompts [B, P~]; responses and loss_mask [B, R~]; with a teacher
                teacher_ids and teacher_logprobs [B, R~, K].
            totals: counts of the whole optimizer batch, over all ranks.
        """
        mask, row_lengths = flat_mask(data.tensors())
        weights = Aggregation(mode="token-mean").weights(mask, totals, row_lengths)
        share = 1 if self.dp_rank == 0 else 0  # losses of the ranks add up
        top = [columns.flat(data.tensors()[name]) for name in TEACHER] if self._distillation.is_on else []

        def run_passes() -> _Passes:
            metrics, loads = TensorMetrics(), ExpertLoads()
            of_routers = router_loss(self.engine, self._moe, data)

            def loss(tokens: Tokens) -> Tensor:
                loads.add(tokens)
                if self._distillation.is_on:
                    ids, log_probs = (
                        sent(column[tokens.response_index], tokens.model.device) for column in top
                    )
                    return self._distance(tokens, ids, log_probs, weights, mask, metrics, share)
                log_probs, _ = tokens.log_probs(temperature=1.0)
                token_weights = sent(weights[tokens.response_index], log_probs.device).to(log_probs)
                return -weighted_sum(log_probs, token_weights)

            value = self.engine.accumulate(data, loss, router_loss=of_routers)
            return _Passes(value, metrics, loads, of_routers)

        value, metrics, loads, of_routers = within_memory(self.engine, run_passes)
        metrics.add_mean(LOSS, value, share)
        metrics.fetch()
        router_value, parts = loss_parts(of_routers, self._moe, self.engine)
        report = self.engine.step()
        numbers = merge_metrics([metrics.read(), {LOSS: Mean(share * router_value, 0)}])
        numbers |= loads.metrics("train", self.engine.parallel, share)
        numbers |= {metric.of("train"): Mean(part * share, share) for metric, part in parts.items()}
        return Update.of("train", report, numbers)

    def rehearsed_loss(self, tokens: Tokens) -> Tensor:
        """As of every role: log-probs, and with a teacher that of one token that it names in each place."""
        if not self._distillation.is_on:
            return tokens.log_probs(temperature=1.0)[0].sum()
        named = torch.zeros((len(tokens.prediction_index), 1), dtype=torch.int64, device=tokens.model.device)
        log_probs, _, at = tokens.log_probs_at(named, temperature=1.0)
        return log_probs.sum() + at.log_probs.sum()

    def _distance(
        self,
        tokens: Tokens,
        teacher_ids: Tensor,
        teacher_log_probs: Tensor,
        weights: Tensor,
        mask: Tensor,
        metrics: TensorMetrics,
        share: int,
    ) -> Tensor:
        """The part of the loss that these tokens have with a teacher; `weights` and `mask` [N] are of all tokens."""
        settings = self._distillation
        log_probs, _, at = tokens.log_probs_at(teacher_ids, temperature=1.0)
        token_weights = sent(weights[tokens.response_index], log_probs.device).to(log_probs)
        trained = sent(mask[tokens.response_index], log_probs.device)
        taught = topk_forward_kl(
            at.log_probs,
            teacher_log_probs.to(at.log_probs),
            with_tail=settings.with_tail,
            is_likely=at.is_likely,
        )
        distance = weighted_sum(taught.terms, token_weights)
        metrics.add_mean(DISTILLATION_LOSS, distance, share)
        for name, values in taught.statistics.items():
            metrics.add_tokens(DISTILLATION_STATISTIC.of(name), values, trained, count=int(mask.sum()))
        return settings.coef * distance - settings.nll_coef * weighted_sum(log_probs, token_weights)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Column log_probs [B, R~] of the responses."""

        def log_probs(tokens: Tokens) -> dict[str, Tensor]:
            return {"log_probs": tokens.log_probs(temperature=1.0)[0]}

        return self.token_columns(data, log_probs)


class _Passes(NamedTuple):
    """Passes of an update, behind which its step is taken."""

    value: Tensor
    """Of the loss, on this rank."""
    metrics: TensorMetrics
    loads: ExpertLoads
    of_routers: RouterLoss | None
