"""The tables for TRL: arguments of GRPOConfig, RLOOConfig and SFTConfig, of their trainers and of LoraConfig.

TRL counts samples per device and optimizer steps; strop counts prompts per step, samples per optimizer step, and
steps. How many processes a script was started with does not stand in it, so that is an argument here. Defaults that
differ from ours are written out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.config.migration.found import Found
from strop.config.migration.rules import (
    Facts,
    Migration,
    Outcome,
    Rule,
    UnreadableError,
    apply_table,
    many,
    not_needed,
    refuse,
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
    number,
    one_or_more,
)

_SHARED: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
    "save_steps": 500,
    "eval_strategy": "no",
    "seed": 42,
}
_RL: dict[str, Any] = {
    **_SHARED,
    "learning_rate": 1e-6,
    "num_iterations": 1,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "loss_type": "dapo",
    "delta": None,
}
_OWN: dict[str, dict[str, Any]] = {
    "GRPO": {**_RL, "num_generations": 8, "beta": 0.0, "importance_sampling_level": "token"},
    "RLOO": {**_RL, "num_generations": 2, "beta": 0.05},
    "SFT": {**_SHARED, "learning_rate": 2e-5, "max_length": 1024},
}
_WRITTEN_OUT = {
    "GRPO": (
        "per_device_train_batch_size", "num_generations", "num_train_epochs", "weight_decay", "lr_scheduler_type",
        "save_steps", "eval_strategy", "seed", "max_completion_length", "delta",
    ),
    "RLOO": (
        "per_device_train_batch_size", "num_generations", "num_train_epochs", "weight_decay", "lr_scheduler_type",
        "save_steps", "eval_strategy", "seed", "max_completion_length", "beta",
    ),
    "SFT": (
        "per_device_train_batch_size", "learning_rate", "num_train_epochs", "weight_decay", "lr_scheduler_type",
        "save_steps", "eval_strategy", "seed",
    ),
}  # fmt: skip


def migrate_trl(found: Sequence[Found], kind: str, *, processes: int = 1) -> Migration:
    """What becomes of every argument of a TRL script.

    Args:
        found: its arguments.
        kind: GRPO, RLOO or SFT.
        processes: with how many the script was started.
    """
    config = f"{kind}Config"
    defaults = {f"{config}.{name}": value for name, value in _OWN[kind].items()} | {"processes": processes}
    rows = tables(kind)
    start = Found(key="processes", value=processes, place="--processes")
    return apply_table(
        [start, *found], rows, defaults, write_out=[f"{config}.{name}" for name in _WRITTEN_OUT[kind]]
    )


def tables(kind: str) -> dict[str, Rule]:
    """The table of a trainer: its configuration, its own arguments, and an adapter."""
    config, trainer = f"{kind}Config", f"{kind}Trainer"
    role = "sft" if kind == "SFT" else "actor"
    own = _sft_rows(config) if kind == "SFT" else _rl_rows(config, kind)
    rows = {**_common_rows(config, role, kind), **own}
    return {
        "processes": _processes,
        **{f"{config}.{name}": rule for name, rule in rows.items()},
        **{f"{trainer}.{name}": rule for name, rule in _trainer_rows(kind).items()},
        **{f"LoraConfig.{name}": rule for name, rule in _LORA.items()},
    }


def _processes(key: str, value: Any, facts: Facts) -> Outcome:
    if value == 1:
        return skip("one; say --processes N if the script was started with N")
    return many({"resources.ranks": value, "resources.runtime": "ray"})


class _Batch:
    """The batch arithmetic of TRL, from its arguments."""

    def __init__(self, facts: Facts, config: str) -> None:
        def whole(name: str) -> int | None:
            value = facts.get(f"{config}.{name}")
            return None if value is None else integer(value, facts)

        device = whole("per_device_train_batch_size") or 1
        accumulated = whole("gradient_accumulation_steps") or 1
        processes = int(facts.number("processes"))
        self.per_device = device
        self.per_update = device * processes * accumulated
        """Samples of an optimizer step."""
        steps = whole("steps_per_generation") or accumulated
        self.per_step = whole("generation_batch_size") or device * processes * steps
        """Samples that are generated together."""
        self.num_generations = whole("num_generations") or 1
        self.updates = -(-self.per_step // self.per_update) * (whole("num_iterations") or 1)
        """Optimizer steps per generation."""

    def steps(self, updates: int) -> int:
        """Our steps for that many optimizer steps."""
        return max(1, -(-updates // self.updates))


def _common_rows(config: str, role: str, kind: str) -> dict[str, Rule]:
    """Arguments of transformers' TrainingArguments, which every configuration has."""
    is_sft = kind == "SFT"
    optim = f"{role}.optim"
    loop = "sft" if is_sft else "trainer"

    def batches(key: str, value: Any, facts: Facts) -> Outcome:
        batch = _Batch(facts, config)
        if is_sft:
            return many(
                {"sft.examples_per_update": batch.per_update}, "per device x processes x accumulation"
            )
        prompts, left = divmod(batch.per_step, batch.num_generations)
        if left:
            raise UnreadableError(
                f"{batch.per_step} samples are generated together, which is no multiple of "
                f"{batch.num_generations} generations"
            )
        ours = {"data.prompts_per_step": prompts, "actor.samples_per_update": batch.per_update}
        return many(
            ours,
            f"{batch.per_step} samples / {batch.num_generations} generations; {batch.per_update} per step",
        )

    def counted(ours: str) -> Rule:
        def rule(key: str, value: Any, facts: Facts) -> Outcome:
            if value is None or value < 0:
                return skip("not set")
            if isinstance(value, float) and value < 1:
                return refuse("a share of all steps is known only with the data: set the number")
            steps = integer(value, facts)
            if is_sft or steps == 0:
                return many({ours: steps})
            updates = _Batch(facts, config).updates
            note = f"{updates} optimizer steps per step" if updates > 1 else ""
            return many({ours: _Batch(facts, config).steps(steps)}, note)

        return rule

    def share(value: Any, facts: Facts) -> Any:
        total = facts.get(f"{config}.max_steps")
        if not value:
            return skip("no warm-up there, none here")
        if not isinstance(total, int) or total < 1:
            return refuse(f"the number of steps is known only with the data: set {optim}.warmup_steps")
        return math.ceil(round(value * total, 6))

    def warmup(value: Any, facts: Facts) -> Any:
        return share(value, facts) if isinstance(value, float) and 0 < value < 1 else integer(value, facts)

    def epochs(value: Any, facts: Facts) -> Any:
        if number(value, facts) != int(value):
            return refuse("strop visits every row equally often: use whole epochs, or max_steps")
        return int(value)

    def evaluated(key: str, value: Any, facts: Facts) -> Outcome:
        text = str(value)
        if text == "no":
            return many({"eval.every": 0} if is_sft else {"eval.every": 0, "eval.before_train": False})
        return many({}, "eval_steps says when") if text == "steps" else refuse("say it in steps: eval.every")

    def saved(key: str, value: Any, facts: Facts) -> Outcome:
        text = str(value)
        if text == "no":
            return many({"run.save_every": 0}, "one checkpoint at the end remains")
        return (
            many({}, "save_steps says when") if text == "steps" else refuse("say it in steps: run.save_every")
        )

    def if_saving(key: str, value: Any, facts: Facts) -> Outcome:
        if facts.get(f"{config}.save_strategy") not in (None, "steps"):
            return skip("read with save_strategy=steps alone")
        return counted("run.save_every")(key, value, facts)

    bf16 = to(
        "model.dtype",
        lambda value, facts: "bfloat16" if value is True else skip("float32 on a CPU, see model.dtype"),
    )
    ignored = {
        **dict.fromkeys(("output_dir", "run_name", "overwrite_output_dir", "logging_dir", "project"),
                        "the run folder is what --out names"),
        **dict.fromkeys(("logging_steps", "logging_strategy", "logging_first_step", "disable_tqdm", "log_level",
                         "include_tokens_per_second", "include_num_input_tokens_seen"), "every step is logged"),
        **dict.fromkeys(("log_completions", "num_completions_to_print", "wandb_log_unique_prompts",
                         "log_unique_prompts"), "samples are in the run folder: strop samples RUN"),
        **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_drop_last",
                         "dataloader_prefetch_factor", "dataset_num_proc", "remove_unused_columns",
                         "group_by_length", "length_column_name", "dataloader_persistent_workers"),
                        "rows are read once, at the start"),
        **dict.fromkeys(("ddp_find_unused_parameters", "ddp_timeout", "deepspeed", "fsdp", "fsdp_config",
                         "accelerator_config", "ddp_backend", "local_rank"), "ranks are always sharded (FSDP2)"),
        **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_token", "hub_strategy", "hub_private_repo"),
                        "models are written to a folder: strop export"),
        **dict.fromkeys(("tf32", "bf16_full_eval", "fp16_full_eval", "torch_empty_cache_steps"),
                        "precision is model.dtype"),
        **dict.fromkeys(("per_device_eval_batch_size", "eval_accumulation_steps", "eval_on_start"),
                        "validation is one batch of any size"),
        **dict.fromkeys(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
                        "run.keep_best keeps the best checkpoint"),
        **dict.fromkeys(("gradient_checkpointing_kwargs", "use_cpu", "no_cuda", "do_train", "do_eval",
                         "save_only_model", "save_safetensors", "resume_from_checkpoint", "torch_compile_backend",
                         "torch_compile_mode", "data_seed", "full_determinism"), "strop has one way to do this"),
    }  # fmt: skip
    return {
        **{name: not_needed(why) for name, why in ignored.items()},
        "per_device_train_batch_size": batches,
        "gradient_accumulation_steps": lambda key, value, facts: many({}, "in the samples per optimizer step"),
        "learning_rate": to(f"{optim}.lr", number),
        "weight_decay": to(f"{optim}.weight_decay", number),
        "adam_beta1": lambda key, value, facts: many(
            {f"{optim}.betas": [value, facts.get(f"{config}.adam_beta2") or 0.999]}
        ),
        "adam_beta2": lambda key, value, facts: many(
            {f"{optim}.betas": [facts.get(f"{config}.adam_beta1") or 0.9, value]}
        ),
        "adam_epsilon": to(f"{optim}.eps", number),
        "max_grad_norm": to(f"{optim}.max_grad_norm", number),
        "optim": to(f"{optim}.name", choice(
            {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw_8bit",
             "adamw_bnb_8bit": "adamw_8bit", "adamw_torch_8bit": "adamw_8bit", "paged_adamw_8bit": "adamw_8bit"},
            instead="use adamw, adamw_8bit or muon",
        )),
        "lr_scheduler_type": to(f"{optim}.schedule", choice(
            {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
             "warmup_stable_decay": "wsd"},
            instead="use constant, linear, cosine or wsd",
        )),
        "lr_scheduler_kwargs": unless([{}], f"the schedule's numbers are under {optim}"),
        "warmup_steps": to(f"{optim}.warmup_steps", if_set(warmup)),
        "warmup_ratio": to(f"{optim}.warmup_steps", if_set(share)),
        "num_train_epochs": to(f"{loop}.num_epochs", epochs),
        "max_steps": counted(f"{loop}.max_steps"),
        "save_steps": if_saving,
        "save_strategy": saved,
        "save_total_limit": to("run.keep_last", if_set(integer)),
        "eval_strategy": evaluated,
        "evaluation_strategy": evaluated,
        "eval_steps": counted("eval.every"),
        "seed": to("trainer.seed", integer),
        "bf16": bf16,
        "fp16": unless([False], "float16 needs loss scaling, which strop does not do: use bfloat16"),
        "gradient_checkpointing": to("model.gradient_checkpointing"),
        "torch_compile": to(f"{role}.engine.compile"),
        "use_liger_kernel": to("model.use_liger"),
        "report_to": to("trainer.trackers", _trackers),
        "trust_remote_code": to("model.trust_remote_code"),
        "model_init_kwargs": lambda key, value, facts: _model_arguments(value),
    }  # fmt: skip


def _model_arguments(value: Any) -> Outcome:
    ours: dict[str, Any] = {}
    left = []
    if value is not None and not isinstance(value, Mapping):
        raise UnreadableError(f"{value!r} would have to be a dictionary")
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


def _trackers(value: Any, facts: Facts) -> Any:
    names = [value] if isinstance(value, str) else list(value or [])
    trackers = ["console", "jsonl", *(["tensorboard"] if {"tensorboard", "all"} & set(names) else [])]
    missing = [name for name in names if name not in ("tensorboard", "none", "all")]
    note = f"no tracker for {', '.join(missing)}: metrics are in metrics.jsonl" if missing else ""
    return many({"trainer.trackers": trackers}, note)


def _rl_rows(config: str, kind: str) -> dict[str, Rule]:
    """Arguments of GRPOConfig and RLOOConfig."""

    def kl(key: str, value: Any, facts: Facts) -> Outcome:
        beta = number(value, facts)
        if kind == "RLOO":
            if beta == 0:
                return many({"algorithm.adv_estimator": "rloo"})
            return many({
                "algorithm.adv_estimator": "rloo", "algorithm.use_kl_in_reward": True,
                "algorithm.kl_ctrl.kl_coef": beta, "algorithm.loss_agg_mode": "seq-mean-token-sum",
            }, "TRL takes it off the reward of a response")  # fmt: skip
        if beta == 0:
            return skip("no KL term, as by default")
        ours = {
            "algorithm.use_kl_loss": True,
            "algorithm.kl_loss_coef": beta,
            "algorithm.kl_loss_type": "low_var_kl",
        }
        return many(ours)

    def loss(key: str, value: Any, facts: Facts) -> Outcome:
        limit = facts.get(f"{config}.max_completion_length")
        known: dict[str, dict[str, Any]] = {
            "grpo": {"algorithm.loss_agg_mode": "seq-mean-token-mean"},
            "bnpo": {"algorithm.loss_agg_mode": "token-mean"},
            "dapo": {"algorithm.loss_agg_mode": "token-mean"},
            "dr_grpo": {
                "algorithm.loss_agg_mode": "seq-mean-token-sum-norm",
                "algorithm.loss_scale_factor": limit,
            },
            "cispo": {"algorithm.policy_loss": "cispo", "algorithm.loss_agg_mode": "token-mean"},
            "sapo": {"algorithm.policy_loss": "sapo"},
        }
        if value not in known:
            return refuse(f"strop has {', '.join(known)}")
        return many(known[value])

    def level(value: Any, facts: Facts) -> Any:
        if value == "token":
            return skip("as by default")
        return "gspo" if value == "sequence" else refuse("use token or sequence")

    def scale(value: Any, facts: Facts) -> Any:
        if value in (True, "group"):
            return True
        return False if value in (False, "none") else refuse("rewards are scaled per group or not at all")

    def cap(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None:
            return many({"algorithm.clip_ratio_c": float("inf")}, "TRL has no dual clip unless delta is set")
        return many({"algorithm.clip_ratio_c": number(value, facts)})

    def correction(key: str, value: Any, facts: Facts) -> Outcome:
        if value is not True or facts.get(f"{config}.use_vllm") is not True:
            return skip("read with use_vllm=True alone")
        mode = str(facts.get(f"{config}.vllm_importance_sampling_mode") or "sequence_mask")
        weights, _, action = mode.partition("_")
        upper = facts.get(f"{config}.vllm_importance_sampling_cap")
        ours: dict[str, Any] = {"algorithm.correction.weights": weights}
        if action == "mask":
            ours |= {"algorithm.correction.mode": "mask", "algorithm.correction.lower": 1e-6}
        ours["algorithm.correction.upper"] = 3.0 if upper is None else number(upper, facts)
        return many(ours)

    def processes_for_vllm(name: str) -> Rule:
        return not_needed("strop samples with its own engine; vLLM is not connected yet")

    served = (
        "use_vllm", "vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_server_base_url", "vllm_server_timeout",
        "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode", "vllm_model_impl",
        "vllm_max_model_length", "vllm_device", "vllm_dtype", "vllm_max_model_len", "vllm_enable_prefix_caching",
        "vllm_group_port", "use_transformers_paged", "cache_implementation", "ds3_gather_for_generation",
    )  # fmt: skip
    with_cap = ("vllm_importance_sampling_mode", "vllm_importance_sampling_cap")
    rows: dict[str, Rule] = {
        **{name: processes_for_vllm(name) for name in served},
        **{name: lambda key, value, facts: many({}, "in algorithm.correction") for name in with_cap},
        "vllm_importance_sampling_correction": correction,
        "vllm_guided_decoding_regex": unless([], "answers are sampled freely", else_note="not set"),
        "vllm_structured_outputs_regex": unless([], "answers are sampled freely", else_note="not set"),
        "num_generations": to("rollout.samples_per_prompt", integer),
        "num_generations_eval": to("eval.samples_per_prompt", if_set(integer)),
        "steps_per_generation": lambda key, value, facts: many({}, "in data.prompts_per_step"),
        "generation_batch_size": lambda key, value, facts: many({}, "in data.prompts_per_step"),
        "num_iterations": to("actor.epochs", integer),
        "max_prompt_length": to("data.max_prompt_tokens", lambda value, facts: (
            many({}, "longer prompts than data.max_prompt_tokens are dropped here") if value is None
            else many({"data.max_prompt_tokens": integer(value, facts)},
                      "longer prompts are dropped and counted; TRL cuts them on the left")
        )),
        "max_completion_length": to("data.max_response_tokens", integer),
        "shuffle_dataset": to("data.shuffle"),
        "temperature": to("rollout.temperature", number),
        "top_p": to("rollout.top_p", number),
        "top_k": to("rollout.top_k", if_set(lambda value, facts: max(0, integer(value, facts)))),
        "min_p": unless([0, 0.0], "there is top_p and top_k"),
        "repetition_penalty": unless([1, 1.0], "log-probs are those of the plain distribution", else_note="off"),
        "generation_kwargs": unless([{}], "the ways to sample are under rollout"),
        "chat_template_kwargs": to("data.chat_template_kwargs", lambda value, facts: value or skip("empty there too")),
        "beta": kl,
        "epsilon": to("algorithm.clip_ratio", number),
        "epsilon_high": to("algorithm.clip_ratio_high", if_set(number)),
        "delta": cap,
        "loss_type": loss,
        "importance_sampling_level": to("algorithm.policy_loss", level),
        "scale_rewards": to("algorithm.norm_adv_by_std", scale),
        "sapo_temperature_pos": to("algorithm.loss_settings.tau_pos", number),
        "sapo_temperature_neg": to("algorithm.loss_settings.tau_neg", number),
        "reward_weights": unless([], "one reward function returns the reward: add them up in it"),
        "multi_objective_aggregation": unless(["sum_then_normalize"], "one reward function returns the reward"),
        "mask_truncated_completions": unless([False], "cut answers are trained: let the reward function see them"),
        "top_entropy_quantile": unless([1, 1.0], "all tokens are trained", else_note="all tokens"),
        "use_liger_loss": not_needed("log-probs never need the logits of all tokens at once"),
        "sync_ref_model": unless([False], "the reference stays as it was", else_note="off"),
        "ref_model_mixup_alpha": not_needed("read with sync_ref_model=True alone"),
        "ref_model_sync_steps": not_needed("read with sync_ref_model=True alone"),
        "disable_dropout": not_needed("dropout is always off"),
        "cast_lm_head_to_fp32": not_needed("log-probs are always computed in float32"),
        "use_bias_correction_kl": unless([False], "the KL estimators are under algorithm.kl_loss_type"),
        "off_policy_mask_threshold": unless([], "ours is algorithm.correction.reject", else_note="off"),
        "max_tool_calling_iterations": unless([], "tools are not there yet", else_note="not set"),
        "tools": unless([[]], "tools are not there yet"),
    }  # fmt: skip
    if kind == "RLOO":
        rows |= {
            "normalize_advantages": unless([False], "ours subtracts the mean of the other samples alone"),
            "reward_clip_range": unless([], "clip the reward in the reward function", else_note="off"),
        }
        for name in ("loss_type", "scale_rewards", "delta", "importance_sampling_level"):
            del rows[name]
    return rows


def _sft_rows(config: str) -> dict[str, Rule]:
    """Arguments of SFTConfig."""
    return {
        "max_length": to("sft.data.max_tokens", if_set(integer)),
        "max_seq_length": to("sft.data.max_tokens", if_set(integer)),
        "packing": not_needed("sequences are always packed, each attending to itself alone"),
        "packing_strategy": not_needed("sequences are always packed"),
        "eval_packing": not_needed("sequences are always packed"),
        "padding_free": not_needed("sequences are always packed, never padded"),
        "pad_to_multiple_of": not_needed("sequences are never padded"),
        "dataset_text_field": unless(
            ["text"], "plain text without turns is not trained: use messages, or prompt and completion",
            else_note="rows have messages, or prompt and completion",
        ),
        "dataset_kwargs": unless([{}], "rows are read as they are"),
        "completion_only_loss": unless([True], "the loss is on what the assistant says", else_note="always"),
        "assistant_only_loss": unless([True], "the loss is on what the assistant says", else_note="always"),
        "eos_token": unless([], "the tokenizer in model.path says it", else_note="the tokenizer's"),
        "pad_token": not_needed("sequences are never padded"),
        "chat_template_path": unless([], "the chat template is that of the tokenizer in model.path"),
        "neftune_noise_alpha": unless([], "embeddings get no noise", else_note="off"),
        "loss_type": unless(["nll"], "the loss is the log-likelihood", else_note="the same"),
        "activation_offloading": to("sft.engine.offload_activations"),
    }  # fmt: skip


_LORA: dict[str, Rule] = {
    "r": to("model.lora.rank", integer),
    "lora_alpha": to("model.lora.alpha", number),
    "target_modules": to("model.lora.target_modules", one_or_more),
    "lora_dropout": unless([0, 0.0], "adapters have no dropout", else_note="none"),
    "bias": unless(["none"], "biases stay as they are", else_note="none"),
    "task_type": not_needed("the role says it"),
    "modules_to_save": unless([[]], "adapters alone are trained", else_note="none"),
    "use_rslora": unless([False], "the scale is alpha / rank", else_note="off"),
    "init_lora_weights": unless([True], "adapters start at zero", else_note="adapters start at zero"),
}


def _trainer_rows(kind: str) -> dict[str, Rule]:
    section = "sft.data" if kind == "SFT" else "data"
    rows: dict[str, Rule] = {
        "model": model_path("model.path"),
        "args": not_needed("its own rows say what it holds"),
        "peft_config": not_needed("its own rows say what it holds"),
        "train_dataset": _dataset(f"{section}.train_files"),
        "eval_dataset": _dataset(f"{section}.val_files"),
        "processing_class": not_needed("the tokenizer is the one in model.path"),
        "tokenizer": not_needed("the tokenizer is the one in model.path"),
        "callbacks": refused("no code of yours runs between steps; metrics are in metrics.jsonl"),
        "data_collator": refused("batches are made by strop"),
        "optimizers": refused("the optimizer is set under optim"),
        "formatting_func": refused("write its result into a column of the data"),
        "compute_metrics": refused("metrics come from the reward function"),
    }
    if kind != "SFT":
        rows["reward_funcs"] = _rewards
        rows["reward_processing_classes"] = not_needed("the tokenizer is the one in reward_model.path")
        rows["rollout_func"] = refused("generation is strop's own")
        rows["tools"] = refused("tools are not there yet")
        rows["environment_factory"] = refused("environments are not there yet")
    return rows


def _dataset(ours: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None:
            return skip("none there, none here")
        if not isinstance(value, Mapping):
            raise UnreadableError(f"{value!r} is no load_dataset(...) with literal arguments: set {ours}")
        path, files, steps = value.get("path"), value.get("data_files"), value.get("steps") or []
        if isinstance(files, Mapping):
            files = files.get(value.get("split") or "train")
        done = f"its rows go through {', '.join(steps)} there: write the result into a file" if steps else ""
        if path in ("json", "parquet") and files:
            return many({ours: [files] if isinstance(files, str) else list(files)}, done)
        if path and Path(path).suffix in (".json", ".jsonl", ".parquet"):
            return many({ours: [path]}, done)
        name = f"{path}, split {value.get('split')}" if value.get("split") else str(path)
        return refuse(f"{name}: write it to a file (.parquet) and set {ours}{'; ' + done if done else ''}")

    return rule


def _rewards(key: str, value: Any, facts: Facts) -> Outcome:
    rewards = value if isinstance(value, list) else [value]
    functions = [one for one in rewards if one.get("from") in ("module", "script")]
    models = [one for one in rewards if one.get("from") == "model"]
    if len(functions) + len(models) < len(rewards):
        text = next(one.get("text") for one in rewards if one.get("from") == "expression")
        raise UnreadableError(
            f"{text} is neither a function of this script nor an imported one: set reward.path"
        )
    if len(functions) > 1 or len(models) > 1:
        names = ", ".join(str(one.get("name") or one.get("path")) for one in rewards)
        return refuse(
            f"{len(rewards)} rewards ({names}), and strop has one function: write one that adds them"
        )
    ours: dict[str, Any] = {"data.ground_truth_key": None, "data.default_data_source": "trl"}
    for model in models:
        ours |= {"reward_model.path": model["path"]}
        if not functions:
            ours["reward.weight"] = 0.0
    for function in functions:
        problem = _place_of(function, ours)
        if problem:
            return refuse(problem)
    return many(ours, "columns of the data reach the function by name, as in TRL")


def _place_of(function: Mapping[str, Any], ours: dict[str, Any]) -> str:
    """Fill in where the function is; a sentence where strop cannot load it."""
    if function["from"] == "script":
        if not function["is_safe"]:
            return (
                f"loading {function['path']} for {function['name']} would start the training in it: move the function "
                f"into a file of its own and set reward.path"
            )
        ours |= {"reward.path": function["path"], "reward.name": function["name"]}
        return ""
    module = str(function["module"])
    if module.partition(".")[0] in ("trl", "open_r1"):
        return f"{function['name']} belongs to {module}: copy it into a file of yours and set reward.path"
    file = Path(function["folder"]).joinpath(*module.split(".")).with_suffix(".py")
    ours |= {"reward.path": str(file), "reward.name": function["name"]}
    return ""
