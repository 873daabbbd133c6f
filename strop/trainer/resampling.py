"""PF-PPO: what the samples of a step are drawn by, and what came of the draw."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.base.metrics import Metric
from strop.protocol import DataProto, columns

NOT_DRAWN = "not drawn"
"""Why a sample was filtered."""
RESAMPLING = Metric(
    "training/resampling/{not_drawn_samples,max_draws,score_mean}",
    "samples; times; reward",
    "with PF-PPO: samples not drawn, how often the most frequent one was, mean score of what is trained on",
)


def sample_scores(data: DataProto) -> Tensor:
    """What each sample was given for its answer [B] float64: shaped scores and a reward model's, without a KL term."""
    tensors = data.tensors()
    scores = torch.stack(
        [row.sum(dtype=torch.float64) for row in columns.rows(tensors["token_level_scores"])]
    )
    return scores + tensors["rm_scores"].to(scores) if "rm_scores" in tensors else scores


def draw_metrics(scores: Tensor, drawn: Sequence[int]) -> dict[str, float]:
    """RESAMPLING of the rows that were drawn."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(scores))  # [B]
    return {
        RESAMPLING.of("not_drawn_samples"): float((counts == 0).sum()),
        RESAMPLING.of("max_draws"): float(counts.max()),
        RESAMPLING.of("score_mean"): float((scores * counts).sum() / counts.sum()),
    }
