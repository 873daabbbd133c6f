"""Aliases: our keys for keys of verl, TRL and OpenRLHF that a user types, and for words that are nobody's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strop.compat.migrate.tables import Table
    from strop.config.unknown_key import KeyAliases

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
WORDS: Mapping[str, tuple[str, ...]] = {
    "dataset": _FILES, "dataset_name": _FILES, "train_data": _FILES,
    "batch_size": ("data.prompts_per_step", "actor.samples_per_update"),
    "per_device_train_batch_size": ("data.prompts_per_step", "actor.samples_per_update"),
    "gradient_accumulation_steps": ("actor.samples_per_update",),
    "mini_batch_size": ("actor.samples_per_update",), "micro_batch_size": ("actor.engine.max_tokens_per_device",),
    "n": _SAMPLES, "num_samples": _SAMPLES, "n_samples": _SAMPLES, "group_size": _SAMPLES,
    "eval.steps": ("eval.every",), "eval.freq": ("eval.every",), "eval.interval": ("eval.every",),
    "eval.batch_size": ("rollout.max_running",),
    "max_tokens": ("data.max_response_tokens",), "response_length": ("data.max_response_tokens",),
    "max_length": _LENGTHS, "max_len": _LENGTHS, "max_seq_length": _LENGTHS, "max_model_len": _LENGTHS,
    "epochs": _EPOCHS, "algorithm.num_epochs": _EPOCHS, "algorithm.name": ("algorithm.adv_estimator",),
    "clip_range": ("algorithm.clip_ratio",), "clip_eps": ("algorithm.clip_ratio",),
    "gae_lambda": ("algorithm.lam",), "kl_beta": ("algorithm.kl_loss_coef",),
    "gpus": ("resources.ranks",), "n_gpus": ("resources.ranks",), "num_gpus": ("resources.ranks",),
    "num_processes": ("resources.ranks",), "world_size": ("resources.ranks",),
    "tp": ("rollout.vllm.tensor_parallel", "actor.engine.tensor_parallel"),
    "rollout.backend": ("rollout.engine",), "use_vllm": ("rollout.engine",), "vllm_mode": ("rollout.engine",),
    "name_or_path": ("model.path",), "pretrained": ("model.path",),
    "data.template": ("model.chat_template",), "lora.r": ("model.lora.rank",),
    "reward.fn": ("reward.path",), "reward.function": ("reward.path",), "reward.file": ("reward.path",),
    "run.name": ("trainer.experiment_name",), "wandb": ("trainer.trackers",), "report_to": ("trainer.trackers",),
}  # fmt: skip
"""Words that people try, with the section that must stand before one, if any. Those without one are meant alone, or in
a section of _LOOP."""
_LOOP = ("data", "rollout", "actor", "trainer", "algorithm", "model", "resources", "run")
"""Root sections that a word of the training loop is looked for in, whichever of them has it."""
_EVERY_COMMAND = ("model", "trainer", "resources")
"""Root sections that commands with a section of their own read too."""

_TRAIN_FILES, _MODEL_PATH, _MAX_TOKENS = (
    ("train_files", "data.train_files"),
    ("path",),
    ("max_tokens", "data.max_tokens"),
)
_PER_UPDATE, _PER_DEVICE = (
    ("samples_per_update", "examples_per_update"),
    ("engine.max_tokens_per_device", "max_tokens_per_device"),
)
OWN: Mapping[str, tuple[str, ...]] = {
    "path": ("train_files",), "file": ("train_files",), "files": ("train_files",),
    "name": ("train_files", "path", "model"),
    "dataset": _TRAIN_FILES, "dataset_name": _TRAIN_FILES, "train_data": _TRAIN_FILES,
    "name_or_path": _MODEL_PATH, "pretrained": _MODEL_PATH,
    "batch_size": (*_PER_UPDATE, *_PER_DEVICE), "mini_batch_size": _PER_UPDATE, "micro_batch_size": _PER_DEVICE,
    "per_device_train_batch_size": (*_PER_UPDATE, *_PER_DEVICE), "gradient_accumulation_steps": _PER_UPDATE,
    "per_device_eval_batch_size": _PER_DEVICE,
    "max_tokens": _MAX_TOKENS, "max_length": _MAX_TOKENS, "max_len": _MAX_TOKENS, "max_seq_length": _MAX_TOKENS,
    "max_model_len": _MAX_TOKENS,
    "epochs": ("num_epochs",), "num_epochs": ("epochs",), "num_train_epochs": ("num_epochs", "epochs"),
    "n": ("samples_per_prompt",), "num_samples": ("samples_per_prompt",), "n_samples": ("samples_per_prompt",),
    "tp": ("engine.tensor_parallel", "tensor_parallel"), "tensor_parallel": ("engine.tensor_parallel",),
    "learning_rate": ("optim.lr", "lr"),
}  # fmt: skip
"""Words that people try, each with the keys that it may stand for in the section that it was written in."""
OPTIONS = {
    "output_dir": "out", "default_local_dir": "out", "save_path": "out", "run.dir": "out", "run.path": "out",
    "resume": "resume", "resume_mode": "resume", "resume_from_checkpoint": "resume", "load_checkpoint": "resume",
}  # fmt: skip
"""Words for what is an option of a command, or an argument of a function, where it has that."""


def aliases_beside(options: Iterable[str], form: str = "the option --{}") -> KeyAliases:
    """The aliases where these are given beside the settings, each in such a form."""
    return partial(key_aliases, options={name: form.format(name) for name in options})


def key_aliases(
    key: str,
    section: str = "",
    keys: Collection[str] = (),
    *,
    options: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Sequence[str], str]:
    """Our keys for one of verl's, TRL's or OpenRLHF's, or for a word that people try, and the sentence that says so;
    neither for any other. What is an option of the command has a sentence and no keys.

    A key is verl's as a whole (data.train_batch_size), also without actor_rollout_ref (rollout.n), TRL's and OpenRLHF's
    by its last name (actor.optim.learning_rate). The section that is written in a key counts first: critic.tp is
    critic.engine.tensor_parallel.

    Args:
        key: that was typed.
        section: of the command that it was typed for, where it has one of its own.
        keys: all that there are, sections included.
        options: those of the values of OPTIONS that the command has, each as it is called there.
    """
    here = _in_its_section(key, section, keys)
    ours, sentence = _of_a_library(key, section, keys)
    is_section_known = key.rpartition(".")[0] in ("", *keys)
    if ours and (here in ("", *ours) or not is_section_known):
        return ours, sentence
    if here:
        return (here,), f"here it is {here}"
    return _of_words(key, section, keys, options)


def _part(key: str, section: str, keys: Collection[str]) -> str:
    """The root section that a key was written in, where that is a part beside the loop (critic, reward, eval) and not
    the command's own; else ""."""
    root, dot, _ = key.partition(".")
    return root if dot and root in keys and root not in (*_LOOP, section) else ""


def _of_a_library(key: str, section: str, keys: Collection[str]) -> tuple[tuple[str, ...], str]:
    """Our keys for one of another library's; what TRL and OpenRLHF call a setting of the loop says nothing of another
    part."""
    ours, sentence = _of_verl(key, section)
    if ours:
        return ours, sentence
    ours, sentence = _of_trl_or_openrlhf(key, section)
    part = _part(key, section, keys)
    is_of_part = not part or any(full.startswith(f"{part}.") for full in ours)
    return (ours, sentence) if is_of_part else ((), "")


def _of_words(
    key: str, section: str, keys: Collection[str], options: Mapping[str, str]
) -> tuple[Sequence[str], str]:
    """Our keys, or the option, for a word of WORDS or OPTIONS: the key as it was written, or what it ends with, unless
    it was written in a part beside the loop."""
    parts = key.split(".")
    shortest = 2 if _part(key, section, keys) else 1
    for end in (".".join(parts[first:]) for first in range(len(parts) - shortest + 1)):
        words = WORDS.get(end, ())
        if words and (not section or all(full.partition(".")[0] in _EVERY_COMMAND for full in words)):
            return words, f"here it is {' or '.join(words)}"
        if OPTIONS.get(end) in options:
            return (), f"here it is {options[OPTIONS[end]]}"
    return (), ""


def _in_its_section(key: str, section: str, keys: Collection[str]) -> str:
    """The key that the last name stands for in the section that it was written in, first below that of the command; ""
    for none."""
    above, _, name = key.rpartition(".")
    places = [f"{section}.{above}".rstrip(".")] if section else []
    while above and above not in keys:
        above = above.rpartition(".")[0]
    places += [above] if above else []
    candidates = (f"{place}.{name_here}" for place in places for name_here in OWN.get(name, ()))
    return next((full for full in candidates if full in keys), "")


def _of_verl(key: str, section: str) -> tuple[tuple[str, ...], str]:
    """Our keys for one of verl's, and the sentence that says so."""
    # The tables take a while to read, and only an unknown key needs them.
    from strop.compat.migrate.verl import verl_sft_table, verl_table

    ours: tuple[str, ...] = () if section else _ANY_VALUE.get(key.removeprefix("actor_rollout_ref."), ())
    if section != "prefer":  # verl has no such training
        table = verl_sft_table() if section == "sft" else verl_table()
        ours = ours or _ours(table, key) or _ours(table, f"actor_rollout_ref.{key}")
    return ours, f"it is verl's, here {', '.join(ours)} (`strop migrate verl` translates a whole script)"


def _of_trl_or_openrlhf(key: str, section: str) -> tuple[tuple[str, ...], str]:
    """The same for the last name of a key, as one of TRL's, or else of OpenRLHF's."""
    from strop.compat.migrate.openrlhf import openrlhf_table
    from strop.compat.migrate.trl import trl_table

    trainings = {"sft": ("SFT", "train_sft"), "prefer": ("DPO", "train_dpo")}
    of_trl, of_openrlhf = trainings.get(section, ("GRPO", "train_ppo_ray"))
    name = key.rpartition(".")[2]
    for library, command, ours in (
        ("TRL", "trl", _ours(trl_table(of_trl), f"{of_trl}Config.{name}")),
        ("OpenRLHF", "openrlhf", _ours(openrlhf_table(of_openrlhf), name)),
    ):
        if ours:
            whole = f"(`strop migrate {command}` translates a whole script)"
            return ours, f"{name} is {library}'s, here {', '.join(ours)} {whole}"
    return (), ""


def _ours(table: Table, key: str) -> tuple[str, ...]:
    """Our keys; none where the table has no row, or the row sets nothing here. Of a name in a section that takes any,
    it is the section here."""
    from strop.compat.migrate.result import Facts, UnreadableError

    above, _, name = key.rpartition(".")
    row = key if key in table.rules else f"{above}.*"
    if row not in table.rules:
        return ()
    for value in _VALUES:
        try:
            ours = tuple(table.rules[row](key, value, Facts({key: value}, table.defaults)).ours)
        except (
            UnreadableError,
            TypeError,
            ValueError,
            AttributeError,
        ):  # the rule wants a value of another kind
            continue
        if ours:
            return ours if row == key else tuple(full.removesuffix(f".{name}") for full in ours)
    return ()
