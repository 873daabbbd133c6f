"""Settings that do not go with the estimators that are here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.algorithms.registry import FILTERS
from strop.algorithms.reward_kl_config import check_horizon
from strop.config.sections import where_on

if TYPE_CHECKING:
    from strop.trainer.config import Config

UNMEASURED_IN_BASELINES = ("algorithm.reward_shaping", "reward_model.path")
"""Settings that greedy answers are scored without."""


def check(config: Config) -> None:
    """Refuse settings that do not go with the estimator, or with the samples of a step.

    Raises:
        ValueError: the sentence says which, and what to do.
    """
    _check_reward_parts(config)
    _check_answers(config)
    _check_whole_rewards(config)
    _check_recording(config)
    _check_filter(config)
    control = config.algorithm.kl_ctrl
    if config.algorithm.use_kl_in_reward and control.type == "adaptive":
        check_horizon(control.horizon, config.samples_per_step)
    if config.algorithm.adv_estimator == "raft" and where_on(config.algorithm.keep) is None:
        raise ValueError(
            "algorithm.adv_estimator=raft imitates every sample that is kept, and algorithm.keep keeps all, right "
            "or wrong: set algorithm.keep.best or algorithm.keep.min_score"
        )


def _check_filter(config: Config) -> None:
    settings = config.algorithm.filter_groups
    if settings.filter:
        FILTERS[settings.filter]  # an unknown name fails here, with the known ones
    if settings.enable and config.rollout.samples_per_prompt < 2:
        raise ValueError(
            "algorithm.filter_groups compares the samples of a prompt: set rollout.samples_per_prompt to at "
            "least 2"
        )


def _check_reward_parts(config: Config) -> None:
    if config.needs("reward_parts") and not config.algorithm.reward_keys:
        raise ValueError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} takes the parts of the reward one by one, "
            f"but algorithm.reward_keys is empty: name those that the reward function returns, such as "
            f"[score, format]"
        )
    if config.algorithm.reward_keys and not config.needs("reward_parts"):
        raise ValueError(
            f"algorithm.reward_keys is set, but algorithm.adv_estimator={config.algorithm.adv_estimator} takes "
            f"the whole reward: use gdpo, or remove it"
        )
    ignores_kl = {
        "gdpo": "it takes the parts of the reward, and no penalty is one of them",
        "maxrl": "it divides by the mean reward, which a penalty can make negative",
    }
    if config.penalizes_kl and config.algorithm.adv_estimator in ignores_kl:
        raise ValueError(
            f"algorithm.use_kl_in_reward does not go with algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator}: {ignores_kl[config.algorithm.adv_estimator]}. Use "
            f"algorithm.use_kl_loss=true"
        )


def _check_answers(config: Config) -> None:
    """Answers can be compared where each is a sample of its own."""
    algorithm = config.algorithm
    if not config.compares_answers:
        if algorithm.anchor_similarity != 1:
            raise ValueError(
                f"algorithm.anchor_similarity is {algorithm.anchor_similarity:g}, but algorithm.adv_estimator="
                f"{algorithm.adv_estimator} compares no states: use gigpo, or remove it"
            )
        return
    if config.agent.credit != "turn":
        raise ValueError(
            f"algorithm.adv_estimator={algorithm.adv_estimator} compares the single answers of episodes, so each "
            f"must be a sample of its own: set agent.credit=turn, with an environment for env_agent, or use grpo"
        )


def _check_whole_rewards(config: Config) -> None:
    algorithm = config.algorithm
    for key, is_set in (
        ("algorithm.reward_shaping", algorithm.reward_shaping),
        ("reward.overlong_buffer", config.reward.overlong_buffer),
        ("reward.weight", config.reward.weight != 1),
        ("reward_model.path", "reward_model" in config.roles),
    ):
        if is_set and config.needs("reward_parts"):
            raise ValueError(
                f"{key} changes the whole reward, but algorithm.adv_estimator={algorithm.adv_estimator} takes its "
                f"parts one by one: let the reward function return a part for it, or remove it"
            )
        if is_set and config.needs("reward_baselines") and key in UNMEASURED_IN_BASELINES:
            raise ValueError(
                f"{key} changes the rewards of samples, but not those of the greedy answers that "
                f"algorithm.adv_estimator={algorithm.adv_estimator} compares them with: remove it, or use another "
                f"estimator"
            )


def _check_recording(config: Config) -> None:
    if config.trainer.skip_rollout and config.needs("reward_baselines"):
        raise ValueError(
            f"trainer.skip_rollout takes recorded samples, and algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} compares them with greedy answers, which are not recorded: use "
            f"another estimator, or remove it"
        )
