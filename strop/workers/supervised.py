"""A model that imitates: supervised fine-tuning on the tokens of a mask."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from strop.algorithms.aggregation import weighted_sum
from strop.algorithms.reduce import Max, Mean, Reduction
from strop.controller import Dispatch, Worker, register
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.training import TrainEngine, make_rows
from strop.protocol import DataProto, columns


class SupervisedWorker(Worker):
    """Holds the model and its optimizer."""

    def __init__(
        self,
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimizerConfig,
        *,
        device: str,
        num_updates: int,
        checkpoint: Path | None = None,
    ) -> None:
        super().__init__()
        weights = None if checkpoint is None else checkpoint / "model"
        policy = load_model(model, device=device, weights_from=weights)
        self.engine = TrainEngine(policy, engine, optim, total_steps=num_updates)
        if checkpoint is not None:
            self.engine.load_optimizer(checkpoint)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, data: DataProto) -> DataProto:
        """One optimizer step on -sum_t w_t log p_t.

        Columns prompts [B, P~], responses and loss_weights [B, R~]; returns meta_info["metrics"].
        """
        tensors = data.tensors()
        weights = columns.flat(tensors["loss_weights"])

        def loss(log_probs: Tensor, _: Tensor, token_index: Tensor) -> Tensor:
            return -weighted_sum(log_probs, weights[token_index].to(log_probs))

        rows = make_rows(columns.rows(tensors["prompts"]), columns.rows(tensors["responses"]))
        value = self.engine.accumulate(rows, loss, temperature=1.0)
        report = self.engine.step()
        metrics: dict[str, Reduction] = {
            "train/loss": Mean(value, 1 / self.dp_size),  # losses of the ranks add up
            "train/grad_norm": Mean(report.grad_norm, 1),
            "train/lr": Mean(report.lr, 1),
            "train/skipped_updates": Max(1.0 if report.skipped else 0.0),
        }
        return DataProto(meta_info={"metrics": metrics, "skipped": report.skipped})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """Column log_probs [B, R~] of the responses."""
        tensors = data.tensors()
        rows = make_rows(columns.rows(tensors["prompts"]), columns.rows(tensors["responses"]))
        log_probs, _ = self.engine.log_probs(rows, temperature=1.0)
        return DataProto.from_dict({"log_probs": columns.jagged_like(tensors["responses"], log_probs)})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path) -> None:
        """Weights and optimizer state into `folder`."""
        self.engine.save(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        """Digest of all weights."""
        return self.engine.checksum()
