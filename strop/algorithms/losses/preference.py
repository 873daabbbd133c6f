"""Losses of preferences, as functions of one number per conversation.

A policy's number is the log-prob of an answer, a reward model's the score of a conversation. The losses couple the two
of an example (and kto all of a batch), while passes are cut by tokens and ranks have rows of their own. So a step first
asks for the numbers of the whole batch; the derivative of the loss by each of them is the weight with which its
gradient enters the second pass. That is the gradient of the loss itself, however the batch is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.algorithms.preference_loss_config import PreferenceLossConfig

EVEN = 1e-6
"""A margin that is nothing but rounding, as before a policy has learned: neither answer is the better one."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """n examples of two conversations each; float64."""

    numbers: Tensor
    """[n, 2]: log-probs of the answers under the policy, or scores."""
    reference: Tensor
    """[n, 2]: the same log-probs under the model that the policy began with; zeros for scores."""
    lengths: Tensor
    """[n, 2]: tokens of the answers."""
    margins: Tensor
    """[n]: by how much a better answer is to win, with loss=reward."""
    is_good: Tensor
    """[n]: with loss=kto."""


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """The loss of a batch, and what follows from it."""

    loss: float
    """Mean over the examples."""
    weights: Tensor
    """[n, 2]: derivative of the loss by each number."""
    metrics: dict[str, float]


def weigh(config: PreferenceLossConfig, batch: Batch) -> Weighed:
    """The loss and its derivative by the numbers of the batch."""
    numbers = batch.numbers.detach().clone().requires_grad_()
    terms, metrics = _terms(config, numbers, batch)
    loss = terms.mean()
    (weights,) = torch.autograd.grad(loss, numbers)
    return Weighed(loss=float(loss.detach()), weights=weights, metrics=metrics)


def _terms(config: PreferenceLossConfig, numbers: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The loss of each example [n], differentiable, and numbers of the batch."""
    if config.loss == "reward":
        margins = numbers[:, 0] - numbers[:, 1]
        terms = -F.logsigmoid(margins - batch.margins) + config.center_coef * numbers.sum(1).square()
        return terms, _reward_metrics(numbers.detach())
    means = numbers / batch.lengths
    ratios = means if config.loss in ("orpo", "simpo") else numbers - batch.reference
    if config.loss == "kto":
        return _kto(config, ratios, batch)
    logps = numbers.detach().mean(0)
    metrics = _reward_metrics(config.beta * ratios.detach())
    metrics |= {"logps/chosen": float(logps[0]), "logps/rejected": float(logps[1])}
    imitation = -(1.0 if config.loss == "orpo" else config.nll_coef) * means[:, 0]
    return _margin_loss(config, ratios, batch.lengths) + imitation, metrics


def _margin_loss(config: PreferenceLossConfig, ratios: Tensor, lengths: Tensor) -> Tensor:
    """The loss of each comparison [n], of log-ratios to the starting model; with orpo and simpo of mean log-probs."""
    margins = config.beta * (ratios[:, 0] - ratios[:, 1])
    if config.loss == "simpo":
        return -F.logsigmoid(margins - config.simpo_gamma)
    if config.loss == "orpo":
        return -config.beta * F.logsigmoid(_log_odds(ratios[:, 0]) - _log_odds(ratios[:, 1]))
    if config.loss == "hinge":
        return F.relu(1 - margins)
    if config.loss == "ipo":
        means = ratios / lengths
        return (means[:, 0] - means[:, 1] - 1 / (2 * config.beta)).square()
    flip_prob = config.label_smoothing
    return -(1 - flip_prob) * F.logsigmoid(margins) - flip_prob * F.logsigmoid(-margins)


def _log_odds(means: Tensor) -> Tensor:
    """log p / (1 - p) of mean log-probs; a p of 1, where it has no number, counts as the one right below."""
    means = means.clamp(max=-1e-12)
    return means - torch.log(-torch.expm1(means))


def _kto(config: PreferenceLossConfig, ratios: Tensor, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Good answers rise above, bad ones sink below the distance to the starting model, which itself is not trained:
    the mean log-ratio of answers to prompts that are not theirs, at least 0."""
    distance = ratios[:, 1].detach().mean().clamp(min=0)
    above = config.beta * (ratios[:, 0] - distance)
    good = config.desirable_weight * (1 - torch.sigmoid(above))
    bad = config.undesirable_weight * (1 - torch.sigmoid(-above))
    rewards = config.beta * ratios[:, 0].detach()
    metrics = {"kl": float(distance)}
    for name, of_kind in (("chosen", batch.is_good), ("rejected", ~batch.is_good)):
        if bool(of_kind.any()):
            metrics[f"rewards/{name}"] = float(rewards[of_kind].mean())
            metrics[f"logps/{name}"] = float(batch.numbers.detach()[of_kind, 0].mean())
    if {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return torch.where(batch.is_good, good, bad), metrics


def _reward_metrics(rewards: Tensor) -> dict[str, float]:
    margins = rewards[:, 0] - rewards[:, 1]
    signs = torch.where(margins.abs() > EVEN, margins.sign(), 0.0)
    return {
        "rewards/chosen": float(rewards[:, 0].mean()),
        "rewards/rejected": float(rewards[:, 1].mean()),
        "rewards/margins": float(margins.mean()),
        "rewards/accuracies": float((signs / 2 + 0.5).mean()),
    }
