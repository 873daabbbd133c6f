"""Arguments of transformers' TrainingArguments, which every configuration of TRL has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from strop.config.migration.outcomes import Facts, Outcome, Rule, UnreadableError, many, refuse, skip
from strop.config.migration.rules import NotNeeded, Refused, To, Unless
from strop.config.migration.tables import Entry, same
from strop.config.migration.trl.batches import Batch
from strop.config.migration.values import choice, if_set, integer, number, tracker_names

_OPTIMIZERS = choice(
    {
        **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
        **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    },
    instead="use adamw, adamw_8bit or muon",
)  # fmt: skip
_SCHEDULES = choice(
    {
        "linear": "linear",
        "cosine": "cosine",
        "constant": "constant",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    },
    instead="use constant, linear, cosine or wsd",
)
_NOT_NEEDED = {
    "the run folder is what --out names": "output_dir run_name overwrite_output_dir logging_dir project",
    "every step is logged": (
        "logging_steps logging_strategy logging_first_step logging_nan_inf_filter log_on_each_node disable_tqdm "
        "log_level log_level_replica include_tokens_per_second include_num_input_tokens_seen skip_memory_metrics debug"
    ),
    "trainer.trackers says where metrics go": "trackio_space_id trackio_bucket_id trackio_static_space_id",
    "rows are read once, at the start": (
        "dataloader_num_workers dataloader_pin_memory dataloader_drop_last dataloader_prefetch_factor "
        "dataloader_persistent_workers dataloader_multiprocessing_context dataloader_in_order dataset_num_proc "
        "remove_unused_columns label_names length_column_name group_by_length ignore_data_skip"
    ),
    "micro-batches are packed up to engine.max_tokens_per_device": "auto_find_batch_size split_batches",
    "losses are averaged over all ranks": "average_tokens_across_devices",
    "ranks are always sharded (FSDP2)": (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_timeout ddp_backend "
        "deepspeed fsdp fsdp_config fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap accelerator_config "
        "local_rank ray_scope"
    ),
    "models are written to a folder: strop export": (
        "push_to_hub hub_model_id hub_token hub_strategy hub_private_repo hub_always_push hub_revision "
        "push_to_hub_model_id push_to_hub_organization push_to_hub_token"
    ),
    "precision is model.dtype": (
        "tf32 bf16_full_eval fp16_full_eval torch_empty_cache_steps half_precision_backend fp16_backend fp16_opt_level"
    ),
    "validation is one batch of any size": (
        "per_device_eval_batch_size eval_accumulation_steps eval_do_concat_batches eval_use_gather_object "
        "batch_eval_metrics prediction_loss_only include_for_metrics include_inputs_for_metrics"
    ),
    "run.keep_best keeps the best checkpoint": "load_best_model_at_end metric_for_best_model greater_is_better",
    "a checkpoint holds what a resume needs": (
        "save_only_model save_safetensors save_on_each_node enable_jit_checkpoint resume_from_checkpoint "
        "restore_callback_states_from_checkpoint"
    ),
    "the engine has one way to do this": (
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_cache liger_kernel_config "
        "torch_compile_backend torch_compile_mode jit_mode_eval use_ipex torchdynamo"
    ),
    "resources.device says it": "use_cpu no_cuda use_mps_device tpu_num_cores",
    "the command says it": "do_train do_eval do_predict",
    "a run follows from trainer.seed": "data_seed full_determinism",
}


def common_entries(config: str, role: str, loop: str) -> tuple[Entry, ...]:
    """What becomes of them.

    Args:
        config: the name of the configuration, such as GRPOConfig.
        role: our section with `optim` and `engine`.
        loop: our section with `num_epochs` and `max_steps`.
    """
    optim = f"{role}.optim"
    return (
        *(entry for why, names in _NOT_NEEDED.items() for entry in same(NotNeeded(why), names)),
        *_optimizer_entries(config, optim),
        Entry("per_device_train_batch_size", _batches(config)),
        *same(_noted("in the samples per optimizer step"), "gradient_accumulation_steps"),
        Entry("num_train_epochs", To(f"{loop}.num_epochs", _epochs)),
        Entry("max_steps", counted(config, f"{loop}.max_steps")),
        Entry("save_steps", _if_saving(config)),
        Entry("save_strategy", _saved),
        Entry("save_total_limit", To("run.keep_last", if_set(integer))),
        *same(_evaluated(config), "eval_strategy evaluation_strategy"),
        Entry("eval_steps", counted(config, "eval.every")),
        Entry("eval_on_start", To("eval.before_train")),
        Entry("eval_delay", Unless((0,), "validation begins with the run: eval.every", "none")),
        Entry("seed", To("trainer.seed", integer)),
        Entry("bf16", To("model.dtype", _precision)),
        Entry("fp16", Unless((False,), "float16 needs loss scaling, which strop does not do: use bfloat16", "off")),
        *same(To("model.gradient_checkpointing", if_set()), "gradient_checkpointing activation_checkpointing"),
        Entry("torch_compile", To(f"{role}.engine.compile")),
        Entry("use_liger_kernel", To("model.use_liger")),
        Entry("report_to", To("trainer.trackers", _trackers)),
        Entry("trust_remote_code", To("model.trust_remote_code")),
        Entry("model_init_kwargs", _model_arguments),
        Entry("neftune_noise_alpha", Unless((), "embeddings get no noise", "off")),
        Entry("label_smoothing_factor", Unless((0, 0.0), "labels are the tokens themselves", "off")),
        Entry("train_sampling_strategy", Unless(("random",), "rows are shuffled or in order", "shuffled")),
        Entry("parallelism_config", Unless((), f"sequences are split by {role}.engine.sequence_parallel", "not set")),
    )  # fmt: skip


def _optimizer_entries(config: str, optim: str) -> tuple[Entry, ...]:
    def betas(key: str, value: Any, facts: Facts) -> Outcome:
        first = facts.get(f"{config}.adam_beta1")
        second = facts.get(f"{config}.adam_beta2")
        return many(
            {f"{optim}.betas": [0.9 if first is None else first, 0.999 if second is None else second]}
        )

    def share(value: Any, facts: Facts) -> Any:
        total = facts.get(f"{config}.max_steps")
        if not value:
            return skip("no warm-up there, none here")
        if not isinstance(total, int) or total < 1:
            return refuse(f"the number of steps is known only with the data: set {optim}.warmup_steps")
        return math.ceil(round(value * total, 6))

    def warmup(value: Any, facts: Facts) -> Any:
        is_share = isinstance(value, float) and 0 < value < 1
        return share(value, facts) if is_share else integer(value, facts)

    return (
        Entry("learning_rate", To(f"{optim}.lr", number)),
        Entry("weight_decay", To(f"{optim}.weight_decay", number)),
        *same(betas, "adam_beta1 adam_beta2"),
        Entry("adam_epsilon", To(f"{optim}.eps", number)),
        Entry("max_grad_norm", To(f"{optim}.max_grad_norm", number)),
        Entry("optim", To(f"{optim}.name", _OPTIMIZERS)),
        *same(
            Unless(("", {}), f"the optimizer's settings are under {optim}", "not set"),
            "optim_args optim_target_modules",
        ),
        Entry("adafactor", Unless((False,), f"use adamw, adamw_8bit or muon: {optim}.name", "off")),
        Entry("lr_scheduler_type", To(f"{optim}.schedule", _SCHEDULES)),
        Entry("lr_scheduler_kwargs", Unless(({},), f"the schedule's numbers are under {optim}", "not set")),
        Entry("warmup_steps", To(f"{optim}.warmup_steps", if_set(warmup))),
        Entry("warmup_ratio", To(f"{optim}.warmup_steps", if_set(share))),
    )


def counted(config: str, ours: str) -> Rule:
    """A number of optimizer steps as ours."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None or value < 0:
            return skip("not set")
        if isinstance(value, float) and value < 1:
            return refuse("a share of all steps is known only with the data: set the number")
        steps = integer(value, facts)
        if config == "SFTConfig" or steps == 0:
            return many({ours: steps})
        batch = Batch(facts, config)
        note = f"{batch.updates} optimizer steps per step" if batch.updates > 1 else ""
        return many({ours: batch.steps(steps)}, note)

    return rule


def _noted(where: str) -> Rule:
    return lambda key, value, facts: many({}, where)


def _batches(config: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        batch = Batch(facts, config)
        if config == "SFTConfig":
            ours = {"sft.examples_per_update": batch.per_update}
            return many(ours, "per device x processes x accumulation")
        prompts, left = divmod(batch.per_step, batch.num_generations)
        if left:
            raise UnreadableError(
                f"{batch.per_step} samples are generated together, which is no multiple of "
                f"{batch.num_generations} generations"
            )
        return many(
            {"data.prompts_per_step": prompts, "actor.samples_per_update": batch.per_update},
            f"{batch.per_step} samples / {batch.num_generations} generations; {batch.per_update} per step",
        )

    return rule


def _epochs(value: Any, facts: Facts) -> Any:
    if number(value, facts) != int(value):
        return refuse("strop visits every row equally often: use whole epochs, or max_steps")
    return int(value)


def _evaluated(config: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        is_sft = config == "SFTConfig"
        if str(value) == "no":
            return many({"eval.every": 0} if is_sft else {"eval.every": 0, "eval.before_train": False})
        if str(value) != "steps":
            return refuse("say it in steps: eval.every")
        if is_sft:
            return many({}, "eval_steps says when")
        given = facts.get(f"{config}.num_generations_eval")
        ours = {
            "eval.samples_per_prompt": facts.get(f"{config}.num_generations") if given is None else given,
            "eval.temperature": facts.get(f"{config}.temperature"),
        }
        return many(ours, "TRL validates as it trains; eval_steps says when")

    return rule


def _saved(key: str, value: Any, facts: Facts) -> Outcome:
    if str(value) == "no":
        return many({"run.save_every": 0}, "one checkpoint at the end remains")
    return (
        many({}, "save_steps says when")
        if str(value) == "steps"
        else refuse("say it in steps: run.save_every")
    )


def _if_saving(config: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if facts.get(f"{config}.save_strategy") not in (None, "steps"):
            return skip("read with save_strategy=steps alone")
        return counted(config, "run.save_every")(key, value, facts)

    return rule


def _precision(value: Any, facts: Facts) -> Any:
    return "bfloat16" if value is True else skip("float32 on a CPU, see model.dtype")


def _trackers(value: Any, facts: Facts) -> Outcome:
    found, missing = tracker_names(
        value, {"tensorboard": "tensorboard", "all": "tensorboard", "none": "console"}
    )
    ours = ["console", "jsonl", *(["tensorboard"] if "tensorboard" in found else [])]
    note = f"no tracker for {', '.join(missing)}: metrics are in metrics.jsonl" if missing else ""
    return many({"trainer.trackers": ours}, note)


def _model_arguments(key: str, value: Any, facts: Facts) -> Outcome:
    if value is not None and not isinstance(value, Mapping):
        raise UnreadableError(f"{value!r} would have to be a dictionary")
    ours: dict[str, Any] = {}
    left = []
    for name, given in (value or {}).items():
        if name in ("torch_dtype", "dtype") and given in ("bfloat16", "float32", "auto"):
            ours["model.dtype"] = given
        elif name == "trust_remote_code":
            ours["model.trust_remote_code"] = given
        elif name not in ("attn_implementation", "device_map", "use_cache"):
            left.append(name)
    if left:
        return refuse(f"{', '.join(left)} cannot be passed on: change the model's config.json")
    return many(ours) if ours else skip("attention and placement are the engine's")


CALLBACKS = same(
    Refused("no code of yours runs between steps; metrics are in metrics.jsonl"),
    "callbacks compute_loss_func",
)
"""Arguments of every trainer that bring code along."""
