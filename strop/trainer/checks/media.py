"""Settings that do not go with images of prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.engines.config import ModelConfig
from strop.engines.multimodal.inputs import media_reader
from strop.engines.pretrained_config import load_model_config
from strop.rollout.config import RolloutConfig
from strop.rollout.registry import NATIVE
from strop.trainer.checks.parallel import check_shares_no_images

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check_run(config: Config) -> None:
    """Refuse what images of prompts do not go with, before a model is loaded.

    Raises:
        ValueError: the sentence says which setting, and what to do.
    """
    check_engine(config.rollout, config.model)
    if config.agent.num_workers:
        raise ValueError(
            f"agent.num_workers is {config.agent.num_workers}, but prompts have images, which agents in other "
            f"processes are not given: use agent.num_workers=0"
        )
    if "critic" in config.roles:
        raise ValueError(
            f"prompts have images, which a critic does not take: algorithm.adv_estimator="
            f"{config.algorithm.adv_estimator} needs one; use one without, such as grpo, or remove the images"
        )
    if "reward_model" in config.roles:
        raise ValueError(
            "prompts have images, which the reward model would not see: remove reward_model.path, or the images"
        )
    for role, engine in config.used_engines.items():
        check_shares_no_images(role, engine, "prompts")


def check_engine(rollout: RolloutConfig, model: ModelConfig) -> None:
    """Refuse images for an engine that is given none, or none of such a model; raises a ValueError."""
    processes = rollout.own_processes
    if rollout.engine != NATIVE and (processes is None or not processes.takes_media):
        raise ValueError(
            f"prompts have images, which rollout.engine={rollout.engine} is not given: use rollout.engine={NATIVE} or "
            f"vllm"
        )
    if processes is not None and media_reader(shape := load_model_config(model), model.path) is None:
        raise ValueError(
            f"prompts have images, which rollout.engine={rollout.engine} is not given for {shape.model_type}: use "
            f"rollout.engine={NATIVE}"
        )
