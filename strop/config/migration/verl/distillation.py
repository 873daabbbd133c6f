"""The section `distillation` of verl: learning from a teacher."""

from __future__ import annotations

from typing import Any

from strop.config.migration.outcomes import Facts, Outcome, many, refuse, skip
from strop.config.migration.rules import NotNeeded, OnlyIf, To
from strop.config.migration.tables import Entry, same
from strop.config.migration.values import if_set, integer

_SECTION = "distillation"
_LOSS = f"{_SECTION}.distillation_loss"
_OFF = "distillation.enabled is false"
_ESTIMATORS = {
    "k1": "k1+",
    "kl": "k1+",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "k3": "k3",
    "low_var_kl": "k3",
}
"""verl's estimators of the reverse KL, and ours. The plain k1 has a gradient that averages to zero."""


def _is_on(facts: Facts) -> bool:
    """A teacher is asked for."""
    return facts.get(f"{_SECTION}.enabled") is True


def _is_forward(facts: Facts) -> bool:
    return _is_on(facts) and facts.get(f"{_LOSS}.loss_mode") == "forward_kl_topk"


def _loss(key: str, value: Any, facts: Facts) -> Outcome:
    """The divergence and its estimator, from two keys."""
    if not _is_on(facts):
        return skip(_OFF)
    if value == "forward_kl_topk":
        return many({"algorithm.distillation.kind": "forward_kl"})
    is_gradient = facts.get(f"{_LOSS}.use_policy_gradient") is True
    kind = _ESTIMATORS.get(str(value))
    if kind is None or (kind == "k1+") != is_gradient:
        return refuse(
            "use forward_kl_topk, k1 with use_policy_gradient=true, or abs, k2, k3 without it: others are not here"
        )
    note = "the same gradient, where the samples are the policy's own" if kind == "k1+" else ""
    return many({"algorithm.distillation.kind": "reverse_kl", "algorithm.distillation.kl_kind": kind}, note)


def _task_rewards(key: str, value: Any, facts: Facts) -> Outcome:
    if not _is_on(facts):
        return skip(_OFF)
    if value is False:
        return many({"algorithm.policy_coef": 0.0}, "the teacher alone")
    coef = facts.get(f"{_LOSS}.distillation_loss_coef")
    return many({"algorithm.distillation.coef": 1.0 if coef is None else coef})


def _ranks_apart(key: str, value: Any, facts: Facts) -> Outcome:
    if not _is_on(facts) or value is not True:
        return skip("the teacher shares the processes of the main pool")
    section = f"{_SECTION}.teacher_model"
    ranks = (facts.get(f"{section}.n_gpus_per_node") or 1) * (facts.get(f"{section}.nnodes") or 1)
    return many({"resources.apart.teacher": ranks})


_UNCLAMPED = OnlyIf(_is_on, _OFF, NotNeeded("terms are not clamped: a log-prob is finite here"))

ENTRIES = (
    Entry("distillation.enabled", NotNeeded("a kind of divergence turns it on: algorithm.distillation.kind")),
    Entry("distillation.distillation_loss.loss_mode", _loss),
    Entry("distillation.distillation_loss.use_policy_gradient", NotNeeded("read with loss_mode")),
    Entry(
        "distillation.distillation_loss.topk",
        OnlyIf(_is_forward, "read with forward_kl_topk", To("algorithm.distillation.top_k", if_set(integer))),
    ),
    Entry("distillation.distillation_loss.use_task_rewards", _task_rewards),
    Entry("distillation.distillation_loss.distillation_loss_coef", NotNeeded("read with use_task_rewards")),
    Entry("distillation.distillation_loss.loss_max_clamp", _UNCLAMPED),
    Entry("distillation.distillation_loss.log_prob_min_clamp", _UNCLAMPED),
    *same(
        OnlyIf(_is_on, _OFF, To("teacher.path")),
        "distillation.teacher_model.model_path distillation.teacher_models.teacher_model.model_path",
    ),
    Entry("distillation.teacher_model.enable_resource_pool", _ranks_apart),
    Entry("distillation.*", OnlyIf(_is_on, _OFF, NotNeeded("ours are the settings of teacher.engine"))),
)
"""What becomes of the keys of `distillation`."""
