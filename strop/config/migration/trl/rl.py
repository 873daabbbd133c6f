"""Arguments of GRPOConfig and RLOOConfig."""

from __future__ import annotations

from typing import Any

from strop.config.migration.outcomes import Convert, Facts, Outcome, Rule, many, refuse, skip
from strop.config.migration.rules import NotNeeded, To, Unless
from strop.config.migration.tables import Entry, same
from strop.config.migration.values import ORDER, if_any, if_set, integer, number

_SERVED = (
    "use_vllm vllm_mode vllm_server_host vllm_server_port vllm_server_base_url vllm_server_timeout vllm_group_port "
    "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_enable_sleep_mode vllm_model_impl "
    "vllm_max_model_length vllm_device vllm_dtype vllm_max_model_len vllm_enable_prefix_caching vllm_quantization "
    "use_transformers_paged use_transformers_continuous_batching cache_implementation ds3_gather_for_generation"
)


def rl_entries(kind: str) -> tuple[Entry, ...]:
    """What becomes of the arguments of GRPO's or RLOO's configuration."""
    config = f"{kind}Config"
    return (
        *_generation_entries(),
        *_update_entries(config),
        *(_RLOO if kind == "RLOO" else _grpo_entries(config)),
    )


def _generation_entries() -> tuple[Entry, ...]:
    in_prompts = _noted("in data.prompts_per_step")
    return (
        *same(NotNeeded("strop samples with its own engine; vLLM is not connected yet"), _SERVED),
        *same(
            Unless((), "answers are sampled freely", "not set"),
            "vllm_guided_decoding_regex vllm_structured_outputs_regex",
        ),
        Entry("num_generations", To("rollout.samples_per_prompt", integer)),
        Entry("num_generations_eval", To("eval.samples_per_prompt", if_set(integer))),
        *same(in_prompts, "steps_per_generation generation_batch_size"),
        Entry("max_prompt_length", To("data.max_prompt_tokens", _prompt_limit)),
        Entry("max_completion_length", To("data.max_response_tokens", if_set(integer))),
        Entry("shuffle_dataset", To("data.sampler", ORDER)),
        Entry("temperature", To("rollout.temperature", number)),
        Entry("top_p", To("rollout.top_p", number)),
        Entry("top_k", To("rollout.top_k", if_set(_off_at_zero))),
        Entry("min_p", Unless((0, 0.0), "there is rollout.top_p and rollout.top_k", "off")),
        Entry("repetition_penalty", Unless((1, 1.0), "log-probs are those of the plain distribution", "off")),
        Entry("generation_kwargs", Unless(({},), "the ways to sample are under rollout", "not set")),
        Entry("chat_template_kwargs", To("data.chat_template_kwargs", if_any)),
        *same(
            NotNeeded("samples are in the run folder: strop samples RUN"),
            "log_completions num_completions_to_print wandb_log_unique_prompts log_unique_prompts "
            "log_completions_hub_repo",
        ),
    )


def _update_entries(config: str) -> tuple[Entry, ...]:
    return (
        Entry("num_iterations", To("actor.epochs", integer)),
        Entry("epsilon", To("algorithm.clip_ratio", number)),
        Entry("epsilon_high", To("algorithm.clip_ratio_high", if_set(_high(config)))),
        Entry("reward_weights", NotNeeded("read with reward_funcs")),
        Entry("mask_truncated_completions", Unless(
            (False,), "cut answers are trained: let the reward function see them", "off"
        )),
        Entry("sync_ref_model", Unless((False,), "the reference stays as it was", "off")),
        *same(NotNeeded("read with sync_ref_model=True alone"), "ref_model_mixup_alpha ref_model_sync_steps"),
        Entry("disable_dropout", NotNeeded("dropout is always off")),
        *same(NotNeeded("log-probs never need the logits of all tokens at once"), "use_liger_loss"),
        Entry("cast_lm_head_to_fp32", NotNeeded("log-probs are always computed in float32")),
        Entry("pad_to_multiple_of", NotNeeded("sequences are never padded")),
        Entry("vllm_importance_sampling_correction", _correction(config)),
        *same(_noted("in algorithm.correction"), "vllm_importance_sampling_mode vllm_importance_sampling_cap"),
        Entry("max_tool_calling_iterations", Unless((), "set agent.max_assistant_turns, beside the tools", "not set")),
        Entry("tools", Unless(([],), "mark them @function_tool in a file: agent.function_tools", "none")),
    )  # fmt: skip


def _grpo_entries(config: str) -> tuple[Entry, ...]:
    return (
        Entry("beta", _grpo_kl),
        Entry("delta", _cap),
        Entry("loss_type", _loss(config)),
        Entry("importance_sampling_level", To("algorithm.policy_loss", _level)),
        Entry("scale_rewards", _scale),
        Entry("sapo_temperature_pos", To("algorithm.loss_settings.tau_pos", _of_sapo(config))),
        Entry("sapo_temperature_neg", To("algorithm.loss_settings.tau_neg", _of_sapo(config))),
        Entry("multi_objective_aggregation", Unless(
            ("sum_then_normalize",), "return the parts from one function, with algorithm=gdpo", "one function adds them"
        )),
        Entry("top_entropy_quantile", Unless((1, 1.0), "all tokens are trained", "all tokens")),
        Entry("use_bias_correction_kl", Unless((False,), "the KL estimators are under algorithm.kl_loss_type", "off")),
        Entry("off_policy_mask_threshold", Unless((), "ours is algorithm.correction.reject", "off")),
    )  # fmt: skip


def _rloo_kl(key: str, value: Any, facts: Facts) -> Outcome:
    ours: dict[str, Any] = {
        "algorithm.adv_estimator": "rloo",
        "algorithm.loss_agg_mode": "seq-mean-token-sum",
    }
    beta = number(value, facts)
    if beta == 0:
        return many(ours)
    ours |= {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": beta}
    return many(ours, "TRL takes it off the reward of a response")


_RLOO = (
    Entry("beta", _rloo_kl),
    Entry(
        "normalize_advantages", Unless((False,), "ours subtracts the mean of the other samples alone", "off")
    ),
    Entry("reward_clip_range", Unless((), "clip the reward in the reward function", "off")),
)


def _grpo_kl(key: str, value: Any, facts: Facts) -> Outcome:
    beta = number(value, facts)
    if beta == 0:
        return skip("no KL term, as by default")
    return many(
        {
            "algorithm.use_kl_loss": True,
            "algorithm.kl_loss_coef": beta,
            "algorithm.kl_loss_type": "low_var_kl",
        }
    )


def _loss(config: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        known: dict[str, dict[str, Any]] = {
            "grpo": {"algorithm.loss_agg_mode": "seq-mean-token-mean"},
            "bnpo": {"algorithm.loss_agg_mode": "token-mean"},
            "dapo": {"algorithm.loss_agg_mode": "token-mean"},
            "dr_grpo": {
                "algorithm.loss_agg_mode": "seq-mean-token-sum-norm",
                "algorithm.loss_scale_factor": facts.get(f"{config}.max_completion_length"),
            },
            "cispo": {
                "algorithm.policy_loss": "cispo",
                "algorithm.loss_agg_mode": "token-mean",
                "algorithm.clip_ratio_low": 1.0,
            },
            "sapo": {"algorithm.policy_loss": "sapo"},
        }
        if value not in known:
            return refuse(f"strop has {', '.join(known)}")
        return many(known[value], "no lower bound, as in TRL" if value == "cispo" else "")

    return rule


def _high(config: str) -> Convert:
    def convert(value: Any, facts: Facts) -> Any:
        if facts.get(f"{config}.loss_type") != "cispo":
            return number(value, facts)
        ours = {"algorithm.clip_ratio_high": number(value, facts) - 1}
        return many(ours, "TRL bounds the weight itself, strop its distance from 1")

    return convert


def _level(value: Any, facts: Facts) -> Any:
    if value == "token":
        return skip("as by default")
    return "gspo" if value == "sequence" else refuse("use token or sequence")


def _scale(key: str, value: Any, facts: Facts) -> Outcome:
    if value == "mean":
        return many({"algorithm.adv_estimator": "maxrl"}, "divided by the group's mean, which is MaxRL")
    if value in (True, "group", False, "none"):
        return many({"algorithm.norm_adv_by_std": value in (True, "group")})
    return refuse("rewards are scaled per group or not at all: use group, mean or none")


def _of_sapo(config: str) -> Convert:
    def convert(value: Any, facts: Facts) -> Any:
        is_read = facts.get(f"{config}.loss_type") == "sapo"
        return number(value, facts) if is_read else skip("read by loss_type='sapo' alone")

    return convert


def _cap(key: str, value: Any, facts: Facts) -> Outcome:
    if value is None:
        return many({"algorithm.clip_ratio_c": float("inf")}, "TRL has no dual clip unless delta is set")
    return many({"algorithm.clip_ratio_c": number(value, facts)})


def _correction(config: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is not True or facts.get(f"{config}.use_vllm") is not True:
            return skip("read with use_vllm=True alone")
        weights, _, action = str(facts.get(f"{config}.vllm_importance_sampling_mode")).partition("_")
        ours: dict[str, Any] = {"algorithm.correction.weights": weights}
        if action == "mask":
            ours |= {"algorithm.correction.mode": "mask", "algorithm.correction.lower": 1e-9}
        ours["algorithm.correction.upper"] = facts.number(f"{config}.vllm_importance_sampling_cap")
        return many(ours)

    return rule


def _noted(where: str) -> Rule:
    return lambda key, value, facts: many({}, where)


def _prompt_limit(value: Any, facts: Facts) -> Outcome:
    if value is None:
        return many({}, "longer prompts than data.max_prompt_tokens are dropped here")
    ours = {"data.max_prompt_tokens": integer(value, facts)}
    return many(ours, "longer prompts are dropped and counted; TRL cuts them on the left")


def _off_at_zero(value: Any, facts: Facts) -> int:
    return max(0, integer(value, facts))
