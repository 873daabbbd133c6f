"""Aliases: our keys for keys of verl, TRL and OpenRLHF that a user types, and for words that are nobody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.compat.migrate.tables import Table

_VALUES: tuple[Any, ...] = (4, "vllm", ["console"], True, "sigmoid", "grpo")
"""Values of the kinds that rules read, tried in turn to see the keys that a rule gives."""

_ANY_VALUE = {"rollout.name": ("rollout.engine",)}
"""Keys of verl whose rules depend on the installed engines."""


_FILES, _SAMPLES, _EPOCHS, _LENGTHS = (
    ("data.train_files",),
    ("rollout.samples_per_prompt",),
    ("trainer.num_epochs", "actor.epochs"),
    ("data.max_prompt_tokens", "data.max_response_tokens"),
)
WORDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "": {
        "data.path": _FILES, "data.file": _FILES, "data.files": _FILES, "data.dataset": _FILES, "data.name": _FILES,
        "dataset": _FILES, "dataset_name": _FILES, "train_data": _FILES,
        "batch_size": ("data.prompts_per_step", "actor.samples_per_update"),
        "per_device_train_batch_size": ("data.prompts_per_step", "actor.samples_per_update"),
        "gradient_accumulation_steps": ("actor.samples_per_update",),
        "mini_batch_size": ("actor.samples_per_update",), "micro_batch_size": ("actor.engine.max_tokens_per_device",),
        "n": _SAMPLES, "num_samples": _SAMPLES, "n_samples": _SAMPLES, "group_size": _SAMPLES,
        "eval.n": ("eval.samples_per_prompt",), "eval.num_samples": ("eval.samples_per_prompt",),
        "eval.n_samples": ("eval.samples_per_prompt",), "eval.steps": ("eval.every",), "eval.freq": ("eval.every",),
        "eval.interval": ("eval.every",), "eval.batch_size": ("rollout.max_running",),
        "max_tokens": ("data.max_response_tokens",), "response_length": ("data.max_response_tokens",),
        "max_length": _LENGTHS, "max_len": _LENGTHS, "max_seq_length": _LENGTHS, "max_model_len": _LENGTHS,
        "epochs": _EPOCHS, "algorithm.num_epochs": _EPOCHS, "algorithm.name": ("algorithm.adv_estimator",),
        "clip_range": ("algorithm.clip_ratio",), "clip_eps": ("algorithm.clip_ratio",),
        "gae_lambda": ("algorithm.lam",), "kl_beta": ("algorithm.kl_loss_coef",),
        "gpus": ("resources.ranks",), "n_gpus": ("resources.ranks",), "num_gpus": ("resources.ranks",),
        "num_processes": ("resources.ranks",), "world_size": ("resources.ranks",),
        "tp": ("rollout.vllm.tensor_parallel", "actor.engine.tensor_parallel"),
        "rollout.backend": ("rollout.engine",), "use_vllm": ("rollout.engine",), "vllm_mode": ("rollout.engine",),
        "model.name": ("model.path",), "name_or_path": ("model.path",), "pretrained": ("model.path",),
        "data.template": ("model.chat_template",), "lora.r": ("model.lora.rank",),
        "reward.fn": ("reward.path",), "reward.function": ("reward.path",), "reward.file": ("reward.path",),
        "run.name": ("trainer.experiment_name",), "wandb": ("trainer.trackers",), "report_to": ("trainer.trackers",),
    },
    "sft": {
        "batch_size": ("sft.examples_per_update",), "per_device_train_batch_size": ("sft.examples_per_update",),
        "gradient_accumulation_steps": ("sft.examples_per_update",),
        "max_tokens": ("sft.data.max_tokens",), "max_seq_length": ("sft.data.max_tokens",),
        "micro_batch_size": ("sft.engine.max_tokens_per_device",),
    },
    "prefer": {
        "batch_size": ("prefer.examples_per_update",), "per_device_train_batch_size": ("prefer.examples_per_update",),
        "gradient_accumulation_steps": ("prefer.examples_per_update",),
        "max_tokens": ("prefer.data.max_tokens",), "max_seq_length": ("prefer.data.max_tokens",),
        "micro_batch_size": ("prefer.engine.max_tokens_per_device",),
    },
}  # fmt: skip
"""Words that people try, by the section of the command, each with what may stand before it."""
OPTIONS = {
    "output_dir": "--out", "default_local_dir": "--out", "save_path": "--out", "run.dir": "--out", "run.path": "--out",
    "resume": "--resume", "resume_mode": "--resume", "resume_from_checkpoint": "--resume",
    "load_checkpoint": "--resume",
}  # fmt: skip
"""Words for what is an option of the commands."""


def key_aliases(key: str, section: str = "") -> tuple[Sequence[str], str]:
    """Our keys for one of verl's, TRL's or OpenRLHF's, or for a word that people try, and the sentence that says so;
    neither for any other. What is an option of commands has a sentence and no keys.

    A key is verl's as a whole (data.train_batch_size), also without actor_rollout_ref (rollout.n), TRL's and OpenRLHF's
    by its last name (actor.optim.learning_rate).

    Args:
        key: that was typed.
        section: of the command that it was typed for, where it has one of its own.
    """
    # The tables take a while to read, and only an unknown key needs them.
    from strop.compat.migrate.openrlhf import openrlhf_table
    from strop.compat.migrate.trl import trl_table
    from strop.compat.migrate.verl import verl_sft_table, verl_table

    tables = {
        "": (verl_table, "GRPO", "train_ppo_ray"),
        "sft": (verl_sft_table, "SFT", "train_sft"),
        "prefer": (None, "DPO", "train_dpo"),
    }  # by the section of a command: verl's table, and TRL's and OpenRLHF's names for such a training
    of_verl, of_trl, of_openrlhf = tables.get(section, tables[""])
    ours: tuple[str, ...] = () if section else _ANY_VALUE.get(key.removeprefix("actor_rollout_ref."), ())
    if of_verl is not None:
        ours = ours or _ours(of_verl(), key) or _ours(of_verl(), f"actor_rollout_ref.{key}")
    if ours:
        return ours, f"it is verl's, here {', '.join(ours)} (`strop migrate verl` translates a whole script)"
    name = key.rpartition(".")[2]
    if ours := _ours(trl_table(of_trl), f"{of_trl}Config.{name}"):
        return (
            ours,
            f"{name} is TRL's, here {', '.join(ours)} (`strop migrate trl` translates a whole script)",
        )
    if ours := _ours(openrlhf_table(of_openrlhf), name):
        return (
            ours,
            f"{name} is OpenRLHF's, here {', '.join(ours)} (`strop migrate openrlhf` translates a whole script)",
        )
    words, parts = WORDS.get(section, WORDS[""]), key.split(".")
    for end in (".".join(parts[first:]) for first in range(len(parts))):
        if end in words:
            return words[end], f"here it is {' or '.join(words[end])}"
        if end in OPTIONS:
            return (), f"here it is the option {OPTIONS[end]}"
    return (), ""


def _ours(table: Table, key: str) -> tuple[str, ...]:
    """Our keys; none where the table has no row, or the row sets nothing here."""
    from strop.compat.migrate.result import Facts, UnreadableError

    if key not in table.rules:
        return ()
    for value in _VALUES:
        try:
            ours = tuple(table.rules[key](key, value, Facts({key: value}, table.defaults)).ours)
        except (
            UnreadableError,
            TypeError,
            ValueError,
            AttributeError,
        ):  # the rule wants a value of another kind
            continue
        if ours:
            return ours
    return ()
