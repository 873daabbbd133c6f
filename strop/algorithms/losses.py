"""Policy losses as per-token terms; how terms become one number is the business of aggregation.py.

A loss is elementwise on tensors of any one shape: [B, R] padded or [N] flat. The loss of an optimizer batch
is the sum of `weights * terms`, with weights computed once for that batch, so every loss composes with every
aggregation mode and every cut into micro-batches. Statistics are per-token values without gradient, whose
token means are the metrics `actor/<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.registry import Declaration, Registry

LOG_RATIO_BOUND = 20.0
"""Largest |log-ratio| that is exponentiated; e^20 = 5e8 keeps float32 finite."""


@dataclass(frozen=True, kw_only=True)
class PolicyLossTerms:
    """One value per token, in the shape of the inputs."""

    terms: Tensor
    """Loss of each token, not reduced; carries the gradient."""
    statistics: Mapping[str, Tensor]
    """Detached per-token values by metric name."""


PolicyLossFn = Callable[..., PolicyLossTerms]

# A name taken by another function is replaced, as files of the field expect to do.
POLICY_LOSS_REGISTRY: Registry[PolicyLossFn] = Registry("policy loss", replaceable=True)
register_policy_loss = POLICY_LOSS_REGISTRY.register
"""Decorator: `@register_policy_loss(name, needs=[...], settings=[...])`."""


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The function registered under `name`; ValueError with the known names if there is none."""
    return POLICY_LOSS_REGISTRY[name]


def policy_loss_declaration(name: str) -> Declaration:
    """The columns and settings that the loss under `name` asks for."""
    return POLICY_LOSS_REGISTRY.declaration(name)


def policy_loss_terms(
    name: str, *, mask: Tensor, columns: Mapping[str, Tensor], settings: Mapping[str, float]
) -> PolicyLossTerms:
    """Terms of the loss `name`, given what it declared; safe for any value outside the mask.

    Masked positions are set to 0 in every column first: a NaN there would survive a weight of 0 on its way
    back through an exponential.

    Args:
        mask: true on tokens that are trained on; the shape of every column.
        columns: log_probs (with gradient), old_log_probs, advantages, and what else the loss needs.
        settings: numbers by name; those the loss did not declare are not passed.

    Raises:
        ValueError: unknown name, no declaration, or a missing column.
    """
    function, declaration = get_policy_loss_fn(name), policy_loss_declaration(name)
    if not declaration.needs:
        raise ValueError(
            f"policy loss {name!r} declares no columns: register it with "
            f"@register_policy_loss({name!r}, needs=[...]) so that strop knows what to pass"
        )
    missing = sorted(declaration.needs - columns.keys())
    if missing:
        raise ValueError(
            f"policy loss {name!r} needs the columns {', '.join(missing)}, but the batch has "
            f"{', '.join(sorted(columns))}"
        )
    valid = mask.bool()
    arguments: dict[str, Tensor | float] = {
        key: torch.where(valid, columns[key], torch.zeros_like(columns[key])) for key in declaration.needs
    }
    arguments.update({key: value for key, value in settings.items() if key in declaration.settings})
    return function(**arguments)


@register_policy_loss(
    "vanilla",
    needs=("log_probs", "old_log_probs", "advantages"),
    settings=("clip_low", "clip_high", "clip_c"),
)
def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLossTerms:
    """PPO's clipped surrogate with separate clip ranges and a cap for negative advantages (dual clip).

    With ratio = exp(clamp(log_probs - old_log_probs, +-20)):

        clipped(A) = max(-A * ratio, -A * clamp(ratio, 1 - clip_low, 1 + clip_high))
        term       = clipped(A) where A >= 0, else min(clipped(A), -A * clip_c)

    Args:
        log_probs: current policy, with gradient; any shape.
        old_log_probs: the policy at the start of the step; same shape, as are the advantages.
        clip_low, clip_high: clip ranges below and above a ratio of 1.
        clip_c: cap on the ratio where the advantage is negative; above 1.

    Returns:
        Terms, and the statistics pg_clipfrac (1 where the clipped side won), pg_clipfrac_lower (1 where
        the cap won), ppo_kl (old_log_probs - log_probs, not clamped) and ratio.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; asymmetric ranges: Yu et al. 2025,
        arXiv:2503.14476; dual clip: Ye et al. 2020, arXiv:1912.09729.
    """
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    surrogate = torch.maximum(unclipped, bounded)
    cap = -advantages * clip_c
    is_negative = advantages < 0
    terms = torch.where(is_negative, torch.minimum(surrogate, cap), surrogate)
    with torch.no_grad():
        statistics = {
            "pg_clipfrac": (bounded > unclipped).to(ratio.dtype),
            "pg_clipfrac_lower": (is_negative & (surrogate > cap)).to(ratio.dtype),
            "ppo_kl": -log_ratio.detach(),
            "ratio": ratio.detach(),
        }
    return PolicyLossTerms(terms=terms, statistics=statistics)
