"""Settings of generation ahead of training that do not go together, or not with the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.trainer.async_rollout.virtual_time import virtual_time

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check(config: Config) -> None:
    """Samples of older policies are corrected for, and can be had while the trainer works.

    Raises:
        ValueError: they are not, or cannot; the sentence says what to do.
    """
    bound = config.rollout.max_staleness
    _check_clock(config)
    if bound and not config.algorithm.corrects_for_age:
        raise ValueError(
            f"rollout.max_staleness is {bound:g}, so samples are older than the policy that learns from them, but "
            f"nothing corrects for it: set algorithm.correction.weights=sequence (or token, geometric), "
            f"algorithm.correction.reject, or algorithm.old_log_probs=rollout; or rollout.max_staleness=0"
        )
    key = "rollout.max_staleness" if bound else "rollout.over_issue"
    key = key if bound or config.rollout.over_issue else "rollout.overlap_log_probs"
    if config.rollout.is_streamed and config.trainer.skip_rollout:
        raise ValueError(
            f"trainer.skip_rollout takes recorded samples, which are all there at once: remove {key}"
        )
    if config.rollout.is_streamed and config.needs("reward_baselines"):
        raise ValueError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares samples with a greedy answer of the "
            f"same policy, which is not had with {key}: use another estimator, or remove {key}"
        )


def _check_clock(config: Config) -> None:
    if virtual_time(config.trainer) is None:
        return
    for key, value, wanted in (
        ("rollout.engine", config.rollout.engine, "native"),
        ("resources.runtime", config.resources.runtime, "inline"),
        ("agent.num_workers", config.agent.num_workers, 0),
    ):
        if value != wanted:
            raise ValueError(
                f"trainer.clock=virtual counts the steps of an engine in the trainer's own process, but {key} is "
                f"{value}: set {key}={wanted}, or trainer.clock=wall"
            )
