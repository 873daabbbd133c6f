"""Warnings about settings of the algorithm that do nothing beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from strop.algorithms.specs import LOSS_SHARED_SETTINGS, policy_loss_declaration
from strop.config import to_flat_dict

if TYPE_CHECKING:
    from strop.trainer.config import Config

_COEFFICIENT = "algorithm.kl_ctrl.kl_coef"
"""A key whose 0 says that there is no such term, which is so."""


def idle_settings(config: Config) -> list[str]:
    """Warnings about settings that are others than the defaults, and that no role of the run uses; and about a KL term
    that moves nothing.

    They are no errors: a preset's coefficient stays where its term is switched off.
    """
    sentences = []
    algorithm, kind = config.algorithm, config.algorithm.kl_loss_type
    if algorithm.use_kl_loss and algorithm.kl_loss_coef and kind in ("k1", "kl"):
        sentences.append(
            f"WARNING: algorithm.kl_loss_type={kind} has a gradient whose expectation is 0, so the KL term holds the "
            f"policy to nothing: use {kind}+, which has its value and the gradient of k2, or low_var_kl"
        )
    judges = algorithm.filter_groups
    if judges.enable and not judges.filter and "reward_model" in config.roles and config.reward.weight == 0:
        sentences.append(
            "WARNING: algorithm.filter_groups judges a group by its scores without the reward model, which alone is "
            "trained on with reward.weight=0: groups whose rewards differ may be left out. Set reward.weight above 0, "
            "or algorithm.filter_groups.enable=false"
        )
    values, defaults = to_flat_dict(config), to_flat_dict(type(config)())
    changed = {key for key, value in values.items() if value != defaults.get(key)}
    changed -= {_COEFFICIENT} if values[_COEFFICIENT] == 0 else set()
    for sections, reason, advice in _unused(config):
        idle = sorted(key for key in changed if any(f"{key}.".startswith(f"{name}.") for name in sections))
        if idle:
            verb, what = ("is", "it does") if len(idle) == 1 else ("are", "they do")
            names = ", ".join(idle[:3]) + (f" and {len(idle) - 3} more" if len(idle) > 3 else "")
            sentences.append(f"WARNING: {names} {verb} set, and {reason}, so {what} nothing: {advice}")
    return sentences


def _unused(config: Config) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Keys or sections that the run does not use, the reason, and what to do."""
    algorithm = config.algorithm
    if not algorithm.use_kl_loss:
        keys = ("algorithm.kl_loss_coef", "algorithm.kl_loss_type") if algorithm.kl_loss_coef else ()
        yield keys, "algorithm.use_kl_loss is false", "set that to true for a KL term in the loss"
    if not algorithm.use_kl_in_reward:
        keys = ("algorithm.kl_ctrl", "algorithm.kl_penalty")
        yield keys, "algorithm.use_kl_in_reward is false", "set that to true for a KL penalty in the reward"
    if "critic" not in config.roles:  # its section may stay: a configuration may serve PPO and GRPO alike
        reason = f"algorithm.adv_estimator={algorithm.adv_estimator} has no critic"
        yield ("algorithm.cliprange_value",), reason, "use gae for PPO with one"
    loss = policy_loss_declaration(algorithm.policy_loss)
    if not loss.is_user_convention:
        unread = [key for name, key in LOSS_SHARED_SETTINGS.items() if name not in loss.settings]
        if len(unread) == len(LOSS_SHARED_SETTINGS):
            unread.append("algorithm.clip_ratio")
        reason = f"algorithm.policy_loss={algorithm.policy_loss} takes no such number"
        yield tuple(unread), reason, "see `strop config explain algorithm.policy_loss`, or leave it out"
