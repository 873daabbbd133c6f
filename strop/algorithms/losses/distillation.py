"""Terms that pull the policy towards a teacher; per token, not reduced, as those of a policy loss.

Forward KL, from the teacher's most likely tokens, on any text; reverse KL, from the one token that was sampled,
on the policy's own samples.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from strop.algorithms.kl import kl_penalty
from strop.algorithms.losses.spec import LossSpec
from strop.algorithms.losses.terms import PolicyLossTerms

TAIL_EPS = 1e-8
"""Smallest probability of all tokens outside the top k, so that its logarithm is finite."""


def distance(
    spec: LossSpec,
    log_probs: Tensor,
    columns: Mapping[str, Tensor],
    chosen_log_probs: Tensor | None,
    is_likely: Tensor | None,
) -> PolicyLossTerms:
    """Distance of the policy to the teacher at each of these tokens; arguments as of `policy_loss`."""
    distillation = spec.algorithm.distillation
    if distillation.kind == "reverse_kl":
        return reverse_kl_terms(log_probs, columns["teacher_log_prob"], kind=distillation.kl_kind)
    assert chosen_log_probs is not None, "asked for where spec.takes_chosen_tokens"
    return topk_forward_kl(
        chosen_log_probs,
        columns["teacher_logprobs"].to(chosen_log_probs),
        with_tail=distillation.with_tail,
        is_likely=is_likely,
    )


def topk_forward_kl(
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    *,
    with_tail: bool = False,
    is_likely: Tensor | None = None,
) -> PolicyLossTerms:
    """KL(teacher || policy) at each position over the teacher's top k tokens.

        term = sum over k of p_teacher(k) * (log p_teacher(k) - log p(k))

    Neither side is renormalised. The sum leaves out the other tokens, so it can be below 0 and pushes the
    policy's mass into the top k; `with_tail` adds all of them as one more outcome, which makes the term a
    divergence (never below 0, and a lower bound of the full one).

    Args:
        log_probs: [..., K], of the policy, with gradient, at the teacher's top k tokens.
        teacher_log_probs: [..., K], of the teacher, at the same tokens.
        with_tail: count the tokens outside the top k as one.
        is_likely: [..., K] bool, true where the token is also one of the policy's top k.

    Returns:
        Terms [...], and the statistics student_mass and teacher_mass: the probability inside the top k. With
        is_likely also overlap_ratio, the share of tokens that are in both, and overlap_token_advantage, their mean
        of p_teacher(k) * (log p(k) - log p_teacher(k)), 0 where there are none.

    Source: Hinton et al. 2015, arXiv:1503.02531, in the form of a divergence; the overlap as in arXiv:2604.13016,
        in the form in which verl logs it.
    """
    if log_probs.shape != teacher_log_probs.shape:
        raise ValueError(
            f"the policy's log-probs have shape {tuple(log_probs.shape)} and the teacher's "
            f"{tuple(teacher_log_probs.shape)}: both must hold the teacher's top k tokens of each position"
        )
    teacher = teacher_log_probs.detach()
    parts = teacher.exp() * (teacher - log_probs)
    terms = parts.sum(dim=-1)
    mass, teacher_mass = log_probs.exp().sum(dim=-1), teacher.exp().sum(dim=-1)
    if with_tail:
        tail, teacher_tail = ((1 - inside).clamp(min=TAIL_EPS) for inside in (mass, teacher_mass))
        terms = terms + teacher_tail * (teacher_tail.log() - tail.log())
    statistics = {"student_mass": mass.detach(), "teacher_mass": teacher_mass}
    if is_likely is not None:
        shared = is_likely.sum(dim=-1)
        statistics["overlap_ratio"] = shared.to(teacher) / is_likely.shape[-1]
        advantages = -(parts.detach() * is_likely).sum(dim=-1)
        statistics["overlap_token_advantage"] = advantages / shared.clamp(min=1)
    return PolicyLossTerms(terms=terms, statistics=statistics)


def reverse_kl_terms(log_probs: Tensor, teacher_log_probs: Tensor, *, kind: str = "k1+") -> PolicyLossTerms:
    """Estimate of KL(policy || teacher) at each token that the policy sampled.

    The default has the value of k1, log_probs - teacher_log_probs, and the gradient of k2, whose expectation is
    that of the divergence at the sampled position. See `kl_penalty` for the other kinds; the plain k1 has a
    gradient that averages to zero.

    Args:
        log_probs: of the sampled tokens, with gradient; any shape.
        teacher_log_probs: of the same tokens under the teacher; same shape.
        kind: estimator, by the names of `kl_penalty`.

    Returns:
        Terms, and the statistic reverse_kl: log_probs - teacher_log_probs, whatever the kind.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    teacher = teacher_log_probs.detach()
    with torch.no_grad():
        statistics = {"reverse_kl": log_probs - teacher}
    return PolicyLossTerms(terms=kl_penalty(log_probs, teacher, kind), statistics=statistics)
