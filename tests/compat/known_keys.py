"""Names of settings of other libraries, as their own configuration references list them.

verl: `verl/trainer/config` of the versions of mid-2025 and of 2026, `_generated_ppo_trainer.yaml` and what it is made
of, `sft_trainer.yaml` and `sft_trainer_engine.yaml`. TRL: GRPOConfig, RLOOConfig, SFTConfig and PPOConfig of 2026,
DPOConfig, KTOConfig and RewardConfig of 2025 (0.24) and 2026 (1.16), with the arguments of transformers'
TrainingArguments.
"""

from __future__ import annotations

from collections.abc import Iterator

_OPTIM = (
    "optimizer optimizer_impl lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps betas "
    "clip_grad "
    "min_lr_ratio num_cycles lr_scheduler_type lr_wsd_stable_steps_ratio zero_indexed_step warmup_style "
    "override_optimizer_config"
)
_MEGATRON_OPTIM = (
    "lr_warmup_init lr_decay_steps lr_decay_style min_lr weight_decay_incr_style lr_wsd_decay_style"
)
_FSDP = (
    "wrap_policy.min_num_params param_offload optimizer_offload offload_policy reshard_after_forward fsdp_size "
    "forward_prefetch model_dtype use_orig_params seed full_determinism ulysses_sequence_parallel_size "
    "entropy_from_logits_with_chunking entropy_from_logits_chunk_size use_torch_compile entropy_checkpointing "
    "use_no_sync_for_gradient_accumulation pad_to_length pad_to_length_bucket forward_only strategy dtype qat.enable "
    "qat.mode qat.group_size qat.ignore_patterns qat.activation_observer qat.quantization_config_path "
    "turbo_config.distributed.fully_shard_parallel_size _target_"
)
_PROFILER = (
    "profiler.tool profiler.enable profiler.all_ranks profiler.ranks profiler.save_path profiler.relocate_results "
    "profiler.finish_hook_cmd profiler.tool_config.nsys.discrete profiler.tool_config.torch.schedule.active"
)
_CHECKPOINT = "checkpoint.save_contents checkpoint.load_contents checkpoint.async_save checkpoint.contents"
_MODEL = (
    "path hf_config_path tokenizer_path use_shm trust_remote_code custom_chat_template external_lib override_config "
    "enable_gradient_checkpointing enable_activation_offload use_remove_padding truncate_padding lora_rank lora_alpha "
    "target_modules exclude_modules lora_adapter_path use_liger use_fused_kernels fused_kernel_options.impl_backend "
    "tiled_mlp.enabled tiled_mlp.num_shards mtp.enable mtp.enable_train mtp.enable_rollout mtp.detach_encoder "
    "mtp.mtp_loss_scaling_factor mtp.speculative_algorithm mtp.method lora.type lora.merge lora.rank lora.alpha "
    "lora.dropout lora.target_modules lora.exclude_modules lora.dropout_position lora.lora_A_init_method "
    "lora.lora_B_init_method lora.a2a_experimental lora.dtype lora.adapter_path lora.freeze_vision_model "
    "lora.freeze_vision_projection lora.freeze_language_model _target_"
)
_ENTROPY = (
    "entropy_from_logits_with_chunking entropy_from_logits_chunk_size entropy_checkpointing pad_to_length"
)
_REWARD_MODEL_ROLLOUT = (
    "name dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine data_parallel_size "
    "expert_parallel_size tensor_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs load_format "
    "engine_kwargs limit_images enable_chunked_prefill enable_prefix_caching disable_log_stats skip_tokenizer_init "
    "prompt_length response_length"
)
_A, _R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

VERL: dict[str, str] = {
    "data": (
        "tokenizer use_shm cache_dir need_tools_kwargs train_files val_files train_max_samples val_max_samples "
        "prompt_key reward_fn_key "
        "max_prompt_length max_response_length train_batch_size gen_batch_size val_batch_size tool_config_path "
        "function_tool_path return_raw_input_ids return_raw_chat return_full_prompt shuffle seed "
        "dataloader_num_workers image_patch_size validation_shuffle filter_overlong_prompts "
        "filter_overlong_prompts_workers truncation image_key video_key audio_key trust_remote_code custom_cls.path "
        "custom_cls.name return_multi_modal_inputs apply_chat_template_kwargs mm_processor_kwargs sampler.class_path "
        "sampler.class_name sampler.group_key sampler.group_names sampler.group_ratios datagen.path datagen.name "
        "filter_accuracy accuracy_lower_bound accuracy_upper_bound oversample_factor filter_truncate"
    ),
    "actor_rollout_ref": "hybrid_engine nccl_timeout",
    "actor_rollout_ref.model": f"{_MODEL} return_last_hidden_state use_fused_loss",
    _A: (
        "strategy ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu use_dynamic_bsz "
        "ppo_max_token_len_per_gpu clip_ratio clip_ratio_low clip_ratio_high tau_pos tau_neg freeze_vision_tower "
        "policy_loss.loss_mode policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub "
        "use_invalid_action_penalty invalid_action_penalty_coef "
        "policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef policy_loss.dro_beta policy_loss._target_ clip_ratio_c "
        "loss_agg_mode use_token_level_loss loss_scale_factor entropy_coeff calculate_entropy "
        "calculate_sum_pi_squared use_kl_loss "
        "use_prefix_grouper use_torch_compile kl_loss_coef kl_loss_type ppo_epochs shuffle data_loader_seed rollout_n "
        f"checkpoint.strict use_fused_kernels use_remove_padding grad_clip ulysses_sequence_parallel_size {_ENTROPY} "
        "router_replay.mode router_replay.record_file router_replay.replay_file qat.enable qat.mode qat.group_size "
        f"megatron.tensor_model_parallel_size megatron.context_parallel_size _target_ {_CHECKPOINT} {_PROFILER}"
    ),
    f"{_A}.optim": f"{_OPTIM} {_MEGATRON_OPTIM} _target_",
    f"{_A}.fsdp_config": _FSDP,
    "actor_rollout_ref.ref": (
        "rollout_n strategy use_torch_compile log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu router_replay.mode router_replay.record_file model "
        f"ulysses_sequence_parallel_size _target_ {_ENTROPY} {_PROFILER}"
    ),
    "actor_rollout_ref.ref.fsdp_config": _FSDP,
    _R: (
        "name mode nnodes n_gpus_per_node temperature top_k top_p full_determinism seed prompt_length response_length "
        "dtype gpu_memory_utilization ignore_eos enforce_eager cudagraph_capture_sizes free_cache_engine "
        "tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size "
        "max_num_batched_tokens max_model_len max_num_seqs enable_chunked_prefill enable_prefix_caching logprobs_mode "
        "scheduling_policy load_format layered_summon log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu disable_log_stats do_sample n over_sample_rate "
        "multi_stage_wake_up engine_kwargs.vllm engine_kwargs.sglang engine_kwargs.trtllm engine_kwargs.swap_space "
        "val_kwargs.top_k val_kwargs.top_p val_kwargs.temperature val_kwargs.n val_kwargs.do_sample multi_turn.enable "
        "multi_turn.max_assistant_turns multi_turn.tool_config_path multi_turn.function_tool_path "
        "multi_turn.interaction_config_path multi_turn.max_user_turns multi_turn.max_turns "
        "multi_turn.max_parallel_calls multi_turn.max_tool_response_length multi_turn.tool_response_truncate_side "
        "multi_turn.use_inference_chat_template multi_turn.tokenization_sanity_check_mode multi_turn.format "
        "multi_turn.num_repeat_rollouts calculate_log_probs agent.num_workers agent.default_agent_loop "
        "agent.agent_loop_config_path agent.custom_async_server.path agent.custom_async_server.name "
        "checkpoint_engine.backend checkpoint_engine.update_weights_bucket_megabytes checkpoint_engine.engine_kwargs "
        "checkpoint_engine.custom_backend_module update_weights_bucket_megabytes trace.project_name "
        "trace.experiment_name trace.backend trace.token2text trace.max_samples_per_step_per_worker skip.enable "
        "skip.dump_dir skip.max_dump_step skip.action skip_rollout skip_dump_dir skip_tokenizer_init "
        "use_preprocessed_multimodal_input enable_rollout_routing_replay moe_load_balance_metrics_interval "
        "prometheus.enable prometheus.port prometheus.file prometheus.served_model_name quantization "
        "quantization_config_file mtp qat disaggregation.enabled disaggregation.prefill_replicas "
        f"disaggregation.transfer_backend chat_scheduler use_fire_sampling _target_ {_PROFILER}"
    ),
    "critic": (
        "rollout_n strategy enable ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
        "use_dynamic_bsz ppo_max_token_len_per_gpu forward_max_token_len_per_gpu ppo_epochs shuffle data_loader_seed "
        "cliprange_value loss_agg_mode loss_scale_factor forward_micro_batch_size forward_micro_batch_size_per_gpu "
        f"ulysses_sequence_parallel_size grad_clip _target_ {_CHECKPOINT} {_PROFILER}"
    ),
    "critic.optim": f"{_OPTIM} _target_",
    "critic.model": _MODEL,
    "critic.fsdp": _FSDP,
    "critic.model.fsdp_config": _FSDP,
    "custom_reward_function": "path name overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor",
    "reward_model": (
        "enable strategy model.input_tokenizer model.path model.external_lib model.trust_remote_code model.use_shm "
        "model.use_remove_padding model.use_fused_kernels model.fsdp_config.param_offload micro_batch_size "
        "micro_batch_size_per_gpu max_length use_dynamic_bsz forward_max_token_len_per_gpu reward_manager "
        "launch_reward_fn_async sandbox_fusion.url sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb "
        "ulysses_sequence_parallel_size num_workers enable_resource_pool n_gpus_per_node nnodes reward_loop_source "
        "reward_loop_module_path reward_loop_class_name overlong_buffer.enable overlong_buffer.len "
        "model.update model.beta_train model.loss_type model.ref_type model.ref_path mini_batch_size prime_granularity "
        f"prime_norm param_offload overlong_buffer.penalty_factor overlong_buffer.log {_PROFILER}"
    ),
    "reward_model.rollout": _REWARD_MODEL_ROLLOUT,
    "sandbox_fusion": "url max_concurrent memory_limit_mb",
    "reward": (
        "num_workers custom_reward_function.path custom_reward_function.name compute_score_kwargs "
        "reward_manager.source reward_manager.name reward_manager.module.path reward_manager.module.name "
        "reward_model.enable reward_model.enable_resource_pool reward_model.n_gpus_per_node reward_model.nnodes "
        "reward_model.model_path sandbox_fusion.url sandbox_fusion.max_concurrent sandbox_fusion.memory_limit_mb "
        "reward_kwargs.overlong_buffer_cfg.enable reward_kwargs.overlong_buffer_cfg.len "
        "reward_kwargs.overlong_buffer_cfg.penalty_factor reward_kwargs.overlong_buffer_cfg.log "
        "reward_kwargs.max_resp_len _target_"
    ),
    "reward.reward_model.rollout": f"{_REWARD_MODEL_ROLLOUT} temperature top_k top_p n do_sample ignore_eos",
    "algorithm": (
        "gamma lam adv_estimator norm_adv_by_std_in_grpo filter_groups.enable filter_groups.metric "
        "filter_groups.max_num_gen_batches filter_groups.max_inflight_gen_batches use_kl_in_reward kl_penalty "
        "kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl use_pf_ppo pf_ppo.reweight_method "
        "pf_ppo.weight_pow gdpo_reward_keys gdpo_reward_weights reward_dpo_coef reward_gt_coef _target_ "
        "rollout_is rollout_is_threshold rollout_is_threshold_lower rollout_is_level rollout_is_mode "
        "rollout_is_veto_threshold"
    ),
    "algorithm.rollout_correction": (
        "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold bypass_mode loss_type "
        "rollout_is_batch_normalize debug_rollout_actor_probs"
    ),
    "distillation": (
        "enabled distillation_loss.loss_mode distillation_loss.topk distillation_loss.use_task_rewards "
        "n_gpus_per_node nnodes teacher_models.teacher_model.model_path teacher_key"
    ),
    "env": "env_name seed max_steps history_length rollout.n resources_per_worker.num_cpus",
    "algorithm.gigpo": "step_advantage_w mode enable_similarity similarity_thresh",
    "reward_model.model.optim": "lr lr_warmup_steps_ratio min_lr_ratio warmup_style weight_decay grad_clip betas",
    "transfer_queue": "enable metrics.enabled backend.storage_backend backend.SimpleStorage.total_storage_size",
    "trainer": (
        "balance_batch balance_keep_minibatch total_epochs total_training_steps project_name experiment_name logger "
        "log_val_generations rollout_data_dir validation_data_dir nnodes n_gpus_per_node save_freq esi_redundant_time "
        "resume_mode resume_from_path checkpoint_callback_class val_before_train val_only test_freq critic_warmup "
        "default_hdfs_dir del_local_ckpt_after_load default_local_dir max_actor_ckpt_to_keep max_critic_ckpt_to_keep "
        "val_on_last_step ray_wait_register_center_timeout device use_legacy_worker_impl use_v1 "
        "v1.trainer_mode v1.sync "
        "v1.colocate_async.num_warmup_batches v1.separate_async.num_warmup_batches "
        "v1.separate_async.parameter_sync_step v1.separate_async.hybrid_rollout.enable_switch "
        "v1.sampler.max_off_policy_threshold v1.sampler.max_off_policy_strategy v1.sampler.sync_refill_failed_groups "
        "v1.sampler.custom_sampler.path v1.sampler.custom_sampler.name v1.sampler.sampler_kwargs"
    ),
    "global_profiler": "tool steps profile_continuous_steps save_path global_tool_config.nsys.discrete _target_",
    "skip": "rollout.enable rollout.dump_dir rollout.steps rollout.action rollout_tq.enable async_rollout.enable",
    "ray_kwargs": (
        "ray_init.num_cpus ray_init.address ray_init.runtime_env.py_executable ray_init.runtime_env.env_vars "
        "timeline_json_file"
    ),
    "ray_init": "num_cpus address runtime_env.env_vars",
}
"""Keys of `main_ppo`, by section."""

VERL_SFT: dict[str, str] = {
    "data": (
        "train_batch_size micro_batch_size micro_batch_size_per_gpu max_token_len_per_gpu use_dynamic_bsz train_files "
        "val_files train_max_samples val_max_samples prompt_key response_key prompt_dict_keys response_dict_keys "
        "multiturn.enable multiturn.messages_key messages_key tools_key enable_thinking_key enable_thinking_default "
        "pad_mode max_length truncation balance_dp_token chat_template custom_cls.path custom_cls.name use_shm "
        "apply_chat_template_kwargs num_workers ignore_input_ids_mismatch"
    ),
    "model": f"{_MODEL} partial_pretrain fsdp_config.model_dtype fsdp_config.wrap_policy.min_num_params "
    "fsdp_config.cpu_offload fsdp_config.offload_params",
    "optim": f"{_OPTIM} warmup_steps_ratio lr_scheduler",
    "engine": _FSDP,
    "checkpoint": "save_contents load_contents _target_",
    "trainer": (
        "default_local_dir default_hdfs_dir resume_path project_name experiment_name total_epochs total_training_steps "
        "logger seed save_freq test_freq max_ckpt_to_keep balance_batch resume_mode resume_from_path device nnodes "
        "n_gpus_per_node profile_interval"
    ),
    "profiler": "tool enable",
}
"""Keys of the two fine-tuning trainers, by section."""

_TRAINING_ARGUMENTS = (
    "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type "
    "lr_scheduler_kwargs warmup_steps warmup_ratio optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "optim_target_modules gradient_accumulation_steps average_tokens_across_devices max_grad_norm "
    "label_smoothing_factor bf16 fp16 bf16_full_eval fp16_full_eval tf32 activation_checkpointing "
    "activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs torch_compile "
    "torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha "
    "torch_empty_cache_steps auto_find_batch_size logging_strategy logging_steps logging_first_step log_on_each_node "
    "logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name "
    "project trackio_space_id trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay "
    "per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object "
    "eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_strategy save_steps "
    "save_on_each_node save_total_limit enable_jit_checkpoint push_to_hub hub_token hub_private_repo hub_model_id "
    "hub_strategy hub_always_push hub_revision load_best_model_at_end metric_for_best_model greater_is_better "
    "ignore_data_skip restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu "
    "accelerator_config parallelism_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
    "dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
    "remove_unused_columns label_names train_sampling_strategy length_column_name ddp_find_unused_parameters "
    "ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed debug "
    "skip_memory_metrics do_train do_eval do_predict resume_from_checkpoint local_rank"
)
_GENERATING = (
    "model_init_kwargs disable_dropout num_generations num_generations_eval max_completion_length "
    "max_prompt_length ds3_gather_for_generation shuffle_dataset generation_batch_size "
    "steps_per_generation temperature "
    "top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty use_transformers_paged "
    "cache_implementation use_vllm vllm_mode vllm_model_impl vllm_structured_outputs_regex vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
    "vllm_max_model_length vllm_tensor_parallel_size vllm_enable_sleep_mode beta num_iterations epsilon epsilon_high "
    "reward_weights mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps "
    "log_completions num_completions_to_print log_unique_prompts"
)
_COMPARED = (
    "model_init_kwargs ref_model_init_kwargs disable_dropout dataset_num_proc max_length max_prompt_length "
    "max_completion_length truncation_mode precompute_ref_log_probs precompute_ref_batch_size loss_type beta "
    "use_liger_loss base_model_attribute_name label_pad_token_id padding_value pad_token pad_to_multiple_of "
    "generate_during_eval is_encoder_decoder sync_ref_model ref_model_mixup_alpha ref_model_sync_steps "
    "activation_offloading router_aux_loss_coef"
)
TRL: dict[str, str] = {
    "GRPOConfig": (
        f"{_TRAINING_ARGUMENTS} {_GENERATING} cast_lm_head_to_fp32 delta sapo_temperature_neg sapo_temperature_pos "
        "importance_sampling_level multi_objective_aggregation scale_rewards loss_type top_entropy_quantile "
        "max_tool_calling_iterations vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "vllm_importance_sampling_cap off_policy_mask_threshold use_bias_correction_kl log_completions_hub_repo"
    ),
    "RLOOConfig": f"{_TRAINING_ARGUMENTS} {_GENERATING} normalize_advantages reward_clip_range",
    "PPOConfig": (
        f"{_TRAINING_ARGUMENTS} dataset_num_proc num_mini_batches total_episodes local_rollout_forward_batch_size "
        "num_sample_generations response_length stop_token stop_token_id temperature missing_eos_penalty "
        "sft_model_path world_size num_total_batches micro_batch_size local_batch_size batch_size "
        "local_mini_batch_size mini_batch_size exp_name reward_model_path model_adapter_name ref_adapter_name "
        "num_ppo_epochs whiten_rewards kl_coef kl_estimator cliprange vf_coef cliprange_value gamma lam "
        "ds3_gather_for_generation"
    ),
    "SFTConfig": (
        f"{_TRAINING_ARGUMENTS} model_init_kwargs chat_template_path dataset_text_field dataset_kwargs "
        "dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy padding_free "
        "pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss loss_type activation_offloading "
        "pad_token"
    ),
    "DPOConfig": (
        f"{_TRAINING_ARGUMENTS} {_COMPARED} label_smoothing rpo_alpha loss_weights ld_alpha reference_free "
        "f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau padding_free tools "
        "model_adapter_name ref_adapter_name force_use_ref_model use_logits_to_keep max_target_length"
    ),
    "KTOConfig": f"{_TRAINING_ARGUMENTS} {_COMPARED} desirable_weight undesirable_weight",
    "RewardConfig": (
        f"{_TRAINING_ARGUMENTS} model_init_kwargs chat_template_path disable_dropout dataset_num_proc eos_token "
        "pad_token max_length pad_to_multiple_of center_rewards_coefficient activation_offloading router_aux_loss_coef"
    ),
}
"""Keyword arguments by configuration."""


_OPENRLHF_BOTH = (
    "save_path save_steps logging_steps eval_steps ckpt_path max_ckpt_num max_ckpt_mem load_checkpoint save_hf_ckpt "
    "disable_ds_ckpt use_ds_universal_ckpt train_batch_size micro_train_batch_size max_norm gradient_checkpointing "
    "seed local_rank zero_stage bf16 param_dtype zpg adam_offload flash_attn attn_implementation use_liger_kernel "
    "grad_accum_dtype overlap_comm gradient_checkpointing_use_reentrant disable_fast_tokenizer deepcompile "
    "disable_trace_cache ds_tensor_parallel_size max_epochs aux_loss_coef pretrain lr_warmup_ratio lr_scheduler l2 "
    "adam_betas load_in_4bit lora_rank lora_alpha target_modules lora_dropout packing_samples ring_attn_size "
    "ring_head_stride eval_dataset eval_split input_key input_template apply_chat_template max_samples max_len "
    "use_wandb wandb_org wandb_group wandb_project wandb_run_name use_tensorboard use_ms"
)
_OPENRLHF_COMPARED = (
    f"{_OPENRLHF_BOTH.replace('input_key ', '')} learning_rate dataset dataset_probs dataset_split"
)
OPENRLHF: dict[str, str] = {
    "train": f"{_OPENRLHF_BOTH} "
    "ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node colocate_actor_ref actor_num_nodes "
    "actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node colocate_critic_reward colocate_all_models "
    "vllm_num_engines vllm_tensor_parallel_size vllm_sync_backend vllm_sync_with_ray enable_prefix_caching "
    "enforce_eager vllm_enable_sleep vllm_gpu_memory_utilization enable_vllm_is_correction vllm_is_truncated_threshold "
    "vllm_is_correction_type async_train async_queue_size enable_ema ema_beta actor_init_on_gpu deepspeed_enable_sleep "
    "fsdp2_enable_sleep use_dynamic_batch rollout_max_tokens_per_gpu train_max_tokens_per_gpu num_episodes "
    "rollout_batch_size vllm_generate_batch_size rollout_tasks_per_gpu micro_rollout_batch_size prompt_max_len "
    "generate_max_len ptx_coef eps_clip eps_clip_low_high dual_clip value_clip lambd gamma normalize_reward top_p "
    "temperature full_determinism freezing_actor_steps n_samples_per_prompt save_value_network actor_learning_rate "
    "critic_learning_rate kl_target kl_horizon init_kl_coef policy_loss_type kl_estimator entropy_loss_coef "
    "reward_clip_range advantage_estimator use_kl_loss no_advantage_std_norm overlong_buffer_len "
    "overlong_penalty_factor reward_pretrain remote_rm_url critic_pretrain value_head_prefix ref_reward_offload "
    "agent_func_path prompt_data prompt_data_probs prompt_split eval_temperature eval_n_samples_per_prompt label_key "
    "dynamic_filtering dynamic_filtering_reward_range perf",
    "sft": f"{_OPENRLHF_BOTH} learning_rate pretrain_mode dataset dataset_probs train_split output_key "
    "tokenizer_chat_template multiturn",
    "dpo": f"{_OPENRLHF_COMPARED} prompt_key chosen_key rejected_key beta ipo label_smoothing nll_loss_coef "
    "ref_pretrain ref_offload",
    "rm": f"{_OPENRLHF_COMPARED} prompt_key chosen_key rejected_key loss margin_loss compute_fp32_loss "
    "value_head_prefix tokenizer_chat_template",
    "kto": f"{_OPENRLHF_COMPARED} input_key output_key label_key beta desirable_loss_weight "
    "undesirable_loss_weight ref_offload",
}
"""Flags of train_ppo_ray, train_sft, train_dpo, train_rm and train_kto without dots, as their parsers list them."""
_DOTTED = (
    "ckpt.output_dir ckpt.save_steps ckpt.save_hf ckpt.disable_ds logger.logging_steps eval.steps ckpt.path "
    "ckpt.max_num ckpt.max_mem ckpt.load_enable ds.use_universal_ckpt train.micro_batch_size train.batch_size "
    "ds.deepcompile train.seed train.full_determinism_enable local_rank ds.zero_stage ds.param_dtype ds.zpg "
    "ds.adam_offload ds.attn_implementation ds.experts_implementation ds.grad_accum_dtype ds.overlap_comm "
    "data.disable_fast_tokenizer data.dataloader_num_workers ds.tensor_parallel_size train.max_epochs "
    "ds.ring_attn_size ds.ring_attn_head_stride ds.load_in_4bit ds.lora.rank ds.lora.alpha ds.lora.target_modules "
    "ds.lora.dropout ds.packing_samples eval.dataset eval.split data.max_samples data.input_template "
    "data.apply_chat_template data.max_len logger.wandb.key logger.wandb.org logger.wandb.group "
    "logger.wandb.project logger.wandb.run_name logger.tensorboard_dir use_ms "
)
_DOTTED_SUPERVISED = (
    "model.gradient_checkpointing_enable model.gradient_checkpointing_reentrant model.aux_loss_coef "
    "model.model_name_or_path optim muon.lr muon.momentum muon.ns_steps muon.nesterov muon.no_nesterov adam.lr "
    "adam.betas adam.eps adam.weight_decay lr_scheduler lr_warmup_ratio min_lr_ratio max_norm data.dataset "
    "data.dataset_probs data.dataset_split data.tokenizer_chat_template "
)
OPENRLHF_DOTTED: dict[str, str] = {
    "train_ppo_ray": _DOTTED
    + (
        "ref.num_nodes ref.num_gpus_per_node reward.num_nodes reward.num_gpus_per_node train.colocate_actor_ref "
        "actor.num_nodes actor.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node "
        "train.colocate_critic_reward train.colocate_all vllm.num_engines vllm.tensor_parallel_size vllm.sync_backend "
        "vllm.sync_with_ray vllm.enable_prefix_caching vllm.enforce_eager vllm.enable_sleep "
        "vllm.gpu_memory_utilization algo.advantage.is_correction_level algo.advantage.is_correction_mode "
        "algo.advantage.is_correction_gating algo.advantage.is_correction_threshold train.async_enable "
        "train.async_queue_size train.partial_rollout_enable ckpt.best_metric_key actor.gradient_checkpointing_enable "
        "train.enable_ema train.ema_beta ds.use_liger_kernel actor.gradient_checkpointing_reentrant ds.enable_sleep "
        "train.dynamic_batch_enable rollout.max_tokens_per_gpu train.max_tokens_per_gpu train.num_episodes "
        "rollout.batch_size rollout.vllm_generate_batch_size rollout.micro_batch_size rollout.max_new_tokens "
        "actor.eps_clip actor.eps_clip_low_high actor.dual_clip critic.value_clip algo.advantage.lambd "
        "algo.advantage.gamma reward.normalize_enable rollout.top_p rollout.temperature critic.freezing_steps "
        "rollout.n_samples_per_prompt critic.save_value_network algo.kl.target algo.kl.horizon algo.kl.init_coef "
        "actor.policy_loss_type actor.loss_agg_mode algo.kl.estimator algo.kl.unbiased_gradient actor.aux_loss_coef "
        "actor.entropy_coef reward.clip_range algo.advantage.estimator algo.kl.use_loss algo.advantage.no_std_norm "
        "reward.overlong_buffer_len reward.overlong_penalty_factor reward.stop_properly_penalty_coef "
        "actor.model_name_or_path reward.model_name_or_path reward.remote_url critic.model_name_or_path "
        "ds.value_head_prefix ref.offload reward.offload train.agent_func_path data.prompt_dataset data.prompt_probs "
        "data.prompt_split eval.temperature eval.n_samples_per_prompt data.input_key data.label_key "
        "algo.dynamic_filtering_enable algo.dynamic_filtering_range data.image_key data.max_images_per_prompt "
        "actor.freeze_visual_encoder actor.optim critic.optim actor.muon.lr critic.muon.lr actor.muon.momentum "
        "critic.muon.momentum actor.muon.ns_steps critic.muon.ns_steps actor.muon.nesterov critic.muon.nesterov "
        "actor.muon.no_nesterov critic.muon.no_nesterov actor.adam.lr critic.adam.lr actor.adam.betas "
        "critic.adam.betas actor.adam.eps critic.adam.eps actor.adam.weight_decay critic.adam.weight_decay "
        "actor.lr_scheduler critic.lr_scheduler actor.lr_warmup_ratio critic.lr_warmup_ratio actor.min_lr_ratio "
        "critic.min_lr_ratio actor.max_norm critic.max_norm "
    ),
    "train_sft": _DOTTED
    + _DOTTED_SUPERVISED
    + ("ds.use_liger_kernel model.pretrain_mode_enable data.multiturn data.input_key data.output_key "),
    "train_dpo": _DOTTED
    + _DOTTED_SUPERVISED
    + (
        "ref.offload ds.use_liger_kernel model.beta model.ipo_enable model.label_smoothing model.nll_loss_coef "
        "ref.model_name_or_path data.prompt_key data.chosen_key data.rejected_key "
    ),
    "train_rm": _DOTTED
    + _DOTTED_SUPERVISED
    + (
        "ds.value_head_prefix model.compute_fp32_loss_enable model.margin_loss_enable model.loss_type data.prompt_key "
        "data.chosen_key data.rejected_key "
    ),
}
"""Flags of today's programs, with dots (0.11)."""


def names(sections: dict[str, str]) -> Iterator[str]:
    """The full key of every name."""
    for section, text in sections.items():
        for name in text.split():
            yield f"{section}.{name}"
