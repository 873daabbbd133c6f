"""Policy losses as per-token terms; how terms become one number is the business of aggregation.py.

    terms.py            PolicyLossTerms, the registry of losses, and the call of a loss by its name
    spec.py             the losses of a run, resolved from its configuration
    policy.py           the whole loss of some tokens: the policy's term, entropy, KL and teacher together
    clipped.py          vanilla: PPO's clipped surrogate
    cispo.py            CISPO
    covariance.py       Clip-Cov and KL-Cov
    dppo.py             DPPO
    gmpo.py             GMPO
    gspo.py             GSPO
    policy_gradient.py  the plain policy gradient
    smooth.py           SAPO and DRO
    distillation.py     the distance to a teacher
    value.py            the critic's loss
    preference.py       losses of preferences, on one number per conversation
    verl_convention.py  policy losses in verl's calling convention

A loss is a pure function of columns of one shape, [B, R] padded or [N] flat, and of keyword numbers. The loss
of an optimizer batch is the sum of `weights * terms`, with weights computed once for that batch, so every loss
composes with every aggregation mode and every cut into micro-batches of whole rows. What the losses here ask for
stands in `strop.algorithms.builtin_specs`, which needs no torch. Statistics are per-token
values without gradient, whose token means are the metrics `actor/<name>`.

Rules that hold for every loss here, unless its docstring says otherwise:

* Every log-ratio is clamped to +-20 before it is exponentiated; ppo_kl is logged before the clamp.
* Where log_probs equal old_log_probs, the gradient of the sum of the terms of a row is -advantage for each of its
  tokens, which is that of REINFORCE.
* A token of advantage 0 has no gradient.
"""

from strop.algorithms.losses import (  # noqa: F401  (they register their functions)
    cispo,
    clipped,
    covariance,
    dppo,
    gmpo,
    gspo,
    policy_gradient,
    smooth,
)
from strop.algorithms.losses.policy import (
    PolicyLoss,
    policy_loss,
    record_loss,
    rows_with_gradient,
)
from strop.algorithms.losses.spec import LossSpec, aggregation_of, loss_spec
from strop.algorithms.losses.terms import (
    POLICY_LOSS_REGISTRY,
    PolicyLossTerms,
    get_policy_loss_fn,
    policy_loss_terms,
    prepare_columns,
    register_policy_loss,
)

note_policy_loss, rows_that_move = record_loss, rows_with_gradient
"""Old names of both, kept for one version."""

__all__ = [
    "POLICY_LOSS_REGISTRY",
    "LossSpec",
    "PolicyLoss",
    "PolicyLossTerms",
    "aggregation_of",
    "get_policy_loss_fn",
    "loss_spec",
    "note_policy_loss",
    "policy_loss",
    "policy_loss_terms",
    "prepare_columns",
    "record_loss",
    "register_policy_loss",
    "rows_that_move",
    "rows_with_gradient",
]
