"""The rows of actor_batches.py with what a critic is trained on."""

from __future__ import annotations

from pathlib import Path

import torch
from actor_batches import random_batch

from strop.algorithms.config import AlgorithmConfig
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.protocol import DataProto, columns
from strop.workers.config import CriticConfig
from strop.workers.critic import CriticWorker
from strop.workers.models import TrainingInit

LR = 1e-2


def make_critic(
    model: Path,
    algorithm: AlgorithmConfig,
    *,
    path: str = "",
    max_tokens: int = 1000,
    dtype: str = "float64",
    sequence_parallel: int = 1,
    lora: LoraConfig | None = None,
    checkpoint: Path | None = None,
    device: str = "cpu",
) -> CriticWorker:
    """A critic with a fresh optimizer, or that of a checkpoint."""
    return CriticWorker(
        # The policy's adapter must not reach the critic.
        ModelConfig(path=str(model), dtype=dtype, lora=LoraConfig(rank=2)),  # type: ignore[arg-type]
        CriticConfig(
            path=path,
            lora=lora or LoraConfig(),
            optim=OptimizerConfig(lr=LR, max_grad_norm=0.5),
            engine=EngineConfig(max_tokens_per_device=max_tokens, sequence_parallel=sequence_parallel),
        ),
        algorithm,
        TrainingInit(device=device, num_updates=10, checkpoint=checkpoint),
    )


def value_batch(dtype: torch.dtype = torch.float64) -> DataProto:
    """The random batch with columns values (about those of a new head, which are 0) and returns [B, R~]."""
    batch = random_batch(dtype)
    responses = batch.tensors()["responses"]
    generator = torch.Generator().manual_seed(1)
    numbers = [
        scale * torch.randn(columns.flat(responses).shape, generator=generator, dtype=torch.float64)
        for scale in (0.3, 1.0)
    ]
    names = ("values", "returns")
    added = {
        name: columns.jagged_like(responses, n.to(dtype)) for name, n in zip(names, numbers, strict=True)
    }
    return batch.union(DataProto.from_dict(added))
