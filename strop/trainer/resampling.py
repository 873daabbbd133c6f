"""PF-PPO: which samples of a step are trained on, and how often, drawn by their scores.

The draw is a pure function of the scores and of (seed, step), or of (seed, step, prompt) within prompts: a resume
and any number of ranks draw the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.shaping import PfPpoMethod, pf_ppo_weights, resample_rows
from strop.base.metrics import Metric
from strop.base.randomness import random_key
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


def drawn_rows(
    scores: Tensor, uids: Sequence[str], algorithm: AlgorithmConfig, *, seed: int, step: int
) -> list[int]:
    """Row numbers to train on, in ascending order, one as often as it was drawn.

    As many are drawn as there are rows; with algorithm.resampling_within=prompt, of each prompt as many as it has.

    Args:
        scores: [B].
        uids: [B], equal for the samples of a prompt.
        algorithm: its resampling.
        seed, step: of the run.

    Source: Zhang et al. 2024, arXiv:2409.06957, which draws within prompts; verl draws within the batch.
    """
    members: dict[str, list[int]] = {}
    for row, uid in enumerate(uids):
        members.setdefault(uid if algorithm.resampling_within == "prompt" else "", []).append(row)
    assert algorithm.resampling != "none", "only called to draw"
    method: PfPpoMethod = algorithm.resampling
    drawn: list[int] = []
    for uid, rows in members.items():
        weights = pf_ppo_weights(scores[rows], method=method, power=algorithm.resampling_power)
        draws = resample_rows(weights, key=random_key(seed, "pf_ppo", step, uid))
        drawn += [rows[draw] for draw in draws.tolist()]
    return sorted(drawn)


def draw_metrics(scores: Tensor, drawn: Sequence[int]) -> dict[str, float]:
    """RESAMPLING of the rows that were drawn."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(scores))  # [B]
    return {
        RESAMPLING.of("not_drawn_samples"): float((counts == 0).sum()),
        RESAMPLING.of("max_draws"): float(counts.max()),
        RESAMPLING.of("score_mean"): float((scores * counts).sum() / counts.sum()),
    }
