"""The contract of policy losses.

A loss is called on a small batch of known numbers, then on variations of that batch under which the loss of the
batch and its gradient must stay what they are, or become something known. Every broken rule is a Finding with
the numbers that were seen. Loss and gradient are those of the whole batch, so a loss that returns terms and one
that returns a number (verl's convention) are judged alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from algorithms.contract.findings import Finding
from algorithms.contract.loss_probe import LossBatch, ProbedLoss, example_batch
from algorithms.contract.loss_rules import RULES, Trial

from strop.cli.check_functions.policy_losses import probed_loss


def check_policy_loss(
    loss: str | Callable[..., object],
    *,
    settings: Mapping[str, object] | None = None,
    loss_agg_mode: str | None = None,
    seed: int = 0,
) -> list[Finding]:
    """What is wrong with a policy loss, one finding per broken rule; empty for a loss that keeps them all.

    Args:
        loss: a registered name, or a function: registered, of verl's convention, or one whose parameters are
            named like our columns (then those without a default are its columns).
        settings: those of the loss; clip ranges have the defaults of AlgorithmConfig.
        loss_agg_mode: default: the mode that the loss declares, else token-mean.
        seed: of the numbers in the check's batch.

    Raises:
        ValueError: unknown name or setting, or a column the check does not have. Other errors of the function
            itself go through.
    """
    subject = _subject(loss, settings or {}, loss_agg_mode)
    example = example_batch(seed)
    batch = subject.prepared(example)
    before = LossBatch({key: column.clone() for key, column in batch.columns.items()}, batch.mask.clone())
    try:
        base = subject.seen(batch)
    except ValueError as error:
        return [Finding("form", str(error))]
    if not (torch.isfinite(torch.tensor(base.loss)) and torch.isfinite(base.gradient).all()):
        return [
            Finding("finite", f"on ordinary numbers the loss is {base.loss}, or its gradient is not finite")
        ]
    trial = Trial(loss=subject, example=example, batch=batch, before=before, base=base, seed=seed)
    sentences = {rule: broken_by(trial) for rule, broken_by in RULES.items()}
    return [Finding(rule, sentence) for rule, sentence in sentences.items() if sentence is not None]


def _subject(
    loss: str | Callable[..., object], settings: Mapping[str, object], mode: str | None
) -> ProbedLoss:
    probed = probed_loss(loss, settings)
    return ProbedLoss(**(vars(probed) | {"mode": probed.declaration.aggregation_mode(mode)}))
