"""TRL's arguments of GRPO's and RLOO's loss."""

from __future__ import annotations

from typing import Any

from strop.compat.migration.outcomes import Facts, Outcome, integer, many, number, refuse, skip
from strop.compat.migration.trl_loop import argument


def grpo_kl(key: str, value: Any, facts: Facts) -> Outcome:
    """GRPO's KL term, in the loss."""
    beta = number(value)
    if beta == 0:
        return skip("no KL term, as by default")
    ours = {"algorithm.use_kl_loss": True, "algorithm.kl_loss_coef": beta}
    return many({**ours, "algorithm.kl_loss_type": "low_var_kl"})


def rloo_kl(key: str, value: Any, facts: Facts) -> Outcome:
    """RLOO, with its KL term in the reward."""
    ours: dict[str, Any] = {
        "algorithm.adv_estimator": "rloo",
        "algorithm.loss_agg_mode": "seq-mean-token-sum",
    }
    beta = number(value)
    if beta == 0:
        return many(ours)
    ours |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": beta}
    return many(ours, "TRL takes it off the reward of a response")


def loss(key: str, value: Any, facts: Facts) -> Outcome:
    """The loss and its aggregation."""
    mode, kind = "algorithm.loss_agg_mode", "algorithm.policy_loss"
    known: dict[str, dict[str, Any]] = {
        "grpo": {mode: "seq-mean-token-mean"},
        "bnpo": {mode: "token-mean"},
        "dapo": {mode: "token-mean"},
        "dr_grpo": {
            mode: "seq-mean-token-sum-norm",
            "algorithm.loss_scale_factor": argument(facts, "max_completion_length"),
        },
        "cispo": {kind: "cispo", mode: "token-mean", "algorithm.clip_ratio_low": 1.0},
        "sapo": {kind: "sapo"},
    }
    if value not in known:
        return refuse(f"strop has {', '.join(known)}")
    return many(known[value], "no lower bound, as in TRL" if value == "cispo" else "")


def clip_high(value: Any, facts: Facts) -> Any:
    """The upper side of the clip range."""
    if argument(facts, "loss_type") != "cispo":
        return number(value)
    ours = {"algorithm.clip_ratio_high": number(value) - 1}
    return many(ours, "TRL bounds the weight itself, strop its distance from 1")


def level(value: Any, facts: Facts) -> Any:
    """Ratios of tokens or of samples."""
    if value == "token":
        return skip("as by default")
    return "gspo" if value == "sequence" else refuse("use token or sequence")


def scale(key: str, value: Any, facts: Facts) -> Outcome:
    """What rewards are divided by."""
    if value == "mean":
        return many({"algorithm.adv_estimator": "maxrl"}, "divided by the group's mean, which is MaxRL")
    if value in (True, "group", False, "none"):
        return many({"algorithm.norm_adv_by_std": value in (True, "group")})
    return refuse("rewards are scaled per group or not at all: use group, mean or none")


def of_sapo(value: Any, facts: Facts) -> Any:
    """A number of SAPO alone."""
    return number(value) if argument(facts, "loss_type") == "sapo" else skip("read by loss_type='sapo' alone")


def cap(key: str, value: Any, facts: Facts) -> Outcome:
    """The dual clip."""
    if value is None:
        return many({"algorithm.clip_ratio_c": float("inf")}, "TRL has no dual clip unless delta is set")
    return many({"algorithm.clip_ratio_c": number(value)})


def correction(key: str, value: Any, facts: Facts) -> Outcome:
    """The correction of what vLLM samples."""
    if value is not True or argument(facts, "use_vllm") is not True:
        return skip("read with use_vllm=True alone")
    weights, _, action = str(argument(facts, "vllm_importance_sampling_mode")).partition("_")
    ours: dict[str, Any] = {"algorithm.correction.weights": weights}
    if action == "mask":
        ours |= {"algorithm.correction.mode": "mask", "algorithm.correction.lower": 1e-9}
    ours["algorithm.correction.upper"] = number(argument(facts, "vllm_importance_sampling_cap"))
    return many(ours)


def prompt_limit(value: Any, facts: Facts) -> Outcome:
    """The longest prompt, of which the versions that have this argument keep the end."""
    if value is None:
        return skip("no limit there; longer prompts than data.max_prompt_tokens are dropped here")
    ours = {"data.max_prompt_tokens": integer(value), "data.filter_overlong_prompts": False}
    return many({**ours, "data.truncation": "left"}, "longer prompts lose their beginning, as there")
