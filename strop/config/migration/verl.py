"""The table for verl's reinforcement learning: each key of its configuration reference, and what becomes of it.

verl counts batches in prompts, except for micro-batches, which are samples of one device; strop counts prompts per
step, samples per optimizer step and tokens per device. Its learning-rate schedule advances once per step, ours once
per optimizer step. Defaults that differ from ours are written out, so that a short script means the same here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strop.config.migration.found import GIVEN, Found
from strop.config.migration.rules import (
    Convert,
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
    below,
    choice,
    if_set,
    integer,
    model_path,
    never_below_zero,
    number,
    one_or_more,
)
from strop.config.migration.verl_parts import (
    correction_rows,
    engine_rows,
    loss_rows,
    optimizer_rows,
    reward_rows,
    rollout_rows,
)

A, R, M, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model", "ref"))

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
    f"{A}.use_kl_loss": False,
    f"{M}.enable_gradient_checkpointing": True,
    "algorithm.adv_estimator": "gae",
    "algorithm.use_kl_in_reward": False,
    "critic.ppo_epochs": 1,
    "critic.ppo_max_token_len_per_gpu": 32768,
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
"""Defaults of verl that differ from ours."""

ESTIMATORS = {
    **{name: name for name in (
        "gae", "grpo", "grpo_passk", "gdpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax",
        "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline",
    )},
    "grpo_vectorized": "grpo",
    "rloo_vectorized": "rloo",
}  # fmt: skip


def migrate_verl(found: Sequence[Found]) -> Migration:
    """What becomes of every setting of a verl script or YAML."""
    given = {one.key: one.value for one in found if one.kind == "set" and not one.unresolved}
    facts = Facts(given, DEFAULTS)
    defaults, written_out = dict(DEFAULTS), list(WRITTEN_OUT)
    for key, value in _inherited(facts).items():
        defaults[key] = value
        written_out.append(key)
    return apply_table(found, TABLE, defaults, write_out=written_out)


def _inherited(facts: Facts) -> dict[str, Any]:
    """Defaults of verl that follow other keys, where they reach a setting of ours."""
    inherited: dict[str, Any] = {}
    budget, ref_budget = f"{A}.ppo_max_token_len_per_gpu", f"{REF}.log_prob_max_token_len_per_gpu"
    if facts.get(f"{A}.use_dynamic_bsz") is True and facts.is_given(budget) and uses_reference(facts):
        inherited[ref_budget] = facts.get(budget)
    if uses_critic(facts):
        inherited["critic.ppo_mini_batch_size"] = facts.get(f"{A}.ppo_mini_batch_size")
        inherited["critic.ppo_epochs"] = facts.get(f"{A}.ppo_epochs")
        if is_dynamic(facts, _CRITIC_DYNAMIC):
            inherited["critic.ppo_max_token_len_per_gpu"] = DEFAULTS["critic.ppo_max_token_len_per_gpu"]
    if str(facts.get(f"{A}.policy_loss.loss_mode")).startswith("dppo"):
        inherited[f"{A}.clip_ratio_c"] = DEFAULTS[f"{A}.clip_ratio_c"]
    return {key: value for key, value in inherited.items() if not facts.is_given(key)}


def uses_reference(facts: Facts) -> bool:
    """A frozen reference model is loaded."""
    return facts.get(f"{A}.use_kl_loss") is True or facts.get("algorithm.use_kl_in_reward") is True


def uses_critic(facts: Facts) -> bool:
    """A value model is loaded."""
    return bool(facts.get("algorithm.adv_estimator") == "gae")


def _only_if(condition: Callable[[Facts], bool], why_not: str, rows: Mapping[str, Rule]) -> dict[str, Rule]:
    """The rows, answering `why_not` where the condition does not hold."""

    def guarded(rule: Rule) -> Rule:
        return lambda key, value, facts: rule(key, value, facts) if condition(facts) else skip(why_not)

    return {key: guarded(rule) for key, rule in rows.items()}


def longest(facts: Facts) -> int:
    """Tokens of the longest sample."""
    return int(facts.number("data.max_prompt_length") + facts.number("data.max_response_length"))


def samples_per_update(ours: str) -> Rule:
    """A mini-batch of prompts as samples."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        prompts, n = integer(value, facts), integer(facts.get(f"{R}.n"), facts)
        return many({ours: prompts * n}, f"{prompts} prompts x {n} samples")

    return rule


def token_budget(ours: str, dynamic: Sequence[str]) -> Rule:
    """A token budget, which verl reads with dynamic batch sizes alone."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if not is_dynamic(facts, dynamic):
            return skip("verl reads it with use_dynamic_bsz=true alone")
        return many({ours: integer(value, facts)})

    return rule


def micro_batch(ours: str, dynamic: Sequence[str], *, over_all_devices: bool = False) -> Rule:
    """A micro-batch of samples as the tokens it may have."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None or is_dynamic(facts, dynamic):
            return skip("not set" if value is None else "use_dynamic_bsz=true bounds tokens instead")
        samples = integer(value, facts)
        if over_all_devices:
            samples = max(1, samples // (num_ranks(facts)))
        return many(
            {ours: samples * longest(facts)},
            f"{samples} samples of at most {longest(facts)} tokens; strop bounds tokens, not samples",
        )

    return rule


def is_dynamic(facts: Facts, keys: Sequence[str]) -> bool:
    """The first of the keys that is set is true."""
    return next((facts.get(key) for key in keys if facts.get(key) is not None), False) is True


def num_ranks(facts: Facts) -> int:
    """Devices in all."""
    return int(facts.number("trainer.nnodes") * facts.number("trainer.n_gpus_per_node"))


def _ranks(key: str, value: Any, facts: Facts) -> Outcome:
    ranks = num_ranks(facts)
    if ranks == 1:
        return many({"resources.ranks": 1})
    return many(
        {"resources.ranks": ranks, "resources.runtime": "ray"},
        f"{facts.get('trainer.nnodes')} nodes x {facts.get('trainer.n_gpus_per_node')} devices",
    )


def _estimator(value: Any, facts: Facts) -> Any:
    if value not in ESTIMATORS:
        return many(
            {"algorithm.adv_estimator": value},
            "not an estimator of verl's own: yours must be registered here too",
        )
    return ESTIMATORS[value]


def _filter_overlong(value: Any, facts: Facts) -> Any:
    note = "a prompt over the limit is an error here, with its row" if value is False else ""
    return many({"data.filter_overlong_prompts": value}, note)


def _trackers(value: Any, facts: Facts) -> Any:
    names = [value] if isinstance(value, str) else list(value or [])
    known = {"console": "console", "tensorboard": "tensorboard", "file": "jsonl"}
    trackers = [known[name] for name in names if name in known]
    missing = [name for name in names if name not in known]
    if missing:
        trackers += [name for name in ("jsonl", "tensorboard") if name not in trackers]
    note = f"no tracker for {', '.join(missing)}: metrics.jsonl and TensorBoard instead" if missing else ""
    return many({"trainer.trackers": trackers or ["jsonl"]}, note)


def _missing_file(name: str) -> Outcome:
    if name.endswith(GIVEN):
        return skip("read with the other files")
    raise UnreadableError(f"what {name} sets is not in this file: strop migrate verl {name}.yaml SCRIPT")


def _critic_warmup(value: Any, facts: Facts) -> Any:
    return value if uses_critic(facts) or not value else skip("there is no critic with this estimator")


def _filter_metric(value: Any, facts: Facts) -> Any:
    if facts.get("algorithm.filter_groups.enable") is not True:
        return skip("read with filter_groups.enable=true alone")
    names = {"acc": "acc", "score": "score", "seq_reward": "score", "seq_final_reward": "score"}
    return choice(names, instead="use acc or score")(value, facts)


def _sample_limit(key: str) -> Convert:
    def rule(value: Any, facts: Facts) -> Any:
        if value is None or (isinstance(value, int) and value < 0):
            return skip("no limit there, none here")
        return many({key: integer(value, facts)}, "spread over the rows, not the first ones")

    return rule


_NO_CRITIC = "no critic is loaded with this algorithm.adv_estimator"
_NO_REFERENCE = "no reference model is loaded without a KL term"
_NAMED = "the run folder is what --out names: strop train --out runs/NAME"
_DYNAMIC = (f"{A}.use_dynamic_bsz",)
_REF_DYNAMIC = (f"{REF}.log_prob_use_dynamic_bsz", f"{A}.use_dynamic_bsz")
_CRITIC_DYNAMIC = ("critic.use_dynamic_bsz", f"{A}.use_dynamic_bsz")
_NOTHING = "does nothing in verl either"
_LOG_PROBS = "log-probs are computed within actor.engine.max_tokens_per_device"
_PROFILER = "profiling is set up outside strop"
_MEDIA = "only rows with images, video or audio need it, and strop reads text"
_MEGATRON = "strop trains with FSDP"

_DATA: dict[str, Rule] = {
    "data.train_files": to("data.train_files", one_or_more),
    "data.val_files": to("data.val_files", one_or_more),
    "data.train_batch_size": to("data.prompts_per_step", integer, note="prompts in both"),
    "data.max_prompt_length": to("data.max_prompt_tokens", integer),
    "data.max_response_length": to("data.max_response_tokens", integer),
    "data.filter_overlong_prompts": to("data.filter_overlong_prompts", _filter_overlong),
    "data.prompt_key": to("data.prompt_key"),
    "data.shuffle": to("data.shuffle"),
    "data.seed": to("trainer.seed", if_set(integer)),
    "data.apply_chat_template_kwargs": to(
        "data.chat_template_kwargs", lambda value, facts: value or skip("empty there too")
    ),
    "data.apply_chat_template_kwargs.*": below(
        "data.apply_chat_template_kwargs", "data.chat_template_kwargs"
    ),
    "data.val_max_samples": to("data.max_val_prompts", _sample_limit("data.max_val_prompts")),
    "data.train_max_samples": to("data.max_train_prompts", _sample_limit("data.max_train_prompts")),
    "data.tokenizer": unless([""], "the tokenizer is the one in the model's folder: put yours there"),
    "data.val_batch_size": not_needed("validation is one batch of any size"),
    "data.gen_batch_size": lambda key, value, facts: (
        skip("equal to data.train_batch_size")
        if value is None or value == facts.get("data.train_batch_size")
        else refuse(
            "generates more prompts than it trains on, for dynamic sampling, which strop does not do yet"
        )
    ),
    "data.truncation": not_needed(
        "does nothing in verl's RL data; prompts over the limit are dropped or an error"
    ),
    "data.reward_fn_key": not_needed(f"{_NOTHING}; ours is data.data_source_key"),
    "data.return_raw_chat": not_needed(_NOTHING),
    "data.return_raw_input_ids": not_needed(_NOTHING),
    "data.return_full_prompt": not_needed(_NOTHING),
    "data.return_multi_modal_inputs": not_needed(_NOTHING),
    "data.chat_template_func": not_needed(_NOTHING),
    "data.filter_prompts": not_needed(_NOTHING),
    "data.filter_overlong_prompts_workers": not_needed("the filter needs no workers"),
    "data.dataloader_num_workers": not_needed("rows are read once, at the start"),
    "data.validation_shuffle": not_needed("the order of validation changes no metric"),
    "data.use_shm": not_needed("rows are read once"),
    "data.trust_remote_code": to("model.trust_remote_code"),
    "data.image_key": not_needed(_MEDIA),
    "data.video_key": not_needed(_MEDIA),
    "data.audio_key": not_needed(_MEDIA),
    "data.image_patch_size": not_needed(_MEDIA),
    "data.mm_processor_kwargs": not_needed(_MEDIA),
    "data.mm_processor_kwargs.*": not_needed(_MEDIA),
    "data.tool_config_path": unless([], "tools are not there yet"),
    "data.custom_cls.path": unless([], "your own dataset class: write its rows as parquet or JSON lines"),
    "data.custom_cls.name": unless([], "your own dataset class: write its rows as parquet or JSON lines"),
    "data.sampler.class_path": unless([], "your own sampler has no place here yet"),
    "data.sampler.class_name": unless([], "your own sampler has no place here yet"),
    "data.datagen.*": unless([], "data that is made during training has no place here yet"),
}

_MODEL: dict[str, Rule] = {
    f"{M}.path": model_path("model.path"),
    f"{M}.enable_gradient_checkpointing": to("model.gradient_checkpointing"),
    f"{M}.enable_activation_offload": to("actor.engine.offload_activations"),
    f"{M}.trust_remote_code": to("model.trust_remote_code"),
    f"{M}.use_liger": to("model.use_liger"),
    f"{M}.lora_rank": to("model.lora.rank", integer),
    f"{M}.lora_alpha": to("model.lora.alpha", number),
    f"{M}.target_modules": to("model.lora.target_modules", one_or_more),
    f"{M}.lora_adapter_path": to("model.lora.path", if_set()),
    f"{M}.exclude_modules": unless([[]], "list the modules to adapt in model.lora.target_modules instead"),
    f"{M}.target_parameters": unless([[]], "adapters are put on linear layers alone"),
    f"{M}.lora.*": not_needed("belongs to verl's Megatron adapters; ours are under model.lora"),
    f"{M}.use_remove_padding": not_needed("sequences are always packed, never padded"),
    f"{M}.use_fused_kernels": not_needed("log-probs never need the logits of all tokens at once"),
    f"{M}.fused_kernel_options.*": not_needed("log-probs never need the logits of all tokens at once"),
    f"{M}.use_shm": not_needed("weights are read once"),
    f"{M}.hf_config_path": unless([], "config and weights are read from one folder, model.path"),
    f"{M}.tokenizer_path": unless([], "the tokenizer is read from model.path: put yours there"),
    f"{M}.external_lib": unless(
        [], "no module of yours is imported before the model: use an architecture of transformers"
    ),
    f"{M}.custom_chat_template": unless(
        [], "the chat template is that of the tokenizer in model.path: put yours there"
    ),
    f"{M}.override_config": unless([{}], "the model's config.json is taken as it is: change it there"),
    f"{M}.override_config.*": refused("the model's config.json is taken as it is: change it there"),
    f"{M}.tiled_mlp.*": not_needed("lower actor.engine.max_tokens_per_device for less memory"),
    f"{M}.mtp.*": not_needed("multi-token prediction is neither trained nor used"),
    "actor_rollout_ref.hybrid_engine": unless(
        [True], "trainer and rollout share their processes, or resources.apart"
    ),
    "actor_rollout_ref.nccl_timeout": not_needed(f"{_NOTHING}; ours is resources.call_timeout_s"),
}

_ACTOR: dict[str, Rule] = {
    f"{A}.strategy": unless(["fsdp", "fsdp2"], _MEGATRON, else_note="strop trains with FSDP2"),
    f"{A}.ppo_mini_batch_size": samples_per_update("actor.samples_per_update"),
    f"{A}.ppo_micro_batch_size": micro_batch(
        "actor.engine.max_tokens_per_device", _DYNAMIC, over_all_devices=True
    ),
    f"{A}.ppo_micro_batch_size_per_gpu": micro_batch("actor.engine.max_tokens_per_device", _DYNAMIC),
    f"{A}.use_dynamic_bsz": not_needed(
        "batches are always cut by tokens: actor.engine.max_tokens_per_device"
    ),
    f"{A}.ppo_max_token_len_per_gpu": token_budget("actor.engine.max_tokens_per_device", _DYNAMIC),
    f"{A}.ppo_infer_max_token_len_per_gpu": not_needed(_LOG_PROBS),
    f"{A}.ppo_infer_micro_batch_size_per_gpu": not_needed(_LOG_PROBS),
    f"{A}.ppo_epochs": to("actor.epochs", integer),
    f"{A}.shuffle": unless(
        [False], "samples of a step are cut into optimizer steps in the order of their prompts"
    ),
    f"{A}.data_loader_seed": not_needed("samples are cut in a fixed order"),
    f"{A}.grad_clip": not_needed(
        f"{_NOTHING} (it reads actor.optim.clip_grad); ours is actor.optim.max_grad_norm"
    ),
    f"{A}.ulysses_sequence_parallel_size": to("actor.engine.sequence_parallel", integer),
    f"{A}.use_torch_compile": not_needed("it compiles the entropy; ours is computed in chunks"),
    f"{A}.entropy_from_logits_with_chunking": not_needed("always computed in chunks"),
    f"{A}.entropy_checkpointing": not_needed("always recomputed"),
    f"{A}.use_fused_kernels": not_needed("log-probs never need the logits of all tokens at once"),
    f"{A}.use_remove_padding": not_needed("sequences are always packed, never padded"),
    f"{A}.use_prefix_grouper": not_needed("samples of one prompt share it"),
    f"{A}.calculate_entropy": not_needed("the entropy is always measured"),
    f"{A}.calculate_sum_pi_squared": not_needed("computed when the estimator needs it"),
    f"{A}.sum_pi_squared_checkpointing": not_needed("computed in chunks"),
    f"{A}.freeze_vision_tower": not_needed(_NOTHING),
    f"{A}.use_rollout_log_probs": not_needed(_NOTHING),
    f"{A}.rollout_n": not_needed("follows rollout.n"),
    f"{A}.checkpoint.save_contents": lambda key, value, facts: (
        many({"run.hf_model": "always"})
        if isinstance(value, list) and "hf_model" in value
        else skip("a checkpoint always holds all that a resume needs")
    ),
    f"{A}.checkpoint.load_contents": not_needed("a resume loads everything"),
    f"{A}.checkpoint.async_save": to("run.async_save"),
    f"{A}.checkpoint.*": not_needed("checkpoints are set under run"),
    f"{A}.router_replay.record_file": not_needed(_NOTHING),
    f"{A}.router_replay.replay_file": not_needed(_NOTHING),
    f"{A}.router_replay.mode": unless(["disabled"], "expert routing is not replayed", else_note="off"),
    f"{A}.router_replay.*": not_needed("expert routing is not replayed"),
    f"{A}.profiler.*": not_needed(_PROFILER),
    f"{A}.megatron.*": refused(_MEGATRON),
    f"{A}.mtp.*": not_needed("multi-token prediction is neither trained nor used"),
    **optimizer_rows(f"{A}.optim", "actor.optim", f"{A}.ppo_mini_batch_size", f"{A}.ppo_epochs"),
    **engine_rows(f"{A}.fsdp_config", "actor.engine", is_policy=True),
}

_REFERENCE: dict[str, Rule] = _only_if(
    uses_reference,
    _NO_REFERENCE,
    {
        f"{REF}.model.path": model_path("reference.path"),
        f"{REF}.strategy": unless(["fsdp", "fsdp2"], _MEGATRON, else_note="strop runs it with FSDP2"),
        f"{REF}.log_prob_micro_batch_size": micro_batch(
            "reference.engine.max_tokens_per_device", _REF_DYNAMIC, over_all_devices=True
        ),
        f"{REF}.log_prob_micro_batch_size_per_gpu": micro_batch(
            "reference.engine.max_tokens_per_device", _REF_DYNAMIC
        ),
        f"{REF}.log_prob_use_dynamic_bsz": not_needed("batches are always cut by tokens"),
        f"{REF}.log_prob_max_token_len_per_gpu": token_budget(
            "reference.engine.max_tokens_per_device", _REF_DYNAMIC
        ),
        f"{REF}.ulysses_sequence_parallel_size": to("reference.engine.sequence_parallel", integer),
        f"{REF}.use_torch_compile": not_needed("it compiles the entropy; ours is computed in chunks"),
        f"{REF}.entropy_from_logits_with_chunking": not_needed("always computed in chunks"),
        f"{REF}.entropy_checkpointing": not_needed("a reference has no gradients"),
        f"{REF}.rollout_n": not_needed("follows rollout.n"),
        f"{REF}.model": not_needed("the reference is model.path unless reference.path names another"),
        f"{REF}.router_replay.*": not_needed("expert routing is not replayed"),
        f"{REF}.profiler.*": not_needed(_PROFILER),
        f"{REF}.megatron.*": refused(_MEGATRON),
        **engine_rows(f"{REF}.fsdp_config", "reference.engine"),
    },
)

_CRITIC: dict[str, Rule] = _only_if(
    uses_critic,
    _NO_CRITIC,
    {
        "critic.enable": unless([True], "gae needs a critic", else_note="gae brings a critic along"),
        "critic.strategy": unless(["fsdp", "fsdp2"], _MEGATRON, else_note="strop trains with FSDP2"),
        "critic.model.path": model_path("critic.path"),
        "critic.model.tokenizer_path": not_needed("the critic reads the policy's tokens"),
        "critic.model.enable_gradient_checkpointing": not_needed("follows model.gradient_checkpointing"),
        "critic.model.enable_activation_offload": to("critic.engine.offload_activations"),
        "critic.model.trust_remote_code": to("model.trust_remote_code"),
        "critic.model.use_remove_padding": not_needed("sequences are always packed, never padded"),
        "critic.model.use_shm": not_needed("weights are read once"),
        "critic.model.external_lib": unless([], "no module of yours is imported before the model"),
        "critic.model.override_config": unless(
            [{}], "the model's config.json is taken as it is: change it there"
        ),
        "critic.model.override_config.*": refused(
            "the model's config.json is taken as it is: change it there"
        ),
        "critic.model.lora_rank": to("critic.lora.rank", integer),
        "critic.model.lora_alpha": to("critic.lora.alpha", number),
        "critic.model.target_modules": to("critic.lora.target_modules", one_or_more),
        "critic.model.tiled_mlp.*": not_needed("lower critic.engine.max_tokens_per_device for less memory"),
        "critic.ppo_mini_batch_size": samples_per_update("critic.samples_per_update"),
        "critic.ppo_micro_batch_size": micro_batch(
            "critic.engine.max_tokens_per_device", _CRITIC_DYNAMIC, over_all_devices=True
        ),
        "critic.ppo_micro_batch_size_per_gpu": micro_batch(
            "critic.engine.max_tokens_per_device", _CRITIC_DYNAMIC
        ),
        "critic.forward_micro_batch_size": not_needed(_NOTHING),
        "critic.forward_micro_batch_size_per_gpu": not_needed(_NOTHING),
        "critic.forward_max_token_len_per_gpu": not_needed(_NOTHING),
        "critic.use_dynamic_bsz": not_needed(
            "batches are always cut by tokens: critic.engine.max_tokens_per_device"
        ),
        "critic.ppo_max_token_len_per_gpu": token_budget(
            "critic.engine.max_tokens_per_device", _CRITIC_DYNAMIC
        ),
        "critic.ppo_infer_max_token_len_per_gpu": not_needed(
            "values are computed within the critic's token budget"
        ),
        "critic.ppo_infer_micro_batch_size_per_gpu": not_needed(
            "values are computed within the critic's token budget"
        ),
        "critic.ppo_epochs": to("critic.epochs", integer),
        "critic.shuffle": unless([False], "samples of a step are cut in the order of their prompts"),
        "critic.data_loader_seed": not_needed("samples are cut in a fixed order"),
        "critic.grad_clip": to("critic.optim.max_grad_norm", number),
        "critic.cliprange_value": to("algorithm.cliprange_value", number),
        "critic.loss_agg_mode": lambda key, value, facts: (
            skip("the value loss is aggregated like the policy's")
            if value is None or value == facts.get(f"{A}.loss_agg_mode")
            else refuse("the value loss is aggregated like the policy's: algorithm.loss_agg_mode")
        ),
        "critic.ulysses_sequence_parallel_size": to("critic.engine.sequence_parallel", integer),
        "critic.rollout_n": not_needed("follows rollout.n"),
        "critic.nnodes": unless([0], "a critic of its own processes is resources.apart: {critic: N}"),
        "critic.n_gpus_per_node": unless(
            [0], "a critic of its own processes is resources.apart: {critic: N}"
        ),
        "critic.checkpoint.*": not_needed("checkpoints hold every role"),
        "critic.profiler.*": not_needed(_PROFILER),
        "critic.megatron.*": refused(_MEGATRON),
        **optimizer_rows("critic.optim", "critic.optim", "critic.ppo_mini_batch_size", "critic.ppo_epochs"),
        **engine_rows("critic.model.fsdp_config", "critic.engine"),
        **engine_rows("critic.fsdp", "critic.engine"),
    },
)

_ALGORITHM: dict[str, Rule] = {
    "algorithm.adv_estimator": to("algorithm.adv_estimator", _estimator),
    "algorithm.gamma": to("algorithm.gamma", number),
    "algorithm.lam": to("algorithm.lam", number),
    "algorithm.norm_adv_by_std_in_grpo": to("algorithm.norm_adv_by_std"),
    "algorithm.use_kl_in_reward": to("algorithm.use_kl_in_reward"),
    "algorithm.kl_penalty": to("algorithm.kl_penalty", choice(
        {**{name: name for name in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")}},
        instead="use low_var_kl",
    )),
    "algorithm.kl_ctrl.type": to("algorithm.kl_ctrl.type"),
    "algorithm.kl_ctrl.kl_coef": to("algorithm.kl_ctrl.kl_coef", number),
    "algorithm.kl_ctrl.horizon": to("algorithm.kl_ctrl.horizon", integer),
    "algorithm.kl_ctrl.target_kl": to("algorithm.kl_ctrl.target_kl", number),
    "algorithm.gdpo_reward_keys": to("algorithm.reward_keys", if_set(one_or_more)),
    "algorithm.gdpo_reward_weights": to("algorithm.reward_weights", if_set(one_or_more)),
    "algorithm.use_pf_ppo": unless([False], "samples are not reweighted by preference yet", else_note="off there too"),
    "algorithm.pf_ppo.*": not_needed("read with use_pf_ppo=true alone, which does nothing in verl either"),
    "algorithm.filter_groups.enable": to(
        "algorithm.filter_groups.enable", note="set trainer.max_steps too: epochs do not tell the steps any more"
    ),
    "algorithm.filter_groups.metric": to("algorithm.filter_groups.metric", _filter_metric),
    "algorithm.filter_groups.max_num_gen_batches": not_needed(
        "it does nothing in verl; algorithm.filter_groups.max_rounds bounds the rounds of a step here"
    ),
    **correction_rows("algorithm.rollout_correction", f"{A}.tis_imp_ratio_cap"),
}  # fmt: skip

_TRAINER: dict[str, Rule] = {
    "trainer.total_epochs": to("trainer.num_epochs", integer),
    "trainer.total_training_steps": to("trainer.max_steps", if_set(integer)),
    "trainer.critic_warmup": to("trainer.critic_warmup", _critic_warmup),
    "trainer.logger": to("trainer.trackers", _trackers),
    "trainer.save_freq": to("run.save_every", never_below_zero),
    "trainer.test_freq": to("eval.every", never_below_zero),
    "trainer.val_before_train": to("eval.before_train"),
    "trainer.val_only": unless([False], "for validation alone there is `strop eval`"),
    "trainer.nnodes": to("resources.nodes", integer),
    "trainer.n_gpus_per_node": _ranks,
    "trainer.device": to("resources.device", choice(
        {"cuda": "cuda", "cpu": "cpu", "npu": "npu"}, instead="use cuda, npu or cpu"
    )),
    "trainer.max_actor_ckpt_to_keep": to("run.keep_last", if_set(integer)),
    "trainer.max_critic_ckpt_to_keep": not_needed("a checkpoint holds every role: run.keep_last"),
    "trainer.project_name": not_needed(_NAMED),
    "trainer.experiment_name": not_needed(_NAMED),
    "trainer.default_local_dir": not_needed(_NAMED),
    "trainer.default_hdfs_dir": unless([], "runs are written to a local folder: copy it"),
    "trainer.resume_mode": not_needed("strop train --resume continues a run, and without it nothing is resumed"),
    "trainer.resume_from_path": unless([], "strop train --resume --out RUN continues that run"),
    "trainer.del_local_ckpt_after_load": unless([False], "checkpoints go by run.keep_last"),
    "trainer.log_val_generations": not_needed("validation answers are in the run folder: strop samples RUN"),
    "trainer.rollout_data_dir": not_needed("samples are in the run folder: strop samples RUN"),
    "trainer.validation_data_dir": not_needed("samples are in the run folder: strop samples RUN"),
    "trainer.balance_batch": not_needed("work is always balanced over the ranks"),
    "trainer.esi_redundant_time": not_needed(_NOTHING),
    "trainer.ray_wait_register_center_timeout": not_needed("ours is resources.start_timeout_s"),
    "trainer.use_legacy_worker_impl": not_needed("there is one implementation"),
    "trainer.use_v1": not_needed("there is one implementation"),
    "trainer.v1.*": not_needed("there is one implementation"),
    "trainer.npu_profile.*": not_needed(_PROFILER),
    "trainer.profile_steps": not_needed(_PROFILER),
    "trainer.worker_nsight_options.*": not_needed(_PROFILER),
    "trainer.controller_nsight_options.*": not_needed(_PROFILER),
}  # fmt: skip

_REST: dict[str, Rule] = {
    "$@": not_needed("settings go after the command here too: strop train --config FILE key=value"),
    "--config-path": not_needed("give the YAML file itself: strop migrate verl FILE.yaml SCRIPT"),
    "--config-dir": not_needed("give the YAML file itself: strop migrate verl FILE.yaml SCRIPT"),
    "--config-name": lambda key, value, facts: (
        skip("its defaults are known here")
        if value in ("ppo_trainer", "ppo_trainer.yaml", "sft_trainer", "sft_trainer_engine")
        else _missing_file(str(value))
    ),
    "defaults": not_needed("the defaults of verl are known here; give other files it names as well"),
    "hydra.*": not_needed("strop writes nothing but its run folder"),
    "hydra": not_needed("strop writes nothing but its run folder"),
    "ray_init.*": not_needed("ours are resources.address and resources.cpus_per_rank"),
    "ray_kwargs.*": not_needed("ours are resources.address and resources.cpus_per_rank"),
    "global_profiler.*": not_needed(_PROFILER),
    "transfer_queue.*": not_needed("columns go from worker to worker"),
    "distillation.enabled": unless([False], "distillation is not there yet", else_note="off"),
    "distillation.*": not_needed("read with distillation.enabled=true alone"),
    "async_training.*": refused("asynchronous training is not there yet"),
    "torchrun.*": not_needed("trainer.n_gpus_per_node and trainer.nnodes say it"),
    "model_engine": not_needed("there is one engine"),
}

TABLE: dict[str, Rule] = {
    **_DATA, **_MODEL, **_ACTOR, **loss_rows(A), **_REFERENCE, **rollout_rows(R), **_CRITIC, **reward_rows(longest),
    **_ALGORITHM, **_TRAINER, **_REST,
}  # fmt: skip
"""verl's keys and what becomes of each."""
