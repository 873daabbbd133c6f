"""Settings of generation ahead of training that do not go together, or not with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Samples of older policies are corrected for, and can be had while the trainer works.

    Raises:
        ValueError: they are not, or cannot; the sentence says what to do.
    """
    bound = config.rollout.max_staleness
    if bound and not config.algorithm.corrects_for_age:
        raise ValueError(
            f"rollout.max_staleness is {bound:g}, so samples are older than the policy that learns from them, but "
            f"nothing corrects for it: set algorithm.correction.weights=sequence (or token, geometric), "
            f"algorithm.correction.reject, or algorithm.old_log_probs=rollout; or rollout.max_staleness=0"
        )
    key = "rollout.max_staleness" if bound else "rollout.over_issue"
    if config.rollout.is_streamed and config.trainer.skip_rollout:
        raise ValueError(
            f"trainer.skip_rollout takes recorded samples, which are all there at once: remove {key}"
        )
    if config.rollout.is_streamed and config.needs("reward_baselines"):
        raise ValueError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares samples with a greedy answer of the "
            f"same policy, which is not had with {key}: use another estimator, or remove {key}"
        )
