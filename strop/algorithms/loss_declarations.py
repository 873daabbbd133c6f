"""What each policy loss asks for, and what may be set for it (torch-free).

The functions are in losses/; those of further papers are guests (place "recipes").
"""

from __future__ import annotations

from collections.abc import Mapping

from strop.algorithms.registry import Declaration, check_settings, joined_recipes
from strop.base.metrics import Metric
from strop.base.registry import Registry

SHARED_SETTINGS = {
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

_TOKENS = frozenset({"log_probs", "old_log_probs", "advantages"})
_CLIP = frozenset({"clip_low", "clip_high"})
_PLAIN = Declaration(needs=_TOKENS)

LOSS_DECLARATIONS: Registry[Declaration] = Registry(
    "policy loss",
    {
        "vanilla": Declaration(needs=_TOKENS, settings=_CLIP | {"clip_c"}),
        "gpg": _PLAIN,
        "reinforce": _PLAIN,
        **{name: asked for recipes in joined_recipes() for name, asked in recipes.losses.items()},
    },
)


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
    check_settings("policy loss", name, declaration, settings, elsewhere=SHARED_SETTINGS)
