"""Policy losses: the type of their result, their registry, and the call by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algorithms.kl import LOG_RATIO_BOUND
from strop.algorithms.registry import Declaration, FunctionRegistry, settings_for
from strop.algorithms.specs import LOSS_DECLARATIONS, PPO_KL, RATIO, policy_loss_declaration


@dataclass(frozen=True, kw_only=True)
class PolicyLossTerms:
    """One value per token, in the shape of the inputs."""

    terms: Tensor
    """Loss of each token, not reduced; carries the gradient."""
    statistics: Mapping[str, Tensor]
    """Detached per-token values by metric name."""


PolicyLossFn = Callable[..., PolicyLossTerms]

# A name taken by another function is replaced, as files of verl expect to do.
POLICY_LOSS_REGISTRY: FunctionRegistry[PolicyLossFn] = FunctionRegistry(
    LOSS_DECLARATIONS.kind, replaceable=True, declarations=LOSS_DECLARATIONS
)
register_policy_loss = POLICY_LOSS_REGISTRY.register
"""Decorator: `@register_policy_loss(name, needs=[...], settings=[...])`; see `FunctionRegistry.register`."""
implements = POLICY_LOSS_REGISTRY.implements
"""Decorator of the built-in losses, whose declarations stand in `strop.algorithms.specs`."""


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """The function registered under `name`; ValueError with the known names if there is none."""
    return POLICY_LOSS_REGISTRY[name]


def policy_loss_terms(
    name: str, *, mask: Tensor, columns: Mapping[str, Tensor], settings: Mapping[str, object]
) -> PolicyLossTerms:
    """Terms of the loss `name`, given what it declared; safe for any value outside the mask.

    Masked positions are set to 0 in every column first: a NaN there would survive a weight of 0 on its way
    back through an exponential.

    Args:
        mask: true on tokens that are trained on; [B, R] padded or [N] flat, the shape of every column.
        columns: log_probs (with gradient), old_log_probs, advantages, and what else the loss needs. Not given:
            response_mask is `mask`, and row_ids of a padded layout count its rows. A flat layout must bring the
            row_ids that a loss per response needs.
        settings: numbers by name; those the loss does not have are not passed.

    Raises:
        ValueError: unknown name, no declaration, or a missing column.
    """
    function, declaration = get_policy_loss_fn(name), policy_loss_declaration(name)
    if declaration.is_user_convention:
        raise ValueError(
            f"policy loss {name!r} declares no columns: register it with "
            f"@register_policy_loss({name!r}, needs=[...]) so that strop knows what to pass, or call it in the "
            f"calling convention of verl through strop.algorithms.losses.verl_convention.call_policy_loss"
        )
    valid = mask.bool()
    clean = {
        key: torch.where(valid, column, torch.zeros_like(column)) if key in declaration.needs else column
        for key, column in columns.items()
    }
    return call_loss(name, function, declaration, mask=valid, columns=clean, settings=settings)


def call_loss(
    name: str,
    function: Callable[..., object],
    declaration: Declaration,
    *,
    mask: Tensor,
    columns: Mapping[str, Tensor],
    settings: Mapping[str, object],
) -> PolicyLossTerms:
    """Terms of a loss for columns as they are, also outside the mask; see `policy_loss_terms`.

    Raises:
        ValueError: a missing column, or a result that is not one value per token.
    """
    valid = mask.bool()
    available = {"response_mask": valid, **columns}
    if valid.dim() == 2 and "row_ids" not in available:
        rows = torch.arange(valid.shape[0], device=valid.device)
        available["row_ids"] = rows[:, None].expand(valid.shape)
    _require_columns(name, declaration, available)
    arguments: dict[str, object] = {key: available[key] for key in declaration.needs}
    arguments.update(settings_for(function, declaration, settings))
    result = function(**arguments)
    if not isinstance(result, PolicyLossTerms):
        raise ValueError(
            f"policy loss {name!r} returned a {type(result).__name__}; a loss that declares its columns returns "
            f"PolicyLossTerms(terms=..., statistics=...)"
        )
    for label, values in {"terms": result.terms, **result.statistics}.items():
        if values.shape != mask.shape:
            raise ValueError(
                f"policy loss {name!r} returned {label} of shape {tuple(values.shape)} for columns of shape "
                f"{tuple(mask.shape)}: it must be one value per token, not reduced"
            )
    return result


def prepare_columns(
    name: str, *, mask: Tensor, columns: Mapping[str, Tensor], settings: Mapping[str, object]
) -> dict[str, Tensor]:
    """Columns that the loss `name` computes once per optimizer batch from all its tokens, over all ranks.

    The result goes into `columns` of `policy_loss_terms`, cut like the others. It is empty for a loss without
    such statistics, and then nothing is read.

    Args:
        mask: true on tokens that are trained on; any shape, that of the columns and of the result.
        columns: log_probs, old_log_probs, advantages; values outside the mask do not matter.
        settings: as for `policy_loss_terms`.
    """
    return call_prepare(name, policy_loss_declaration(name), mask=mask, columns=columns, settings=settings)


def call_prepare(
    name: str,
    declaration: Declaration,
    *,
    mask: Tensor,
    columns: Mapping[str, Tensor],
    settings: Mapping[str, object],
) -> dict[str, Tensor]:
    """`prepare_columns` of a loss that need not be registered."""
    prepare = declaration.prepare
    if prepare is None:
        return {}
    valid = mask.bool().reshape(-1)
    parameters = inspect.signature(prepare).parameters
    arguments: dict[str, object] = {"response_mask": valid} if "response_mask" in parameters else {}
    for key, column in columns.items():
        if key in parameters and key != "response_mask":
            flat = column.detach().reshape(-1)
            arguments[key] = torch.where(valid, flat, torch.zeros_like(flat))
    arguments.update({key: value for key, value in settings.items() if key in parameters})
    with torch.no_grad():
        prepared: Mapping[str, Tensor] = prepare(**arguments)
    shapes = {key: tuple(column.shape) for key, column in prepared.items()}
    if shapes != dict.fromkeys(declaration.prepared, tuple(valid.shape)):
        raise ValueError(
            f"{prepare.__qualname__} of policy loss {name!r} returned columns of the shapes {shapes}, but it must "
            f"return {', '.join(sorted(declaration.prepared))} of shape {tuple(valid.shape)}"
        )
    return {key: column.reshape(mask.shape) for key, column in prepared.items()}


def probability_ratio(log_ratio: Tensor) -> Tensor:
    """exp of the log-ratio clamped to +-20; without gradient beyond."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def clipped_surrogate(
    advantages: Tensor, ratio: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """max(-A * ratio, -A * clamp(ratio, 1 - clip_low, 1 + clip_high)), and where the clipped side won (bool)."""
    unclipped = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, bounded), bounded > unclipped


def ratio_statistics(log_ratio: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """The statistics that every loss has: ppo_kl (minus the log-ratio, not clamped) and ratio."""
    return {PPO_KL.last: -log_ratio.detach(), RATIO.last: ratio.detach()}


def _require_columns(name: str, declaration: Declaration, available: Mapping[str, Tensor]) -> None:
    missing = sorted(declaration.needs - available.keys())
    if not missing:
        return
    reasons = []
    if "row_ids" in missing:
        reasons.append(
            "it reduces per response, and flat columns do not tell where one ends: give row_ids, the row number "
            "of each token (aggregation.row_numbers)"
        )
    prepared = sorted(declaration.prepared & set(missing))
    if prepared:
        reasons.append(
            f"{', '.join(prepared)} is computed once per optimizer batch: give what prepare_columns returns"
        )
    raise ValueError(
        f"policy loss {name!r} needs the columns {', '.join(missing)}, but the batch has "
        f"{', '.join(sorted(available))}" + "".join(f"; {reason}" for reason in reasons)
    )
