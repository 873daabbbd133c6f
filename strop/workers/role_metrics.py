"""Metrics of reward model and process reward model over the rows of a step."""

from __future__ import annotations

from strop.algorithms.batch_metrics import Metrics, mean_max_min
from strop.algorithms.config import AlgorithmConfig
from strop.protocol import DataProto, columns
from strop.utils.metrics import Metric

REWARD_MODEL_SCORE = Metric(
    "reward_model/score/{mean,max,min}",
    "reward",
    "of the reward model, when there is one, over trained samples",
)
PROCESS_REWARD = Metric(
    "prm/reward/{mean,max,min}",
    "reward",
    "of the process reward model, over sampled tokens, before any weight of the estimator",
)
REWARD_MODEL_TRUNCATED = Metric("reward_model/truncated", "samples", "that it did not read to the end")


def role_metrics(rows: DataProto, _: AlgorithmConfig) -> Metrics:
    """The metrics above, of what there is."""
    tensors, metrics = rows.tensors(), Metrics()
    if "rm_scores" in tensors:
        metrics |= mean_max_min(REWARD_MODEL_SCORE, tensors["rm_scores"])
    if "process_rewards" in tensors:
        sampled = columns.flat(tensors["response_mask"]).bool()
        metrics |= mean_max_min(PROCESS_REWARD, columns.flat(tensors["process_rewards"])[sampled])
    if "rm_cut_tokens" in tensors:
        metrics[REWARD_MODEL_TRUNCATED] = float((tensors["rm_cut_tokens"] > 0).sum())
    return metrics
