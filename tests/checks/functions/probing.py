"""What the tests of rules share: a loss and an estimator asked, and what the check says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from strop.algorithms.losses import PolicyLossTerms
from strop.cli.check_functions.estimator_batches import Batch, random_batch
from strop.cli.check_functions.estimator_rules import RULES, EstimatorTraits, Trial
from strop.cli.check_functions.policy_losses import check_policy_loss

CLAIMS = EstimatorTraits(compares_groups=True, is_shift_invariant=True, scaling="linear")
"""Everything that an estimator can claim."""


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs).clamp(-20, 20).exp()


def terms(values: Tensor, **statistics: Tensor) -> PolicyLossTerms:
    return PolicyLossTerms(terms=values, statistics=statistics)


def sentences(loss: Callable[..., object], **arguments: object) -> dict[str, str]:
    """What the check says of a loss, by rule."""
    found = check_policy_loss(loss, **arguments)  # type: ignore[arg-type]
    return {finding.rule: finding.sentence for finding in found}


def broken(rule: str, estimate: Callable[[Batch], Tensor], claims: EstimatorTraits = CLAIMS) -> list[str]:
    """What a rule says of an estimator over a few batches."""
    found = []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        trial = Trial(estimate=estimate, batch=random_batch(generator), traits=claims, generator=generator)
        found.append(RULES[rule](trial))
    return [sentence for sentence in found if sentence is not None]
