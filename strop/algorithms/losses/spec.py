"""The losses of a run, resolved once from its configuration, for policy and critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strop.algorithms.aggregation import Aggregation
from strop.algorithms.config import AlgorithmConfig
from strop.algorithms.distillation_config import DistillationConfig
from strop.algorithms.registry import Declaration
from strop.algorithms.specs import policy_loss_declaration
from strop.config.sections import where_on

OPTIONAL_COLUMNS = ("advantages", "ref_log_prob", "rollout_log_probs", "rollout_is_weights")
"""Columns that a loss may take under their own names, where the batch has them."""


@dataclass(frozen=True, kw_only=True)
class LossSpec:
    """The loss of the policy.

    L = sum_t w_t (policy_coef * policy_t - entropy_coeff * H_t + kl_loss_coef * kl_t + distillation.coef * d_t), w_t
    fixed for the whole optimizer batch. Importance weights of a corrected rollout multiply the policy's term alone:
    entropy, KL and the distance d_t to a teacher are those of the current policy.
    """

    name: str
    """Of the policy's term."""
    declaration: Declaration
    """Columns and settings that the term takes."""
    settings: Mapping[str, object]
    """Its numbers by name: clip ranges in force, and the user's own."""
    aggregation: Aggregation
    """Aggregation that gives w_t; the critic's too."""
    old_log_probs: str
    """Column of the denominator of the ratio."""
    algorithm: AlgorithmConfig
    """The coefficients; also what a loss in verl's convention reads as its config."""

    @property
    def distillation(self) -> DistillationConfig | None:
        """The section of the term d_t; None without one."""
        return where_on(self.algorithm.distillation)

    @property
    def policy_coef(self) -> float:
        """Weight of the policy's own term beside it."""
        return self.algorithm.policy_coef

    @property
    def teacher_columns(self) -> tuple[str, ...]:
        """Columns that a teacher computes; none without distillation."""
        return () if self.distillation is None else tuple(self.distillation.columns)

    @property
    def takes_chosen_tokens(self) -> bool:
        """It compares the log-probs of further tokens, `teacher_ids`, beside those that were sampled."""
        return "teacher_ids" in self.teacher_columns

    @property
    def has_gradient_in_every_row(self) -> bool:
        """It has a term that moves the policy also where the advantage is 0."""
        declaration, algorithm = self.declaration, self.algorithm
        has_gradient_at_zero_advantage = declaration.moves_without_advantage or declaration.is_user_convention
        has_other_terms = (
            algorithm.entropy_coeff != 0 or algorithm.use_kl_loss or self.distillation is not None
        )
        return has_gradient_at_zero_advantage or has_other_terms

    def present(self, names: frozenset[str]) -> dict[str, str]:
        """Columns of a batch that the loss takes: its own name of each, to that in the batch.

        Raises:
            ValueError: one that it cannot do without is missing.
        """
        kind = self.algorithm.distillation.kind
        for name in self.teacher_columns:
            if name not in names:
                raise ValueError(
                    f"algorithm.distillation.kind={kind} needs the column {name}, but the batch "
                    f"has {', '.join(sorted(names))}"
                )
        if self.old_log_probs == "rollout_log_probs" and self.old_log_probs not in names:
            raise ValueError(
                f"algorithm.old_log_probs=rollout needs the column rollout_log_probs, but the batch has "
                f"{', '.join(sorted(names))}"
            )
        columns = {name: name for name in (*OPTIONAL_COLUMNS, *self.teacher_columns) if name in names}
        if self.old_log_probs in names:
            columns["old_log_probs"] = self.old_log_probs
        return columns


def loss_spec(algorithm: AlgorithmConfig) -> LossSpec:
    """The policy's loss as a configuration means it; losses of a user's own are registered before.

    Raises:
        ValueError: there is no such loss.
    """
    return LossSpec(
        name=algorithm.policy_loss,
        declaration=policy_loss_declaration(algorithm.policy_loss),
        settings={**shared_settings(algorithm), **algorithm.loss_settings},
        aggregation=aggregation_of(algorithm),
        old_log_probs="rollout_log_probs" if algorithm.old_log_probs == "rollout" else "old_log_probs",
        algorithm=algorithm,
    )


def aggregation_of(algorithm: AlgorithmConfig) -> Aggregation:
    """Aggregation of the loss of the policy, and of that of the critic beside it."""
    declaration = policy_loss_declaration(algorithm.policy_loss)
    return Aggregation(
        mode=declaration.aggregation_mode(algorithm.loss_agg_mode), scale=algorithm.loss_scale_factor
    )


def shared_settings(algorithm: AlgorithmConfig) -> dict[str, object]:
    """Settings of policy losses that have a key of their own, as they are in force."""
    return {
        "clip_low": algorithm.clip_low,
        "clip_high": algorithm.clip_high,
        "clip_c": algorithm.clip_ratio_c,
    }
