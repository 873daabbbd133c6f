"""A model that imitates: supervised fine-tuning on the tokens of a mask."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from strop.algorithms.aggregation import Aggregation, BatchTotals, weighted_sum
from strop.base.metrics import Mean, Metric
from strop.controller import Dispatch, register
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.tokens import Tokens
from strop.engines.training import TrainEngine
from strop.protocol import DataProto
from strop.workers.models import TrainedWorker
from strop.workers.rows import Update, data_rows, flat_mask

LOSS = Metric("train/loss", "nats", "of `strop sft`: -log p, mean over trained tokens")


class SupervisedWorker(TrainedWorker):
    """Holds the model and its optimizer, or this rank's share of them.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order.
    """

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimizerConfig,
        *,
        device: str,
        num_updates: int,
        checkpoint: Path | None = None,
        optimizer: Path | None = None,
    ) -> None:
        super().__init__()
        parallel = self.join(engine, device=device)
        policy = load_model(model, parallel=parallel)
        trained = TrainEngine(policy, engine, optim, total_steps=num_updates, parallel=parallel)
        self._hold(trained, role="actor", checkpoint=checkpoint, optimizer=optimizer)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto, totals: BatchTotals) -> Update:
        """One optimizer step on the mean of -log p over the trained tokens of its batch.

        Args:
            data: this rank's rows: columns prompts [B, P~]; responses and loss_mask [B, R~].
            totals: counts of the whole optimizer batch, over all ranks.
        """
        mask, row_lengths = flat_mask(data)
        weights = Aggregation(mode="token-mean").weights(mask, totals, row_lengths)

        def loss(tokens: Tokens) -> Tensor:
            log_probs, _ = tokens.log_probs(temperature=1.0)
            here = weights[tokens.index].to(log_probs, non_blocking=True)
            return -weighted_sum(log_probs, here)

        value = self.engine.accumulate(data_rows(data), loss)
        report = self.engine.step()
        share = 1 if self.dp_rank == 0 else 0  # losses of the ranks add up
        return Update.of("train", report, {LOSS: Mean(value, share)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Column log_probs [B, R~] of the responses."""

        def log_probs(tokens: Tokens) -> dict[str, Tensor]:
            return {"log_probs": tokens.log_probs(temperature=1.0)[0]}

        return self.token_columns(data, log_probs)
