"""TRL's arguments of GRPO's and RLOO's loss."""

from __future__ import annotations

from typing import Any

from strop.compat.migration.outcomes import Facts, Outcome, many, number, refuse, skip
from strop.compat.migration.trl_loop import argument


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


def of_sapo(value: Any, facts: Facts) -> Any:
    """A number of SAPO alone."""
    return number(value) if argument(facts, "loss_type") == "sapo" else skip("read by loss_type='sapo' alone")


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
