"""The rows of actor_batches.py with what a process reward model is trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from actor_batches import random_batch
from transformers import AutoModelForCausalLM

from strop.engines.config import EngineConfig, LoraConfig, MegatronConfig, ModelConfig, OptimizerConfig
from strop.protocol import DataProto, columns
from strop.workers.config import PrmConfig
from strop.workers.models import TrainingInit
from strop.workers.prm import PrmWorker

LR, BETA = 1e-2, 0.5
SCORES = (1.0, 0.0, 0.75, 0.5, 1.0, 0.0, 1.0)
RIGHT = (1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0)
"""Above a half."""


def make_prm(
    model: Path,
    *,
    path: str = "",
    max_tokens: int = 1000,
    checkpoint: Path | None = None,
    device: str = "cpu",
    dtype: str = "float64",
    **engine: Any,
) -> PrmWorker:
    """A process reward model with a fresh optimizer, or that of a checkpoint; further settings are of its engine."""
    return PrmWorker(
        # The policy's adapter must not reach it.
        ModelConfig(path=str(model), dtype=dtype, lora=LoraConfig(rank=2)),  # type: ignore[arg-type]
        PrmConfig(
            path=path,
            beta=BETA,
            optim=OptimizerConfig(lr=LR, max_grad_norm=0.5),
            engine=EngineConfig(
                max_tokens_per_device=max_tokens,
                megatron=MegatronConfig(distributed_optimizer=False),
                **engine,
            ),
        ),
        TrainingInit(device=device, num_updates=10, checkpoint=checkpoint),
    )


def outcome_batch() -> DataProto:
    """The random batch with column token_level_scores: of each row at its last token."""
    batch = random_batch()
    responses = batch.tensors()["responses"]
    rows = [torch.zeros(len(row)) for row in columns.rows(responses)]
    for row, score in zip(rows, SCORES, strict=True):
        row[-1] = score
    return batch.union(DataProto.from_dict({"token_level_scores": columns.jagged(rows)}))


def plain_log_probs(module: object, batch: DataProto) -> list[torch.Tensor]:
    """Log-probs [R] of each response by itself through transformers, at temperature 1."""
    found = []
    for prompt, response in zip(
        columns.rows(batch.tensors()["prompts"]), columns.rows(batch.tensors()["responses"]), strict=True
    ):
        logits = module(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]  # type: ignore[operator]
        found.append(logits.log_softmax(dim=-1).gather(1, response[:, None])[:, 0])
    return found


def prm_ref(batch: DataProto, model: Path) -> DataProto:
    """Column prm_ref_log_prob, about a nat off the model's own, so that sums are not 0."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        rows = [
            row + torch.randn(len(row), generator=generator, dtype=torch.float64)
            for row in plain_log_probs(module, batch)
        ]
    return DataProto.from_dict({"prm_ref_log_prob": columns.jagged(rows)})
