"""verl's supervised fine-tuning: `fsdp_sft_trainer` of 2025 and `sft_trainer` of today, whose keys are their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.config.migration.found import Found
from strop.config.migration.outcomes import Facts, Outcome, many, skip
from strop.config.migration.rules import NotNeeded, Refused, To, Unless
from strop.config.migration.tables import Entry, Migration, apply_table, make_table, same, under
from strop.config.migration.values import if_any, if_set, integer, model_path, never_below_zero, one_or_more
from strop.config.migration.verl.engine import engine_entries, optimizer_entries
from strop.config.migration.verl.model import model_entries
from strop.config.migration.verl.trainer import REST, trackers

_NAMED = NotNeeded("the run folder is what --out names: strop sft --out runs/NAME")
_OF_2025 = ("model.partial_pretrain", "data.response_key", "data.prompt_key", "data.multiturn.enable")
"""Keys that only the trainer of 2025 has."""

_SHARED: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "trainer.total_epochs": 4,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.seed": 1,
    "trainer.logger": ["console", "wandb"],
}
DEFAULTS_2025: dict[str, Any] = {
    **_SHARED,
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_scheduler": "cosine",
    "optim.warmup_steps_ratio": 0.1,
    "data.prompt_key": "question",
    "data.response_key": "answer",
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
}
"""What `fsdp_sft_trainer` assumes where it differs from us."""
DEFAULTS: dict[str, Any] = {
    **_SHARED,
    "optim.lr": 1e-3,
    "model.enable_gradient_checkpointing": True,
    "model.lora_rank": 0,
    "model.lora_alpha": 16,
}
"""What `sft_trainer` assumes where it differs from us."""


def migrate_verl_sft(found: Sequence[Found]) -> Migration:
    """What becomes of every setting of a fine-tuning script."""
    given = {one.key: one.value for one in found if one.kind == "set"}
    defaults = DEFAULTS_2025 if any(key in given for key in _OF_2025) else DEFAULTS
    without = {"data.max_length", "model.lora_rank"}  # ours are the same
    if given.get("model.lora_rank") in (None, 0):
        without.add("model.lora_alpha")
    if given.get("data.multiturn.enable") is True:
        without |= {"data.prompt_key", "data.response_key"}
    return apply_table(found, TABLE, defaults, write_out=[key for key in defaults if key not in without])


def _micro_batch(key: str, value: Any, facts: Facts) -> Outcome:
    if value is None:
        return skip("not set")
    tokens = integer(value, facts) * integer(facts.get("data.max_length"), facts)
    return many({"sft.engine.max_tokens_per_device": tokens}, "strop bounds tokens, not conversations")


def _ranks(key: str, value: Any, facts: Facts) -> Outcome:
    if integer(value, facts) == 1:
        return skip("one process")
    return many({"resources.ranks": integer(value, facts), "resources.runtime": "ray"}, "processes")


def _one_update(facts: Facts) -> int:
    return 1


_PLAIN = Unless(
    ([], ["question"], ["answer"]),
    "a value inside a column: write the text itself into a column",
    "the column's own",
)
_DATA = under(
    "data",
    Entry("train_files", To("sft.data.train_files", one_or_more)),
    Entry("val_files", To("sft.data.val_files", one_or_more)),
    Entry("train_batch_size", To("sft.examples_per_update", integer)),
    Entry("micro_batch_size", NotNeeded("data.micro_batch_size_per_gpu is what counts")),
    Entry("micro_batch_size_per_gpu", _micro_batch),
    Entry("max_token_len_per_gpu", To("sft.engine.max_tokens_per_device", integer)),
    Entry("use_dynamic_bsz", NotNeeded("batches are always cut by tokens: sft.engine.max_tokens_per_device")),
    Entry("max_length", To("sft.data.max_tokens", integer)),
    *same(To("sft.data.messages_key"), "messages_key multiturn.messages_key"),
    Entry("multiturn.enable", NotNeeded("conversations of any length are read")),
    *same(NotNeeded("the row's own `tools` are shown to the model"), "tools_key multiturn.tools_key"),
    *same(
        NotNeeded("write it for all rows: sft.data.chat_template_kwargs.enable_thinking"),
        "enable_thinking_key enable_thinking_default multiturn.enable_thinking_key",
    ),
    Entry("prompt_key", To("sft.data.prompt_key")),
    Entry("response_key", To("sft.data.completion_key")),
    *same(_PLAIN, "prompt_dict_keys response_dict_keys"),
    *same(
        Unless((-1,), "every row is read: write fewer into the file", "all rows, as here"),
        "train_max_samples val_max_samples",
    ),
    Entry(
        "truncation", Unless(("error",), "conversations over the limit are dropped and counted, never cut")
    ),
    *same(NotNeeded("work is always balanced"), "balance_dp_token"),
    Entry("chat_template", Unless((), "the chat template is that of the tokenizer in model.path", "not set")),
    *same(
        Unless((), "your own dataset class: write its rows as parquet or JSON lines", "not set"),
        "custom_cls.path custom_cls.name",
    ),
    *same(NotNeeded("rows are read once"), "use_shm num_workers"),
    Entry("pad_mode", NotNeeded("sequences are always packed")),
    Entry("ignore_input_ids_mismatch", NotNeeded("tokens are those of the whole conversation")),
    Entry("apply_chat_template_kwargs", To("sft.data.chat_template_kwargs", if_any)),
)
_TRAINER = under(
    "trainer",
    Entry("total_epochs", To("sft.num_epochs", integer)),
    Entry("total_training_steps", To("sft.max_steps", if_set(integer))),
    Entry("logger", To("trainer.trackers", trackers)),
    Entry("save_freq", To("run.save_every", never_below_zero)),
    Entry("test_freq", To("eval.every", never_below_zero)),
    Entry("seed", To("trainer.seed", integer)),
    *same(_NAMED, "project_name experiment_name default_local_dir"),
    Entry("default_hdfs_dir", Unless((), "runs are written to a local folder: copy it", "not set")),
    Entry("resume_mode", NotNeeded("strop sft --resume continues a run")),
    *same(
        Unless((), "strop sft --resume --out RUN continues that run", "not set"),
        "resume_from_path resume_path",
    ),
    *same(NotNeeded("torchrun's own count is what starts processes"), "nnodes n_gpus_per_node"),
    Entry("max_ckpt_to_keep", To("run.keep_last", if_set(integer))),
    Entry("checkpoint.*", NotNeeded("checkpoints are set under run")),
    Entry("balance_batch", NotNeeded("work is always balanced")),
    Entry("device", To("resources.device")),
    *same(NotNeeded("profiling is set up outside strop"), "profile_interval profiler.*"),
)
TABLE = make_table(
    _DATA,
    model_entries("model", "model", engine="sft.engine"),
    under(
        "model",
        Entry("partial_pretrain", To("model.path", model_path("model.path"))),
        Entry("strategy", Unless(("fsdp", "fsdp2"), "strop trains with FSDP2", "strop trains with FSDP2")),
    ),
    engine_entries("model.fsdp_config", "sft.engine"),
    engine_entries("engine", "sft.engine"),
    optimizer_entries("optim", "sft.optim", _one_update),
    _TRAINER,
    (entry for entry in REST if entry.key != "torchrun.*"),
    (
        Entry("checkpoint.*", NotNeeded("checkpoints are set under run")),
        Entry("ulysses_sequence_parallel_size", To("sft.engine.sequence_parallel", integer)),
        Entry("use_remove_padding", NotNeeded("sequences are always packed, never padded")),
        *same(_ranks, "torchrun.nproc_per_node torchrun.num_processes"),
        Entry(
            "torchrun.nnodes", Unless((1,), "fine-tuning on several machines is not there yet", "one machine")
        ),
        Entry(
            "actor_rollout_ref.*",
            Refused("a key of reinforcement learning has no place in fine-tuning: leave it out"),
        ),
    ),
)
"""What becomes of the keys of fine-tuning."""
