"""What verl assumes where a script says nothing, and what follows from several of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from strop.config.migration.outcomes import Facts

A, R, M, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))

DYNAMIC = (f"{A}.use_dynamic_bsz",)
REFERENCE_DYNAMIC = (f"{REF}.log_prob_use_dynamic_bsz", *DYNAMIC)
CRITIC_DYNAMIC = ("critic.use_dynamic_bsz", *DYNAMIC)

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    f"{R}.n": 1,
    f"{A}.ppo_mini_batch_size": 256,
    f"{A}.ppo_epochs": 1,
    f"{A}.use_dynamic_bsz": False,
    f"{A}.ppo_max_token_len_per_gpu": 16384,
    f"{A}.clip_ratio": 0.2,
    f"{A}.clip_ratio_c": 3.0,
    f"{A}.loss_agg_mode": "token-mean",
    f"{A}.policy_loss.loss_mode": "vanilla",
    f"{A}.policy_loss.ppo_kl_coef": 0.1,
    f"{A}.use_kl_loss": False,
    f"{M}.enable_gradient_checkpointing": True,
    f"{M}.lora_rank": 0,
    f"{M}.lora_alpha": 16,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "algorithm.filter_groups.metric": "reward",
    "critic.ppo_epochs": 1,
    "critic.ppo_max_token_len_per_gpu": 32768,
    "critic.optim.lr": 1e-5,
    "critic.model.lora_rank": 0,
    "critic.model.lora_alpha": 16,
    "trainer.total_epochs": 30,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.logger": ["console", "wandb"],
}
"""What verl assumes where a script says nothing, as far as something here depends on it."""

WRITTEN_OUT = (
    "algorithm.adv_estimator", "data.train_batch_size", "data.filter_overlong_prompts", f"{R}.n",
    f"{A}.ppo_mini_batch_size", f"{M}.enable_gradient_checkpointing", "trainer.total_epochs", "trainer.save_freq",
    "trainer.test_freq", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.logger",
)  # fmt: skip
"""Defaults of verl that differ from ours, whatever else is set."""


def inherited(facts: Facts) -> dict[str, Any]:
    """Defaults of verl that differ from ours in the setting at hand, or that follow other keys."""
    return {key: value for key, value in _inherited(facts) if not facts.is_given(key)}


def _inherited(facts: Facts) -> Iterator[tuple[str, Any]]:
    budget = f"{A}.ppo_max_token_len_per_gpu"
    if facts.get(f"{A}.use_dynamic_bsz") is True and facts.is_given(budget) and uses_reference(facts):
        yield f"{REF}.log_prob_max_token_len_per_gpu", facts.get(budget)
    if uses_critic(facts):
        yield "critic.ppo_mini_batch_size", facts.get(f"{A}.ppo_mini_batch_size")
        yield "critic.ppo_epochs", facts.get(f"{A}.ppo_epochs")
        yield "critic.optim.lr", DEFAULTS["critic.optim.lr"]
        if is_dynamic(facts, CRITIC_DYNAMIC):
            yield "critic.ppo_max_token_len_per_gpu", DEFAULTS["critic.ppo_max_token_len_per_gpu"]
    for section in (M, "critic.model"):
        if facts.get(f"{section}.lora_rank") not in (0, None) and (section == M or uses_critic(facts)):
            yield f"{section}.lora_alpha", DEFAULTS[f"{section}.lora_alpha"]
    loss = str(facts.get(f"{A}.policy_loss.loss_mode"))
    if loss.startswith("dppo"):
        yield f"{A}.clip_ratio_c", DEFAULTS[f"{A}.clip_ratio_c"]
    if loss == "kl_cov":
        yield f"{A}.policy_loss.ppo_kl_coef", DEFAULTS[f"{A}.policy_loss.ppo_kl_coef"]
    if facts.get("algorithm.filter_groups.enable") is True:
        yield "algorithm.filter_groups.metric", DEFAULTS["algorithm.filter_groups.metric"]


def uses_reference(facts: Facts) -> bool:
    """A frozen reference model is loaded."""
    return facts.get(f"{A}.use_kl_loss") is True or facts.get("algorithm.use_kl_in_reward") is True


def uses_critic(facts: Facts) -> bool:
    """A value model is loaded."""
    return bool(facts.get("algorithm.adv_estimator") == "gae")


def longest(facts: Facts) -> int:
    """Tokens of the longest sample."""
    return int(facts.number("data.max_prompt_length") + facts.number("data.max_response_length"))


def is_dynamic(facts: Facts, keys: Sequence[str]) -> bool:
    """The first of the keys that is set is true."""
    return next((facts.get(key) for key in keys if facts.get(key) is not None), False) is True


def num_ranks(facts: Facts) -> int:
    """Devices in all."""
    return int(facts.number("trainer.nnodes") * facts.number("trainer.n_gpus_per_node"))
