"""The section `algorithm` of verl, but for its rollout correction."""

from __future__ import annotations

from typing import Any

from strop.config.migration.outcomes import Facts, Outcome, many, skip
from strop.config.migration.rules import NotNeeded, To
from strop.config.migration.tables import Entry, under
from strop.config.migration.values import choice, if_set, integer, number, one_or_more

_ESTIMATORS = {
    **{name: name for name in (
        "gae", "grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
        "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline",
    )},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}  # fmt: skip
_KINDS = {name: name for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")}
_RESAMPLINGS = {name: name for name in ("pow", "max_min", "max_random")}
_METRICS = {
    "acc": "acc",
    "score": "score",
    "reward": "score",
    "seq_reward": "score",
    "seq_final_reward": "score",
}


def _estimator(value: Any, facts: Facts) -> Any:
    if value not in _ESTIMATORS:
        note = "not an estimator of verl's own: yours must be registered here too"
        return many({"algorithm.adv_estimator": value}, note)
    return _ESTIMATORS[value]


def _filter_metric(value: Any, facts: Facts) -> Any:
    if facts.get("algorithm.filter_groups.enable") is not True:
        return skip("read with filter_groups.enable=true alone")
    return choice(_METRICS, instead="use acc or score")(value, facts)


def _resampling(key: str, value: Any, facts: Facts) -> Outcome:
    if value is not True:
        return skip("off there too")
    method = choice(_RESAMPLINGS, instead="use pow, max_min or max_random")(_method(facts), facts)
    return method if isinstance(method, Outcome) else many({"algorithm.resampling": method})


def _resampling_detail(key: str, value: Any, facts: Facts) -> Outcome:
    is_on = facts.get("algorithm.use_pf_ppo") is True
    return many({}, "in algorithm.resampling") if is_on else skip("read with use_pf_ppo=true alone")


def _power(key: str, value: Any, facts: Facts) -> Outcome:
    if facts.get("algorithm.use_pf_ppo") is not True or _method(facts) != "pow":
        return skip("read with use_pf_ppo=true and reweight_method=pow alone")
    return many({"algorithm.resampling_power": number(value, facts)})


def _method(facts: Facts) -> Any:
    given = facts.get("algorithm.pf_ppo.reweight_method")
    return "pow" if given is None else given


ENTRIES = under(
    "algorithm",
    Entry("adv_estimator", To("algorithm.adv_estimator", _estimator)),
    Entry("gamma", To("algorithm.gamma", number)),
    Entry("lam", To("algorithm.lam", number)),
    Entry("norm_adv_by_std_in_grpo", To("algorithm.norm_adv_by_std")),
    Entry("use_kl_in_reward", To("algorithm.use_kl_in_reward")),
    Entry("kl_penalty", To("algorithm.kl_penalty", choice(_KINDS, instead="use low_var_kl"))),
    Entry("kl_ctrl.type", To("algorithm.kl_ctrl.type")),
    Entry("kl_ctrl.kl_coef", To("algorithm.kl_ctrl.kl_coef", number)),
    Entry("kl_ctrl.horizon", To("algorithm.kl_ctrl.horizon", integer)),
    Entry("kl_ctrl.target_kl", To("algorithm.kl_ctrl.target_kl", number)),
    Entry("gdpo_reward_keys", To("algorithm.reward_keys", if_set(one_or_more))),
    Entry("gdpo_reward_weights", To("algorithm.reward_weights", if_set(one_or_more))),
    Entry("use_pf_ppo", _resampling),
    Entry("pf_ppo.reweight_method", _resampling_detail),
    Entry("pf_ppo.weight_pow", _power),
    Entry("filter_groups.enable", To(
        "algorithm.filter_groups.enable", note="set trainer.max_steps too: epochs do not tell the steps any more"
    )),
    Entry("filter_groups.metric", To("algorithm.filter_groups.metric", _filter_metric)),
    Entry("filter_groups.max_num_gen_batches", NotNeeded(
        "it does nothing in verl; algorithm.filter_groups.max_rounds bounds the rounds of a step here"
    )),
    Entry("filter_groups.max_inflight_gen_batches", NotNeeded(
        "a step's rounds follow each other: algorithm.filter_groups.max_rounds"
    )),
)  # fmt: skip
"""What becomes of the keys of `algorithm`."""
