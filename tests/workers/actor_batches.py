"""Optimizer batches with every difficulty: shared prompts, masked tokens, rows without advantage, old log-probs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from strop.algorithms.aggregation import BatchTotals
from strop.algorithms.config import AlgorithmConfig
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, MoEConfig, OptimizerConfig
from strop.protocol import DataProto, columns
from strop.workers.actor import ActorWorker
from strop.workers.config import ActorConfig
from strop.workers.models import TrainingInit

RESPONSE_LENGTHS = (3, 7, 1, 5, 6, 2, 4)
PROMPT_OF_ROW = (0, 0, 1, 0, 2, 2, 1)
PROMPT_LENGTHS = (9, 4, 6)
MASKED = ((1, 2), (1, 3), (4, 0))
"""(row, token) of tokens that a tool wrote."""
SCALE = 6.0
LR = 1e-3


def make_actor(
    model: Path,
    algorithm: AlgorithmConfig,
    *,
    max_tokens: int = 1000,
    dtype: str = "float64",
    weight_decay: float = 0.01,
    sequence_parallel: int = 1,
    lora: LoraConfig | None = None,
    checkpoint: Path | None = None,
    device: str = "cpu",
    moe: MoEConfig | None = None,
) -> ActorWorker:
    """A policy with a fresh optimizer, or that of a checkpoint."""
    return ActorWorker(
        ModelConfig(path=str(model), dtype=dtype, lora=lora or LoraConfig()),  # type: ignore[arg-type]
        ActorConfig(
            optim=OptimizerConfig(lr=LR, max_grad_norm=0.5, weight_decay=weight_decay),
            engine=EngineConfig(max_tokens_per_device=max_tokens, sequence_parallel=sequence_parallel),
            moe=moe or MoEConfig(),
        ),
        algorithm,
        TrainingInit(device=device, num_updates=10, checkpoint=checkpoint),
    )


def random_batch(dtype: torch.dtype = torch.float64, *, zero_rows: tuple[int, ...] = (2, 4)) -> DataProto:
    """Seven rows of three prompts; columns as after the advantages of a training step."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> Tensor:
        return torch.randint(10, 90, (count,), generator=generator)

    def numbers(spread: float, shift: float = 0.0) -> Tensor:
        rows = [
            spread * torch.randn(n, generator=generator, dtype=torch.float64) + shift
            for n in RESPONSE_LENGTHS
        ]
        return columns.jagged([row.to(dtype) for row in rows])

    prompts = [tokens(length) for length in PROMPT_LENGTHS]
    masks = [torch.ones(length, dtype=torch.bool) for length in RESPONSE_LENGTHS]
    for row, token in MASKED:
        masks[row][token] = False
    advantages = [row.clone() for row in columns.rows(numbers(1.0))]
    for row, mask in enumerate(masks):
        advantages[row] = advantages[row] * mask * (row not in zero_rows)
    batch = DataProto.from_dict(
        {
            "prompts": columns.jagged([prompts[index] for index in PROMPT_OF_ROW]),
            "responses": columns.jagged([tokens(length) for length in RESPONSE_LENGTHS]),
            "response_mask": columns.jagged(masks),
            "advantages": columns.jagged(advantages),
            # About the log-probs of an untrained model, so that some ratios are clipped and some are not.
            "old_log_probs": numbers(0.4, -4.6),
            "ref_log_prob": numbers(0.4, -4.6),
        },
        non_tensors={"id": np.array([f"row/{i}" for i in range(len(masks))], dtype=object)},
    )
    batch.meta_info["temperature"] = 0.8
    return batch


def totals_of(batch: DataProto) -> BatchTotals:
    """The counts of a whole optimizer batch, one token at a time."""
    masks = [row.tolist() for row in columns.rows(batch.tensors()["response_mask"])]
    return BatchTotals(num_tokens=sum(map(sum, masks)), num_samples=sum(any(mask) for mask in masks))
