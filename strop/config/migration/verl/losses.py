"""The policy loss of verl and its numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.config.migration.outcomes import Facts, Outcome, Rule, many, refuse, skip
from strop.config.migration.rules import NotNeeded, To
from strop.config.migration.tables import Entry, same, under
from strop.config.migration.values import choice, if_set, number
from strop.config.migration.verl.facts import A

_LOSS = f"{A}.policy_loss.loss_mode"
_LOSSES: Mapping[str, str] = {
    **{name: name for name in (
        "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "dro", "cispo",
    )},
    "geo_mean": "gmpo",
}  # fmt: skip
_FIXED_AGGREGATION = {"gspo", "sapo", "geo_mean"}
"""Losses for which verl ignores loss_agg_mode."""
_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def _mode(value: Any, facts: Facts) -> Any:
    if value == "bypass_mode":
        return skip(
            "algorithm.old_log_probs and algorithm.correction say it, from algorithm.rollout_correction"
        )
    if value == "up":
        return refuse("strop does not have UP-GRPO; use vanilla, or register a loss of your own")
    if value not in _LOSSES:
        note = "not a loss of verl's own: yours must be registered here too"
        return many({"algorithm.policy_loss": value}, note)
    return _LOSSES[value]


def _only_of(name: str, *losses: str) -> Rule:
    """A number of some losses alone, under its own name in algorithm.loss_settings."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None or facts.get(_LOSS) not in losses:
            return skip(f"read by {' and '.join(losses)} alone")
        return many({f"algorithm.loss_settings.{name}": value})

    return rule


def _cap(key: str, value: Any, facts: Facts) -> Outcome:
    if str(facts.get(_LOSS)).startswith("dppo"):
        return many({"algorithm.loss_settings.truncation": value}, "what verl gives DPPO; the paper has 5")
    return many({"algorithm.clip_ratio_c": value})


def _clip(value: Any, facts: Facts) -> Any:
    one_sided = [side for side in ("low", "high") if facts.get(f"{A}.clip_ratio_{side}") is None]
    if one_sided and value != 0.2:
        return many(
            {"algorithm.clip_ratio": value},
            f"here it also sets {' and '.join(one_sided)}; in verl 0.2 stays",
        )
    return value


def _aggregation(key: str, value: Any, facts: Facts) -> Outcome:
    if facts.get(_LOSS) in _FIXED_AGGREGATION:
        return skip(
            f"verl aggregates {facts.get(_LOSS)} in its own way whatever is set; so does strop by default"
        )
    ours: dict[str, Any] = {"algorithm.loss_agg_mode": value}
    if value == "seq-mean-token-sum-norm" and facts.get(f"{A}.loss_scale_factor") is None:
        ours["algorithm.loss_scale_factor"] = facts.number("data.max_response_length")
        return many(ours, "verl divides by the width of a padded batch; strop by data.max_response_tokens")
    return many(ours)


def _scale(value: Any, facts: Facts) -> Any:
    if facts.get(f"{A}.loss_agg_mode") != "seq-mean-token-sum-norm":
        return skip("read by loss_agg_mode=seq-mean-token-sum-norm alone")
    return value


ENTRIES = under(
    A,
    Entry("policy_loss.loss_mode", To("algorithm.policy_loss", _mode)),
    Entry("clip_ratio", To("algorithm.clip_ratio", _clip)),
    Entry("clip_ratio_low", To("algorithm.clip_ratio_low", if_set(number))),
    Entry("clip_ratio_high", To("algorithm.clip_ratio_high", if_set(number))),
    Entry("clip_ratio_c", _cap),
    Entry("loss_agg_mode", _aggregation),
    Entry(
        "use_token_level_loss",
        To(
            "algorithm.loss_agg_mode",
            choice({True: "token-mean", False: "seq-mean-token-mean"}, instead="use token-mean"),
        ),
    ),
    Entry("loss_scale_factor", To("algorithm.loss_scale_factor", if_set(_scale))),
    Entry("entropy_coeff", To("algorithm.entropy_coeff", number)),
    Entry("use_kl_loss", To("algorithm.use_kl_loss")),
    Entry("kl_loss_coef", To("algorithm.kl_loss_coef", number)),
    Entry(
        "kl_loss_type",
        To(
            "algorithm.kl_loss_type",
            choice(
                {kind + end: kind + end for kind in _KINDS for end in ("", "+")}, instead="use low_var_kl"
            ),
        ),
    ),
    Entry("tau_pos", _only_of("tau_pos", "sapo")),
    Entry("tau_neg", _only_of("tau_neg", "sapo")),
    *(
        Entry(f"policy_loss.{name}", _only_of(name, "clip_cov"))
        for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")
    ),
    Entry("policy_loss.kl_cov_ratio", _only_of("kl_cov_ratio", "kl_cov")),
    Entry("policy_loss.ppo_kl_coef", _only_of("ppo_kl_coef", "kl_cov")),
    *(Entry(key, _only_of("dro_beta", "dro")) for key in ("policy_loss.dro_beta", "dro_beta")),
    *same(
        NotNeeded("a copy of algorithm.rollout_correction"),
        "policy_loss.rollout_correction policy_loss.rollout_correction.*",
    ),
)
"""What becomes of the keys of the policy loss, which are the actor's."""
