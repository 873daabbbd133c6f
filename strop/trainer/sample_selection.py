"""Samples chosen for training: drawn by their scores (PF-PPO), or the best ones kept (RAFT)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import Tensor

from strop.algorithms.resampling import drawn_rows
from strop.algorithms.sample_selection_config import KeepConfig
from strop.config.sections import where_on
from strop.run.samples.selection import select_samples
from strop.trainer.config import Config
from strop.trainer.rollout_batch import RolloutBatch
from strop.utils.metrics import Metric
from strop.workers.summary import answer_scores

NOT_DRAWN = "not drawn"
"""Reason of a filtered sample."""
NOT_KEPT = "not among the samples to keep"
"""As NOT_DRAWN."""
KEEP = Metric(
    "training/keep/{samples,prompts_without,score_mean}",
    "samples; prompts; reward",
    "with `algorithm.keep`: samples that are trained on, prompts that none is left of, mean score of what is trained "
    "on, where something is",
)
RESAMPLING = Metric(
    "training/resampling/{not_drawn_samples,max_draws,score_mean}",
    "samples; times; reward",
    "with PF-PPO: samples not drawn, how often the most frequent one was, mean score of what is trained on",
)


def chosen(batch: RolloutBatch, config: Config, step: int) -> tuple[RolloutBatch, dict[str, str]]:
    """The rows that are trained on, and why other samples are not; a row that was drawn twice is there twice.

    Rows of which a correction left no token cannot be chosen.
    """
    algorithm = config.algorithm
    usable_rows = [row for row, count in enumerate(batch.num_trained) if count]
    usable = batch.take(usable_rows)
    if not len(usable):
        return usable, {}
    scores = answer_scores(batch.columns_for("resampling").get().tensors(), dtype=torch.float64)
    if keep := where_on(algorithm.keep):
        worth = _worth(scores, batch)
        rows, reason = _kept_rows(worth, usable, keep), NOT_KEPT
        selected = usable.take(rows)
        metrics = _keep_metrics(worth, usable, selected)
    else:
        uids = [report.uid for report in usable.reports]
        scores = scores[usable_rows]
        rows = drawn_rows(scores, uids, algorithm, seed=config.trainer.seed, step=step)
        selected = usable.take(rows)
        metrics, reason = _draw_metrics(scores, rows), NOT_DRAWN
    selected = replace(selected, metrics={**selected.metrics, **metrics})
    return selected, dict.fromkeys(usable.episode_ids - selected.episode_ids, reason)


def _draw_metrics(scores: Tensor, drawn: Sequence[int]) -> dict[str, float]:
    """RESAMPLING of the rows that were drawn."""
    counts = torch.bincount(torch.tensor(drawn), minlength=len(scores))  # [B]
    return {
        RESAMPLING.of("not_drawn_samples"): float((counts == 0).sum()),
        RESAMPLING.of("max_draws"): float(counts.max()),
        RESAMPLING.of("score_mean"): float((scores * counts).sum() / counts.sum()),
    }


def _worth(scores: Tensor, batch: RolloutBatch) -> dict[str, float]:
    """Worth of each sample, by its id: the score of its first row, which carries all of it."""
    worth: dict[str, float] = {}
    for report, score in zip(batch.reports, scores.tolist(), strict=True):
        worth.setdefault(report.episode_id, score)
    return worth


def _kept_rows(worth: Mapping[str, float], batch: RolloutBatch, keep: KeepConfig) -> list[int]:
    """Row numbers of the samples that are kept, all rows of each."""
    uid_of = {report.episode_id: report.uid for report in batch.reports}
    samples = list(uid_of)
    scores = [worth[sample] for sample in samples]
    kept = select_samples(scores, list(uid_of.values()), best=keep.best, min_score=keep.min_score)
    names = {samples[number] for number in kept}
    return [row for row, report in enumerate(batch.reports) if report.episode_id in names]


def _keep_metrics(worth: Mapping[str, float], batch: RolloutBatch, kept: RolloutBatch) -> dict[str, float]:
    """KEEP, of all rows and of those that are kept."""
    lost = {report.uid for report in batch.reports} - {report.uid for report in kept.reports}
    scores = [worth[sample] for sample in dict.fromkeys(report.episode_id for report in kept.reports)]
    numbers = {KEEP.of("samples"): float(len(scores)), KEEP.of("prompts_without"): float(len(lost))}
    return numbers | ({KEEP.of("score_mean"): fmean(scores)} if scores else {})
