"""The table for verl's supervised fine-tuning, whose programs take keys of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strop.config.migration.found import Found
from strop.config.migration.rules import (
    Facts,
    Migration,
    Outcome,
    Rule,
    apply_table,
    many,
    not_needed,
    refused,
    skip,
    to,
    unless,
)
from strop.config.migration.values import (
    choice,
    if_set,
    integer,
    model_path,
    never_below_zero,
    number,
    one_or_more,
    pair,
)

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 256,
    "data.max_length": 1024,
    "data.micro_batch_size_per_gpu": 4,
    "optim.lr": 1e-5,
    "optim.weight_decay": 0.01,
    "trainer.total_epochs": 1,
    "trainer.logger": ["console"],
}
WRITTEN_OUT = ("data.train_batch_size",)

_NAMED = "the run folder is what --out names: strop sft --out runs/NAME"


def _micro_batch(key: str, value: Any, facts: Facts) -> Outcome:
    tokens = integer(value, facts) * integer(facts.get("data.max_length"), facts)
    return many({"sft.engine.max_tokens_per_device": tokens}, "strop bounds tokens, not conversations")


def _ranks(key: str, value: Any, facts: Facts) -> Outcome:
    if integer(value, facts) == 1:
        return skip("one process")
    return many({"resources.ranks": integer(value, facts), "resources.runtime": "ray"}, "processes")


TABLE: dict[str, Rule] = {
    "data.train_files": to("sft.data.train_files", one_or_more),
    "data.val_files": to("sft.data.val_files", one_or_more),
    "data.train_batch_size": to("sft.examples_per_update", integer),
    "data.micro_batch_size": not_needed("data.micro_batch_size_per_gpu is what counts"),
    "data.micro_batch_size_per_gpu": _micro_batch,
    "data.max_length": to("sft.data.max_tokens", integer),
    "data.max_token_len_per_gpu": to("sft.engine.max_tokens_per_device", integer),
    "data.use_dynamic_bsz": not_needed("batches are always cut by tokens: sft.engine.max_tokens_per_device"),
    "data.messages_key": to("sft.data.messages_key"),
    "data.multiturn.messages_key": to("sft.data.messages_key"),
    "data.multiturn.enable": not_needed("conversations of any length are read"),
    "data.multiturn.*": not_needed("messages and the loss on assistant turns are always read"),
    "data.prompt_key": to("sft.data.prompt_key"),
    "data.response_key": to("sft.data.completion_key"),
    "data.prompt_dict_keys": unless([[]], "a value inside a column: write the text itself into a column"),
    "data.response_dict_keys": unless([[]], "a value inside a column: write the text itself into a column"),
    "data.truncation": unless(["error"], "conversations over the limit are dropped and counted, never cut"),
    "data.balance_dp_token": not_needed("work is always balanced"),
    "data.chat_template": unless([], "the chat template is that of the tokenizer in model.path"),
    "data.custom_cls.*": unless([], "your own dataset class: write its rows as parquet or JSON lines"),
    "data.use_shm": not_needed("rows are read once"),
    "data.pad_mode": not_needed("sequences are always packed"),
    "data.apply_chat_template_kwargs": to(
        "sft.data.chat_template_kwargs", lambda value, facts: value or skip("empty there too")
    ),
    "model.partial_pretrain": model_path("model.path"),
    "model.path": model_path("model.path"),
    "model.enable_gradient_checkpointing": to("model.gradient_checkpointing"),
    "model.trust_remote_code": to("model.trust_remote_code"),
    "model.lora_rank": to("model.lora.rank", integer),
    "model.lora_alpha": to("model.lora.alpha", number),
    "model.target_modules": to("model.lora.target_modules", one_or_more),
    "model.use_liger": to("model.use_liger"),
    "model.strategy": not_needed("strop trains with FSDP2"),
    "model.external_lib": unless([], "no module of yours is imported before the model"),
    "model.fsdp_config.*": not_needed("ours is sft.engine"),
    "model.*": not_needed("a detail of verl's model wrapping; ours has no such choice"),
    "optim.lr": to("sft.optim.lr", number),
    "optim.betas": to("sft.optim.betas", pair),
    "optim.weight_decay": to("sft.optim.weight_decay", number),
    "optim.clip_grad": to("sft.optim.max_grad_norm", number),
    "optim.lr_warmup_steps": to(
        "sft.optim.warmup_steps", if_set(lambda value, facts: max(0, integer(value, facts)))
    ),
    "optim.lr_warmup_steps_ratio": unless(
        [0, 0.0], "the number of steps is known only with the data: set sft.optim.warmup_steps"
    ),
    "optim.warmup_steps_ratio": unless(
        [0, 0.0], "the number of steps is known only with the data: set sft.optim.warmup_steps"
    ),
    "optim.lr_scheduler": to(
        "sft.optim.schedule",
        choice(
            {"cosine": "cosine", "wsd": "wsd", "constant": "constant"}, instead="use constant, cosine or wsd"
        ),
    ),
    "optim.*": not_needed("ours are under sft.optim"),
    "engine.*": not_needed("ours are under sft.engine"),
    "ulysses_sequence_parallel_size": to("sft.engine.sequence_parallel", integer),
    "use_remove_padding": not_needed("sequences are always packed, never padded"),
    "trainer.total_epochs": to("sft.num_epochs", integer),
    "trainer.total_training_steps": to("sft.max_steps", if_set(integer)),
    "trainer.logger": not_needed("trainer.trackers says it"),
    "trainer.save_freq": to("run.save_every", never_below_zero),
    "trainer.test_freq": to("eval.every", never_below_zero),
    "trainer.seed": to("trainer.seed", integer),
    "trainer.project_name": not_needed(_NAMED),
    "trainer.experiment_name": not_needed(_NAMED),
    "trainer.default_local_dir": not_needed(_NAMED),
    "trainer.default_hdfs_dir": unless([], "runs are written to a local folder: copy it"),
    "trainer.resume_mode": not_needed("strop sft --resume continues a run"),
    "trainer.nnodes": not_needed("torchrun's own count is what starts processes"),
    "trainer.n_gpus_per_node": not_needed("torchrun's own count is what starts processes"),
    "trainer.max_ckpt_to_keep": to("run.keep_last", if_set(integer)),
    "trainer.*": not_needed("ours are under trainer and run"),
    "torchrun.nproc_per_node": _ranks,
    "torchrun.nnodes": unless(
        [1], "fine-tuning on several machines is not there yet", else_note="one machine"
    ),
    "torchrun.num_processes": _ranks,
    "$@": not_needed("settings go after the command here too: strop sft --config FILE key=value"),
    "--config-name": not_needed("its defaults are known here"),
    "--config-path": not_needed("give the YAML file itself"),
    "hydra.*": not_needed("strop writes nothing but its run folder"),
    "defaults": not_needed("the defaults of verl are known here"),
    "actor_rollout_ref.*": refused("a key of reinforcement learning has no place in fine-tuning"),
}
"""verl's keys of fine-tuning and what becomes of each."""


def migrate_verl_sft(found: Sequence[Found]) -> Migration:
    """What becomes of every setting of a fine-tuning script."""
    return apply_table(found, TABLE, DEFAULTS, write_out=WRITTEN_OUT)
