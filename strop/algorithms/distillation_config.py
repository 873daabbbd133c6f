"""Settings of distillation: the teacher that the policy learns from."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Literal

from strop.algorithms.names import KlKind
from strop.config.sections import section, where_on
from strop.utils.field_types import PositiveFloat, PositiveInt
from strop.utils.setting_text import setting_text

if TYPE_CHECKING:
    from strop.algorithms.config import AlgorithmConfig

_OF_ONE_KIND = {"reverse_kl": ("kl_kind",), "forward_kl": ("top_k", "with_tail")}
"""Settings that one kind alone reads."""


@section("algorithm.distillation")
class DistillationConfig:
    """A term of the loss that pulls the policy towards a teacher, on the policy's own samples. Off by default."""

    kind: Literal["none", "reverse_kl", "forward_kl"] = "none"
    """reverse_kl: KL(policy || teacher), estimated at each sampled token; the teacher computes one log-prob per token.
    forward_kl: KL(teacher || policy), over the teacher's top_k tokens at each place. none: there is no teacher."""
    coef: PositiveFloat = 1.0
    """Weight of the term in the loss."""
    top_k: PositiveInt = 64
    """forward_kl: how many of the teacher's most likely tokens are compared at each place."""
    with_tail: bool = False
    """forward_kl: count all other tokens as one more, so that the term is a divergence, never below 0."""
    kl_kind: KlKind = "k1+"
    """reverse_kl: the estimator, by the names of algorithm.kl_loss_type. k1+ has the value of the log-ratio and the
    gradient of the divergence."""

    def __post_init__(self) -> None:
        key = "algorithm.distillation"
        own_settings = _OF_ONE_KIND.get(self.kind, ())
        for setting in fields(self):
            value = getattr(self, setting.name)
            if setting.name == "kind" or value == setting.default:
                continue
            if self.kind == "none":
                raise ValueError(
                    f"{key}.{setting.name} is {setting_text(value)}, but {key}.kind=none has no teacher: set "
                    f"kind to reverse_kl or forward_kl, or remove it"
                )
            if setting.name != "coef" and setting.name not in own_settings:
                owner = next(kind for kind, names in _OF_ONE_KIND.items() if setting.name in names)
                raise ValueError(
                    f"{key}.{setting.name} is {setting_text(value)}, but it is a setting of "
                    f"{key}.kind={owner} and that is {self.kind}: change it, or remove it"
                )
        if self.kl_kind in ("k1", "kl"):
            raise ValueError(
                f"{key}.kl_kind is {self.kl_kind}, whose gradient averages to zero, so nothing would be learned: use "
                f"k1+, which has the same value and the gradient of the divergence"
            )

    @property
    def is_on(self) -> bool:
        """There is a teacher."""
        return self.kind != "none"

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that the teacher computes."""
        return ("teacher_log_prob",) if self.kind == "reverse_kl" else ("teacher_ids", "teacher_logprobs")


def check_policy_coef(algorithm: AlgorithmConfig) -> None:
    """Refuse a weight of the policy loss without a teacher, and what it leaves without effect, as a ValueError."""
    if algorithm.policy_coef != 1.0 and where_on(algorithm.distillation) is None:
        raise ValueError(
            f"algorithm.policy_coef is {algorithm.policy_coef}, but there is no teacher to weigh the policy loss "
            f"against: set algorithm.distillation.kind, or remove it"
        )
    if algorithm.policy_coef != 0:
        return
    for key, is_set in (
        ("use_kl_in_reward", algorithm.use_kl_in_reward),
        ("correction.weights", getattr(where_on(algorithm.correction), "weights", "none") != "none"),
        ("filter_groups.enable", algorithm.filter_groups.enable),
    ):
        if is_set:
            raise ValueError(
                f"algorithm.{key} is set, but it changes what advantages teach, and with algorithm.policy_coef=0 "
                f"they teach nothing: remove one of the two"
            )
