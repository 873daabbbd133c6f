"""Metrics of the rows of a step: distance of trainer and rollout, and answers in shared states."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from strop.algorithms.aggregation import row_numbers
from strop.algorithms.batch_metrics import Metrics
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.kl import LOG_RATIO_BOUND
from strop.algorithms.reward_kl import kl_metrics
from strop.protocol import DataProto, columns
from strop.utils.metrics import Metric

DIVERGENCE = Metric(
    "rollout_corr/{kl,k3_kl,chi2_token,chi2_seq}",
    "nats; 1",
    "estimates of how far the trainer is from the rollout, mean over tokens; `chi2_seq` over samples",
)
PERPLEXITY = Metric(
    "rollout_corr/{training_ppl,training_log_ppl,rollout_ppl,rollout_log_ppl,log_ppl_diff,log_ppl_abs_diff,"
    "log_ppl_diff_max,log_ppl_diff_min,ppl_ratio}",
    "1; log: nats",
    "perplexity under the trainer and while sampling, and how they differ, over samples",
)
SHARED_STATES = Metric(
    "training/steps_in_shared_states",
    "share",
    "of answers with another one to their prompt in the same state, where the estimator compares these",
)


def batch_off_policy_metrics(rows: DataProto, algorithm: AlgorithmConfig) -> Metrics:
    """DIVERGENCE and PERPLEXITY over sampled tokens; SHARED_STATES where answers are compared; and REWARD_KL."""
    tensors = rows.tensors()
    valid = columns.flat(tensors["response_mask"]).bool()
    of_trainer = tensors["log_probs" if "log_probs" in tensors else "old_log_probs"]
    train, rollout = (columns.flat(column)[valid] for column in (of_trainer, tensors["rollout_log_probs"]))
    row_of = row_numbers(columns.row_lengths(tensors["responses"]))[valid]
    metrics = off_policy_metrics(train, rollout, row_of) if train.numel() else Metrics()
    if "anchor_ids" in tensors and len(rows):
        states = list(zip(rows.non_tensor_batch["uid"], tensors["anchor_ids"].tolist(), strict=True))
        times = Counter(state for state in states if state[1] >= 0)  # below 0: like no other
        metrics[SHARED_STATES] = sum(times[state] > 1 for state in states) / len(states)
    return metrics | kl_metrics(rows, algorithm)


def off_policy_metrics(train: Tensor, rollout: Tensor, rows: Tensor) -> Metrics:
    """DIVERGENCE over tokens (chi2_seq: over samples), and PERPLEXITY over samples.

    With rho = train - rollout per token: kl = mean(-rho), k3_kl = mean(e^rho - 1 - rho), chi2_token =
    mean(e^2rho) - 1, chi2_seq = mean over samples of e^(2 sum rho), - 1. Exponents are clamped to +-20 before
    doubling, all else is measured before any clamp. A sample's log-perplexity is minus its mean log-prob;
    log_ppl_diff is the trainer's minus the rollout's.

    Args:
        train, rollout, rows: [M], valid tokens only; `rows` numbers the sample of each.
    """
    train, rollout = train.detach().double(), rollout.detach().double()
    rho = train - rollout
    _, sample, count = torch.unique(rows, return_inverse=True, return_counts=True)
    zeros = torch.zeros(count.shape, dtype=torch.float64, device=train.device)
    train_log_ppl = -zeros.index_add(0, sample, train) / count  # [B]
    rollout_log_ppl = -zeros.index_add(0, sample, rollout) / count  # [B]
    difference = train_log_ppl - rollout_log_ppl  # [B]
    sample_rho = zeros.index_add(0, sample, rho)  # [B]
    bounded = rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    divergences = {
        "kl": (-rho).mean(),
        "k3_kl": (torch.expm1(bounded) - bounded).mean(),
        "chi2_token": torch.expm1(2 * bounded).mean(),
        "chi2_seq": torch.expm1(2 * sample_rho.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).mean(),
    }
    perplexities = {
        "training_log_ppl": train_log_ppl.mean(),
        "training_ppl": train_log_ppl.exp().mean(),
        "rollout_log_ppl": rollout_log_ppl.mean(),
        "rollout_ppl": rollout_log_ppl.exp().mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
    }
    return {DIVERGENCE.of(name): float(value) for name, value in divergences.items()} | {
        PERPLEXITY.of(name): float(value) for name, value in perplexities.items()
    }
