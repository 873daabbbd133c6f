"""verl's algorithm, policy loss and distillation: rules that depend on several keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.algorithms.specs import ADV_DECLARATIONS
from strop.compat.migrate import verl_agent
from strop.compat.migrate.result import Facts, Outcome, integer, many, refuse, skip
from strop.compat.migrate.verl_prime import is_prime

_A = "actor_rollout_ref.actor"
_LOSS = f"{_A}.policy_loss.loss_mode"
_SAME_LOSSES = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "dro", "cispo")
_SAME_ESTIMATORS = (
    *("gae", "grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("remax", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline"),
)
_DIVERGENCES = {
    "k1": "k1+",
    "kl": "k1+",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
}
"""verl's estimators of the reverse KL, and ours. The plain k1 has a gradient that averages to zero."""


def estimator(value: object, facts: Facts) -> Any:
    """The advantage estimator; those of the user keep their names."""
    if is_prime(facts):
        if value != "rloo":
            return refuse("the recipe of PRIME has rloo alone: algorithm.adv_estimator=prime")
        return many({"algorithm.adv_estimator": "prime"}, "leave-one-out of process rewards and of outcomes")
    if value == "gigpo":
        return many({"algorithm.adv_estimator": "gigpo", **verl_agent.PLAYED}, "of verl-agent")
    if value in ("grpo_vectorized", "rloo_vectorized"):
        return value.removesuffix("_vectorized")
    if value in _SAME_ESTIMATORS:
        return value
    if value in ADV_DECLARATIONS:
        return many(
            {"algorithm.adv_estimator": value}, "not an estimator of verl's own, but there is one here"
        )
    note = "not an estimator of verl's own: yours must be registered here too"
    return many({"algorithm.adv_estimator": value}, note)


def policy_loss(value: object, facts: Facts) -> Any:
    """The policy loss; those of the user keep their names."""
    if value == "bypass_mode":
        return skip(
            "algorithm.old_log_probs and algorithm.correction say it, from algorithm.rollout_correction"
        )
    if value == "up":
        return refuse("strop does not have UP-GRPO; use vanilla, or register a loss of your own")
    if value in _SAME_LOSSES or value == "geo_mean":
        return "gmpo" if value == "geo_mean" else value
    return many(
        {"algorithm.policy_loss": value}, "not a loss of verl's own: yours must be registered here too"
    )


def critic_warmup(key: str, value: object, facts: Facts) -> Outcome:
    """Steps in which the critic alone learns: verl trains the policy from the step of this number on."""
    steps = integer(value)
    note = f"verl trains the policy from step {steps} on, the first step being 1" if steps else ""
    return many({"trainer.critic_warmup": max(steps - 1, 0)}, note)


def only_of(key: str, value: object, facts: Facts, *, name: str, losses: Sequence[str]) -> Outcome:
    """A number of some losses alone, under its own name in algorithm.loss_settings."""
    if value is None or facts.get(_LOSS) not in losses:
        return skip(f"read by {' and '.join(losses)} alone")
    return many({f"algorithm.loss_settings.{name}": value})


def dual_clip(key: str, value: object, facts: Facts) -> Outcome:
    """The dual clip, which DPPO reads as its truncation."""
    if str(facts.get(_LOSS)).startswith("dppo"):
        return many({"algorithm.loss_settings.truncation": value}, "what verl gives DPPO; the paper has 5")
    return many({"algorithm.clip_ratio_c": value})


def clip_ratio(value: object, facts: Facts) -> Any:
    """The clip range, which here also stands for a side that is not set."""
    one_sided = [side for side in ("low", "high") if facts.get(f"{_A}.clip_ratio_{side}") is None]
    if not one_sided or value == 0.2:
        return value
    note = f"here it also sets {' and '.join(one_sided)}; in verl 0.2 stays"
    return many({"algorithm.clip_ratio": value}, note)


def loss_aggregation(key: str, value: object, facts: Facts) -> Outcome:
    """Aggregation of the terms; with a constant length, that length."""
    loss = facts.get(_LOSS)
    if loss in ("gspo", "sapo", "geo_mean"):
        return skip(f"verl aggregates {loss} in its own way whatever is set; so does strop by default")
    ours: dict[str, Any] = {"algorithm.loss_agg_mode": value}
    if value == "seq-mean-token-sum-norm" and facts.get(f"{_A}.loss_scale_factor") is None:
        ours["algorithm.loss_scale_factor"] = verl_agent.longest_response(facts)
        return many(ours, "verl divides by the width of a padded batch; strop by data.max_response_tokens")
    return many(ours)


def resampling(key: str, value: object, facts: Facts) -> Outcome:
    """PF-PPO."""
    if value is not True:
        return skip("off there too")
    method = facts.get("algorithm.pf_ppo.reweight_method")
    if method not in ("pow", "max_min", "max_random"):
        return refuse("strop does not have it; use pow, max_min or max_random")
    return many({"algorithm.resampling": method})


# Learning from a teacher.


def is_forward(facts: Facts) -> bool:
    """The forward KL is asked for."""
    is_on = facts.get("distillation.enabled") is True
    return is_on and facts.get("distillation.distillation_loss.loss_mode") == "forward_kl_topk"


def divergence(key: str, value: object, facts: Facts) -> Outcome:
    """The divergence and its estimator, from two keys."""
    if value == "forward_kl_topk":
        return many({"algorithm.distillation.kind": "forward_kl"})
    is_gradient = facts.get("distillation.distillation_loss.use_policy_gradient") is True
    kind = _DIVERGENCES.get(str(value))
    if kind is None or (kind == "k1+") != is_gradient:
        return refuse(
            "use forward_kl_topk, k1 with use_policy_gradient=true, or abs, k2, k3 without it: others are not here"
        )
    note = "the same gradient, where the samples are the policy's own" if kind == "k1+" else ""
    return many({"algorithm.distillation.kind": "reverse_kl", "algorithm.distillation.kl_kind": kind}, note)


def task_rewards(key: str, value: object, facts: Facts) -> Outcome:
    """The share of the rewards."""
    if value is False:
        return many({"algorithm.policy_coef": 0.0}, "the teacher alone")
    coef = facts.get("distillation.distillation_loss.distillation_loss_coef")
    return many({"algorithm.distillation.coef": 1.0 if coef is None else coef})


def teacher_ranks(key: str, value: object, facts: Facts) -> Outcome:
    """Processes of the teacher's own."""
    if value is not True:
        return skip("the teacher shares the processes of the main pool")
    section = "distillation.teacher_model"
    ranks = (facts.get(f"{section}.n_gpus_per_node") or 1) * (facts.get(f"{section}.nnodes") or 1)
    return many({"resources.apart.teacher": ranks})
