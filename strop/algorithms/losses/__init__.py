"""Policy losses as per-token terms; how terms become one number is the business of aggregation.py.

    terms.py          what a loss is: PolicyLossTerms, the registry, and calling a loss by its name
    clipped.py        vanilla: PPO's clipped surrogate
    sequence.py       gspo (gspo_token), gmpo (geo_mean): one ratio per response
    weighted.py       cispo, dppo_tv, dppo_kl: log-probs under a weight without gradient
    smooth.py         sapo, dro, gpg (reinforce): no clipping
    covariance.py     clip_cov, kl_cov: tokens chosen by statistics of the whole optimizer batch
    distillation.py   terms that pull the policy towards a teacher
    spec.py           the losses of a run, resolved from its configuration
    policy.py         the whole loss of some tokens: the policy's term, entropy, KL and teacher together

A loss is a pure function of columns of one shape, [B, R] padded or [N] flat, and of keyword numbers. The loss
of an optimizer batch is the sum of `weights * terms`, with weights computed once for that batch, so every loss
composes with every aggregation mode and every cut into micro-batches of whole rows. What the losses here ask for
stands in `strop.algorithms.loss_declarations`, which needs no torch. Statistics are per-token
values without gradient, whose token means are the metrics `actor/<name>`.

Rules that hold for every loss here, unless its docstring says otherwise:

* Every log-ratio is clamped to +-20 before it is exponentiated; ppo_kl is logged before the clamp.
* Where log_probs equal old_log_probs, the gradient of the sum of the terms of a row is -advantage for each of its
  tokens, which is that of REINFORCE.
* A token of advantage 0 has no gradient.
"""

from strop.algorithms.loss_declarations import check_loss_settings, policy_loss_declaration
from strop.algorithms.losses.clipped import clipped_policy_loss
from strop.algorithms.losses.covariance import (
    clip_cov_loss,
    kl_cov_loss,
    select_clip_cov,
    select_kl_cov,
)
from strop.algorithms.losses.distillation import reverse_kl_terms, topk_forward_kl
from strop.algorithms.losses.policy import (
    PolicyBatch,
    PolicyLoss,
    PolicyTokens,
    note_policy_loss,
    policy_batch,
    policy_loss,
)
from strop.algorithms.losses.sequence import gmpo_loss, gspo_loss
from strop.algorithms.losses.smooth import dro_loss, policy_gradient_loss, sapo_loss
from strop.algorithms.losses.spec import LossSpec, aggregation_of, loss_spec, shared_settings
from strop.algorithms.losses.terms import (
    LOG_RATIO_BOUND,
    POLICY_LOSS_REGISTRY,
    PolicyLossFn,
    PolicyLossTerms,
    get_policy_loss_fn,
    policy_loss_terms,
    prepare_columns,
    register_policy_loss,
)
from strop.algorithms.losses.weighted import cispo_loss, dppo_kl_loss, dppo_tv_loss

__all__ = [
    "LOG_RATIO_BOUND",
    "POLICY_LOSS_REGISTRY",
    "LossSpec",
    "PolicyBatch",
    "PolicyLoss",
    "PolicyLossFn",
    "PolicyLossTerms",
    "PolicyTokens",
    "aggregation_of",
    "check_loss_settings",
    "cispo_loss",
    "clip_cov_loss",
    "clipped_policy_loss",
    "dppo_kl_loss",
    "dppo_tv_loss",
    "dro_loss",
    "get_policy_loss_fn",
    "gmpo_loss",
    "gspo_loss",
    "kl_cov_loss",
    "loss_spec",
    "note_policy_loss",
    "policy_batch",
    "policy_gradient_loss",
    "policy_loss",
    "policy_loss_declaration",
    "policy_loss_terms",
    "prepare_columns",
    "register_policy_loss",
    "reverse_kl_terms",
    "sapo_loss",
    "select_clip_cov",
    "select_kl_cov",
    "shared_settings",
    "topk_forward_kl",
]
