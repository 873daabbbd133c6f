"""Specs of advantage estimators and policy losses by name, and checks of their settings (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from strop.algorithms.builtin_specs import ESTIMATORS, LOSSES
from strop.algorithms.registry import Declaration, check_settings
from strop.utils.metrics import Metric
from strop.utils.registry import Registry, name_of

ADV_SHARED_SETTINGS = {
    "norm_by_std": "algorithm.norm_adv_by_std",
    "gamma": "algorithm.gamma",
    "lam": "algorithm.lam",
    "reward_weights": "algorithm.reward_weights",
}
"""Settings with a key of their own in the config, and that key."""

ADV_DECLARATIONS: Registry[Declaration] = Registry(
    "advantage estimator", ESTIMATORS, group="strop.estimators"
)


def adv_estimator_declaration(name: str | Enum) -> Declaration:
    """The columns and settings that the estimator under `name` asks for; ValueError if there is none."""
    return ADV_DECLARATIONS[name_of(name)]


def check_estimator(
    name: str,
    *,
    samples_per_prompt: int,
    norm_by_std: bool = True,
    gamma: float = 1.0,
    lam: float = 1.0,
    settings: Mapping[str, object] | None = None,
) -> None:
    """Refuse, before anything heavy starts, a configuration under which the estimator cannot teach.

    Raises:
        ValueError: unknown name; one sample per prompt with a group-relative estimator; a setting other than
            its default that the estimator does not have; one of `settings` (algorithm.adv_settings) that it
            does not have.
    """
    declaration = adv_estimator_declaration(name)
    declarations = sorted(ADV_DECLARATIONS.items())
    if declaration.is_group_relative and samples_per_prompt < 2:
        alternatives = [other for other, asks in declarations if not asks.is_group_relative]
        raise ValueError(
            f"rollout.samples_per_prompt is {samples_per_prompt}, but algorithm.adv_estimator={name} "
            f"compares the samples of one prompt and would give advantage 0 to each: set "
            f"rollout.samples_per_prompt to at least 2, or use an estimator without groups "
            f"({', '.join(alternatives)})"
        )
    changed = {"norm_by_std": not norm_by_std, "gamma": gamma != 1.0, "lam": lam != 1.0}
    for setting, is_set in changed.items():
        if is_set and not declaration.is_user_convention and setting not in declaration.settings:
            users = [other for other, asks in declarations if setting in asks.settings]
            raise ValueError(
                f"{ADV_SHARED_SETTINGS[setting]} is set, but algorithm.adv_estimator={name} has no such setting: "
                f"remove it, or use {' or '.join(users)}"
            )
    check_adv_settings(name, settings or {})


def check_adv_settings(name: str, settings: Mapping[str, object]) -> None:
    """Refuse entries of algorithm.adv_settings that the estimator `name` does not have.

    Raises:
        ValueError: an unknown setting (with the nearest one), one with a config key of its own, or a value of
            another type than the setting's default.
    """
    declaration = adv_estimator_declaration(name)
    check_settings(
        "advantage estimator",
        name,
        declaration,
        settings,
        key="algorithm.adv_settings",
        elsewhere=ADV_SHARED_SETTINGS,
    )


LOSS_SHARED_SETTINGS = {
    "clip_low": "algorithm.clip_ratio_low",
    "clip_high": "algorithm.clip_ratio_high",
    "clip_c": "algorithm.clip_ratio_c",
}
"""Settings of losses that have a key of their own in the config."""

RATIO = Metric(
    "actor/ratio", "1", "current over old probability, mean over trained tokens; on-policy exactly 1"
)
PPO_KL = Metric(
    "actor/ppo_kl", "nats", "old minus current log-prob, mean over trained tokens; on-policy exactly 0"
)
PG_CLIPFRAC = Metric(
    "actor/pg_clipfrac", "share", "tokens held by the clipping, of trained ones; on-policy exactly 0"
)
PG_CLIPFRAC_LOWER = Metric(
    "actor/pg_clipfrac_lower", "share", "tokens held by the lower bound, of trained ones"
)

LOSS_DECLARATIONS: Registry[Declaration] = Registry("policy loss", LOSSES, group="strop.policy_losses")


def policy_loss_declaration(name: str) -> Declaration:
    """The columns and settings that the loss under `name` asks for; ValueError if there is none."""
    return LOSS_DECLARATIONS[name]


def check_loss_settings(name: str, settings: Mapping[str, object]) -> None:
    """Refuse settings (algorithm.loss_settings) that the loss `name` does not have.

    Raises:
        ValueError: unknown loss; unknown setting, with the nearest valid one; a value of another type than the
            default; a setting that has a key of its own.
    """
    declaration = policy_loss_declaration(name)
    check_settings(
        "policy loss",
        name,
        declaration,
        settings,
        key="algorithm.loss_settings",
        elsewhere=LOSS_SHARED_SETTINGS,
    )
