"""Rules across settings of several sections: each may be right, and yet they do not go together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.algorithms.group_functions.config import check_overlong_buffer, check_shaping_function
from strop.algorithms.specs import check_estimator, check_loss_settings
from strop.data.curriculum import sees_results
from strop.rewards.judges.config import CallsConfig
from strop.rollout.registry import check_engine_name
from strop.trainer.checks import algorithms, parallel, roles, rollout
from strop.trainer.fault_tolerance.node_counts import check_elastic

if TYPE_CHECKING:
    from strop.trainer.config import Config


def check_together(config: Config) -> None:
    """Refuse settings that do not go together.

    Raises:
        ValueError: the sentence says which, and what to do.
    """
    check_engine_name(config.rollout.engine)
    check_estimator(
        config.algorithm.adv_estimator,
        samples_per_prompt=config.rollout.samples_per_prompt,
        norm_by_std=config.algorithm.norm_adv_by_std,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
        settings=config.algorithm.adv_settings,
    )
    check_loss_settings(config.algorithm.policy_loss, config.algorithm.loss_settings)
    for check in _CHECKS:
        check(config)


def _check_shaping(config: Config) -> None:
    check_overlong_buffer(config.reward.overlong_buffer, config.data.max_response_tokens)
    check_shaping_function(config.algorithm.reward_shaping, config.algorithm.shaping_settings)


def _check_budgets(config: Config) -> None:
    longest = config.data.max_prompt_tokens + config.data.max_response_tokens
    for name, engine in config.used_engines.items():
        if engine.max_tokens_per_device * engine.sequence_parallel * engine.context_parallel < longest:
            raise ValueError(
                f"{name}.engine.max_tokens_per_device is {engine.max_tokens_per_device}, but one sample may have "
                f"{longest} tokens (data.max_prompt_tokens {config.data.max_prompt_tokens} + "
                f"data.max_response_tokens {config.data.max_response_tokens}): raise it to at least {longest}, or "
                f"lower the limits"
            )


def _check_roles(config: Config) -> None:
    if config.model.override_config and config.rollout.engine != "native":
        raise ValueError(
            f"model.override_config is set, but rollout.engine={config.rollout.engine} reads config.json itself and "
            f"would generate with another model: use rollout.engine=native, or change the folder's config.json"
        )
    if config.reference.path and not config.uses_reference:
        raise ValueError(
            f"reference.path is {config.reference.path!r}, but nothing uses a reference model: set "
            f"algorithm.use_kl_loss=true or algorithm.use_kl_in_reward=true, or remove it"
        )
    if config.model.lora.rank > 0 and config.reference.path:
        raise ValueError(
            f"reference.path is {config.reference.path!r}, but with model.lora the reference is the model without "
            f"its adapter, or with that of model.lora.path: remove one of the two"
        )
    if config.reward.weight == 0 and "reward_model" not in config.roles:
        raise ValueError(
            "reward.weight is 0 and there is no reward model, so every reward would be 0: set reward_model.path, "
            "or another weight"
        )
    if config.resources.weight_store and "rollout" not in config.resources.apart:
        raise ValueError(
            "resources.weight_store is set, but generation takes place in the actor's processes, to which no weights "
            "are sent: set resources.apart={rollout: N}, or remove it"
        )
    for role in config.resources.apart:
        if role not in config.roles:
            raise ValueError(f"resources.apart names {role}, but this run has no such role: remove it")


def _check_services(config: Config) -> None:
    workers = config.resources.ranks_of("rollout")
    for service in config.reward.services.values():
        if isinstance(service, CallsConfig):
            service.share(0, workers)  # refuses limits of which not every rollout worker can have a share


def _check_validations(config: Config) -> None:
    settings = config.trainer
    for key, value in (
        ("target_pass_rate", settings.target_pass_rate), ("patience", settings.patience)
    ):  # fmt: skip
        if value is not None and not (config.data.val_files and config.eval.every):
            lacking = "eval.every is 0" if config.data.val_files else "data.val_files is empty"
            raise ValueError(
                f"trainer.{key} is {value}, but {lacking}, so no validation can end the run: set it, or remove "
                f"trainer.{key}"
            )


def _check_sampler(config: Config) -> None:
    if not sees_results(config.data.sampler) and config.data.reorder_every:
        raise ValueError(
            f"data.reorder_every is {config.data.reorder_every}, but data.sampler={config.data.sampler} does not look "
            f"at results, so the order would stay: use easy_first, hard_first, near_half or one of your own, or "
            f"remove it"
        )


def _check_epochs(config: Config) -> None:
    if config.unknown_length_reason and config.trainer.max_steps is None:
        raise ValueError(
            f"{config.unknown_length_reason}, so epochs do not tell how many steps there are: set trainer.max_steps"
        )


_CHECKS = (
    _check_shaping,
    parallel.check,
    _check_services,
    algorithms.check,
    roles.check,
    _check_validations,
    check_elastic,
    _check_sampler,
    _check_epochs,
    _check_budgets,
    _check_roles,
    rollout.check,
)
"""Checks in the order in which they run."""
