"""The contract of policy losses.

A loss is called on a small batch of known numbers, then on variations of that batch under which the loss of the
batch and its gradient must stay what they are, or become something known. Every broken rule is a Finding with
the numbers that were seen. Loss and gradient are those of the whole batch, so a loss that returns terms and one
that returns a number (verl's convention) are judged alike.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import torch
from algorithms.contract.findings import Finding
from algorithms.contract.loss_probe import COLUMNS, LossBatch, ProbedLoss, example_batch
from algorithms.contract.loss_rules import RULES, Trial

from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.losses.spec import shared_settings
from strop.algorithms.losses.terms import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from strop.algorithms.registry import Declaration, check_settings, with_own_settings
from strop.algorithms.specs import LOSS_SHARED_SETTINGS, policy_loss_declaration
from strop.utils.registry import required_parameters


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
    function: Callable[..., object]
    if isinstance(loss, str):
        name, function, declaration = loss, get_policy_loss_fn(loss), policy_loss_declaration(loss)
    else:
        names = [key for key, registered in POLICY_LOSS_REGISTRY.items() if registered is loss]
        name = names[0] if names else getattr(loss, "__name__", repr(loss))
        function = loss
        declaration = policy_loss_declaration(name) if names else _inferred(loss)
    own = {key: value for key, value in settings.items() if key not in LOSS_SHARED_SETTINGS}
    check_settings("policy loss", name, declaration, own, elsewhere=LOSS_SHARED_SETTINGS)
    unknown = sorted(declaration.needs - {*COLUMNS, "response_mask", "row_ids", *declaration.prepared})
    if unknown:
        raise ValueError(
            f"policy loss {name!r} needs {', '.join(unknown)}, which the check's batch does not have; it has "
            f"{', '.join(COLUMNS)}, response_mask and row_ids"
        )
    shared = shared_settings(AlgorithmConfig())
    return ProbedLoss(
        name=name,
        function=function,
        declaration=declaration,
        settings=dict(settings) if declaration.is_user_convention else {**shared, **settings},
        mode=declaration.aggregation_mode(mode),
    )


def _inferred(function: Callable[..., object]) -> Declaration:
    """A function with a parameter log_probs takes our columns; any other follows verl's convention."""
    parameters = inspect.signature(function).parameters
    if "log_probs" not in parameters:
        return Declaration()
    inferred = Declaration(
        needs=frozenset(required_parameters(function)) - LOSS_SHARED_SETTINGS.keys(),
        settings=frozenset(parameters.keys() & LOSS_SHARED_SETTINGS.keys()),
    )
    return with_own_settings(function, inferred)
