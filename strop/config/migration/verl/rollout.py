"""The section `actor_rollout_ref.rollout`: sampling, the engine behind it, tools and agents."""

from __future__ import annotations

from typing import Any

from strop.config.migration.outcomes import Facts
from strop.config.migration.rules import NotNeeded, To, Unless
from strop.config.migration.tables import Entry, only_if, same, under
from strop.config.migration.values import choice, if_set, integer, number
from strop.config.migration.verl.facts import R

_ENGINE = NotNeeded(
    "strop samples with its own engine, with the trainer's own weights; vLLM and SGLang are not connected yet"
)
_LOG_PROBS = NotNeeded("log-probs are computed within actor.engine.max_tokens_per_device")
_NOTHING = NotNeeded("does nothing in verl either")
_OWN_WEIGHTS = Unless((), "the rollout uses the trainer's own weights: leave it out", "off there too")
_NO_REPLAY = Unless((False,), "rollouts are never replayed from files: leave it out", "off there too")


def _has_agents(facts: Facts) -> bool:
    keys = ("multi_turn.tool_config_path", "multi_turn.function_tool_path", "agent.agent_loop_config_path")
    return any(facts.get(f"{R}.{key}") for key in keys)


def _with_agents(*entries: Entry) -> tuple[Entry, ...]:
    return only_if(_has_agents, "read with tools or agent loops alone", entries)


def _off_at_zero(value: Any, facts: Facts) -> int:
    return max(0, integer(value, facts))


ENTRIES = under(
    R,
    Entry("name", _ENGINE),
    Entry("n", To("rollout.samples_per_prompt", integer)),
    Entry("temperature", To("rollout.temperature", number)),
    Entry("top_p", To("rollout.top_p", number)),
    Entry("top_k", To("rollout.top_k", _off_at_zero, note="0: off")),
    Entry("max_num_seqs", To("rollout.max_running", integer)),
    Entry("prompt_length", NotNeeded("data.max_prompt_tokens says it")),
    Entry("response_length", NotNeeded("data.max_response_tokens says it")),
    Entry("ignore_eos", Unless((False,), "a response ends at its end-of-sequence token", "off there too")),
    Entry("calculate_log_probs", NotNeeded("log-probs of sampled tokens are always recorded")),
    *same(
        NotNeeded("samples follow from trainer.seed alone, in any order of arrival"), "seed full_determinism"
    ),
    Entry("val_kwargs.n", To("eval.samples_per_prompt", integer)),
    Entry("val_kwargs.temperature", To("eval.temperature", number)),
    Entry("val_kwargs.top_p", To("eval.top_p", number)),
    Entry("val_kwargs.top_k", To("eval.top_k", _off_at_zero, note="0: off")),
    *same(
        _NOTHING,
        "do_sample repetition_penalty over_sample_rate multi_stage_wake_up val_kwargs.do_sample multi_turn.enable "
        "multi_turn.enable_tokenization_sanity_check multi_turn.use_inference_chat_template "
        "multi_turn.tokenization_sanity_check_mode multi_turn.num_repeat_rollouts",
    ),
    Entry(
        "multi_turn",
        Unless(({},), "name its keys one by one, as multi_turn.tool_config_path", "empty there too"),
    ),
    Entry("multi_turn.tool_config_path", To("agent.tools", if_set())),
    Entry("multi_turn.function_tool_path", To("agent.function_tools", if_set())),
    Entry(
        "multi_turn.interaction_config_path",
        Unless(
            (),
            "users that answer are played by an agent of their own: set agent.interactions to the file and "
            "agent.default_agent=interaction_agent, and derive its classes from strop.agents.interactions",
            "not set",
        ),
    ),
    Entry(
        "multi_turn.completion_callback",
        Unless((), "a partner that answers is an agent of your own here: agent.files", "not set"),
    ),
    *_with_agents(
        Entry("multi_turn.max_assistant_turns", To("agent.max_assistant_turns", if_set(integer))),
        Entry("multi_turn.max_user_turns", To("agent.max_user_turns", if_set(integer))),
        Entry("multi_turn.max_turns", To("agent.max_assistant_turns", if_set(integer))),
        Entry("multi_turn.max_parallel_calls", To("agent.max_parallel_calls", integer)),
        Entry(
            "multi_turn.max_tool_response_length",
            To("agent.max_tool_response_tokens", integer, note="characters in verl, tokens here"),
        ),
        Entry(
            "multi_turn.tool_response_truncate_side",
            To(
                "agent.tool_response_truncation",
                choice(
                    {side: side for side in ("left", "right", "middle")}, instead="use left, right or middle"
                ),
            ),
        ),
        Entry("multi_turn.format", To("agent.tool_format")),
    ),
    Entry("agent.default_agent_loop", To("agent.default_agent", if_set())),
    Entry("agent.agent_loop_config_path", To("agent.loops", if_set())),
    Entry("agent.num_workers", NotNeeded("episodes share the rollout's processes")),
    *same(
        Unless((), "the engine is strop's own: answers of another server cannot be sampled", "not set"),
        "agent.custom_async_server.path agent.custom_async_server.name chat_scheduler",
    ),
    Entry("agent.*", NotNeeded("belongs to verl's agent server")),
    *same(_OWN_WEIGHTS, "quantization quantization_config_file"),
    Entry("qat", NotNeeded("weights are not quantized in training")),
    Entry("qat.*", NotNeeded("weights are not quantized in training")),
    *same(_NO_REPLAY, "skip.enable skip_rollout"),
    *same(
        NotNeeded("read where rollouts are replayed from files"), "skip.* skip_dump_dir skip_use_default_dir"
    ),
    Entry(
        "enable_rollout_routing_replay", Unless((False,), "expert routing is not replayed", "off there too")
    ),
    Entry(
        "use_fire_sampling", Unless((False,), "every token is sampled at one temperature", "off there too")
    ),
    Entry(
        "disaggregation.enabled", Unless((False,), "prompts and answers run in one engine", "off there too")
    ),
    *same(NotNeeded("read with disaggregation.enabled=true alone"), "disaggregation.*"),
    *same(NotNeeded("multi-token prediction is neither trained nor used"), "mtp mtp.*"),
    Entry("trace.*", NotNeeded("every sample is in the run folder: strop samples RUN")),
    Entry("checkpoint_engine.*", NotNeeded("weights go to the rollout in one verified exchange")),
    Entry("profiler.*", NotNeeded("profiling is set up outside strop")),
    Entry("prometheus.*", NotNeeded("metrics go to trainer.trackers")),
    Entry("moe_load_balance_metrics_interval", NotNeeded("the load of experts is not measured")),
    *same(
        _LOG_PROBS,
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz "
        "log_prob_max_token_len_per_gpu",
    ),
    *same(
        _ENGINE,
        "mode dtype gpu_memory_utilization enforce_eager cudagraph_capture_sizes free_cache_engine "
        "tensor_model_parallel_size data_parallel_size expert_parallel_size pipeline_model_parallel_size "
        "max_num_batched_tokens max_model_len enable_chunked_prefill enable_prefix_caching logprobs_mode "
        "scheduling_policy load_format disable_log_stats layered_summon update_weights_bucket_megabytes nnodes "
        "n_gpus_per_node micro_batch_size enable_sleep_mode skip_tokenizer_init limit_images "
        "use_preprocessed_multimodal_input engine_kwargs engine_kwargs.* router router.*",
    ),
)
"""What becomes of the keys of `actor_rollout_ref.rollout`."""
