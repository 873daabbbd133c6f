"""Settings that do not go with the roles that are here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.config.sections import where_on
from strop.workers.config import PrmConfig, TeacherConfig

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Refuse settings of a role that the run has not, and a role without what it needs.

    Raises:
        ValueError: the sentence says which, and what to do.
    """
    critic, prm = config.critic, config.prm
    teacher = config.teacher
    if critic.path and "critic" not in config.roles:
        raise ValueError(
            f"critic.path is {critic.path!r}, but algorithm.adv_estimator={config.algorithm.adv_estimator} "
            f"uses no values: set algorithm.adv_estimator=gae, or remove it"
        )
    if config.trainer.critic_warmup and "critic" not in config.roles:
        raise ValueError(
            f"trainer.critic_warmup is {config.trainer.critic_warmup}, but algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} uses no critic: set algorithm.adv_estimator=gae, or remove it"
        )
    if prm != PrmConfig() and "prm" not in config.roles:
        raise ValueError(
            f"a setting of prm is given, but algorithm.adv_estimator={config.algorithm.adv_estimator} uses no "
            f"process rewards: set algorithm.adv_estimator=prime, or remove it"
        )
    distillation, path = where_on(config.algorithm.distillation), teacher.path
    if path and distillation is None:
        raise ValueError(
            f"teacher.path is {path!r}, but algorithm.distillation.kind=none learns from nobody: set it to "
            f"reverse_kl or forward_kl, or remove the path"
        )
    if distillation is not None and not path:
        raise ValueError(
            f"algorithm.distillation.kind is {distillation.kind}, but teacher.path is empty: set it to the folder of a "
            f"model with the policy's vocabulary"
        )
    if distillation is None and teacher != TeacherConfig():
        raise ValueError(
            "a setting of teacher is given, but algorithm.distillation.kind=none has no teacher: remove it"
        )
    if config.algorithm.policy_coef == 0 and "critic" in config.roles:
        raise ValueError(
            f"algorithm.policy_coef=0 uses no advantage, but algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} would train a critic for it: use reinforce_plus_plus"
        )
