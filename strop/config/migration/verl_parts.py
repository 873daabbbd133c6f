"""Parts of the table for verl: losses, rollout correction, generation, rewards, and what roles have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from strop.config.migration.rules import (
    Convert,
    Facts,
    Outcome,
    Rule,
    UnreadableError,
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
    number,
    pair,
    when_true,
)

LOSSES = {
    **{name: name for name in (
        "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "dro", "cispo",
    )},
    "geo_mean": "gmpo",
}  # fmt: skip
FIXED_AGGREGATION = {"gspo", "sapo", "geo_mean"}
"""Losses for which verl ignores loss_agg_mode."""


def loss_rows(a: str) -> dict[str, Rule]:
    """The policy loss and its numbers, below the actor `a`."""
    loss = f"{a}.policy_loss.loss_mode"

    def setting(name: str, *losses: str) -> Rule:
        """A number of some losses alone, under its own name in algorithm.loss_settings."""

        def rule(key: str, value: Any, facts: Facts) -> Outcome:
            if value is None or facts.get(loss) not in losses:
                return skip(f"read by {' and '.join(losses)} alone")
            return many({f"algorithm.loss_settings.{name}": value})

        return rule

    def mode(value: Any, facts: Facts) -> Any:
        if value == "bypass_mode":
            return skip(
                "algorithm.old_log_probs and algorithm.correction say it, from algorithm.rollout_correction"
            )
        if value not in LOSSES:
            note = "not a loss of verl's own: yours must be registered here too"
            return many({"algorithm.policy_loss": value}, note)
        return LOSSES[value]

    def cap(key: str, value: Any, facts: Facts) -> Outcome:
        if str(facts.get(loss)).startswith("dppo"):
            return many(
                {"algorithm.loss_settings.truncation": value}, "what verl gives DPPO; the paper's is 20"
            )
        return many({"algorithm.clip_ratio_c": value})

    def clip(value: Any, facts: Facts) -> Any:
        one_sided = [side for side in ("low", "high") if facts.get(f"{a}.clip_ratio_{side}") is None]
        if one_sided and value != 0.2:
            return many(
                {"algorithm.clip_ratio": value},
                f"here it also sets {' and '.join(one_sided)}; in verl 0.2 stays",
            )
        return value

    def aggregation(key: str, value: Any, facts: Facts) -> Outcome:
        if facts.get(loss) in FIXED_AGGREGATION:
            return skip(
                f"verl aggregates {facts.get(loss)} in its own way whatever is set; so does strop by default"
            )
        ours: dict[str, Any] = {"algorithm.loss_agg_mode": value}
        if value == "seq-mean-token-sum-norm" and facts.get(f"{a}.loss_scale_factor") is None:
            ours["algorithm.loss_scale_factor"] = facts.number("data.max_response_length")
            return many(
                ours, "verl divides by the width of a padded batch; strop by data.max_response_tokens"
            )
        return many(ours)

    def scale(value: Any, facts: Facts) -> Any:
        if facts.get(f"{a}.loss_agg_mode") != "seq-mean-token-sum-norm":
            return skip("read by loss_agg_mode=seq-mean-token-sum-norm alone")
        return value

    kinds = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
    return {
        loss: to("algorithm.policy_loss", mode),
        f"{a}.clip_ratio": to("algorithm.clip_ratio", clip),
        f"{a}.clip_ratio_low": to("algorithm.clip_ratio_low", if_set(number)),
        f"{a}.clip_ratio_high": to("algorithm.clip_ratio_high", if_set(number)),
        f"{a}.clip_ratio_c": cap,
        f"{a}.loss_agg_mode": aggregation,
        f"{a}.loss_scale_factor": to("algorithm.loss_scale_factor", if_set(scale)),
        f"{a}.entropy_coeff": to("algorithm.entropy_coeff", number),
        f"{a}.use_kl_loss": to("algorithm.use_kl_loss"),
        f"{a}.kl_loss_coef": to("algorithm.kl_loss_coef", number),
        f"{a}.kl_loss_type": to(
            "algorithm.kl_loss_type",
            choice({name + end: name + end for name in kinds for end in ("", "+")}, instead="use low_var_kl"),
        ),
        f"{a}.tau_pos": setting("tau_pos", "sapo"),
        f"{a}.tau_neg": setting("tau_neg", "sapo"),
        f"{a}.policy_loss.clip_cov_ratio": setting("clip_cov_ratio", "clip_cov"),
        f"{a}.policy_loss.clip_cov_lb": setting("clip_cov_lb", "clip_cov"),
        f"{a}.policy_loss.clip_cov_ub": setting("clip_cov_ub", "clip_cov"),
        f"{a}.policy_loss.kl_cov_ratio": setting("kl_cov_ratio", "kl_cov"),
        f"{a}.policy_loss.ppo_kl_coef": setting("ppo_kl_coef", "kl_cov"),
        f"{a}.policy_loss.dro_beta": setting("dro_beta", "dro"),
        f"{a}.dro_beta": setting("dro_beta", "dro"),
        f"{a}.policy_loss.rollout_correction.*": not_needed("a copy of algorithm.rollout_correction"),
        f"{a}.policy_loss.rollout_correction": not_needed("a copy of algorithm.rollout_correction"),
    }


def correction_rows(section: str, cap: str) -> dict[str, Rule]:
    """Rollout correction: the section of today, and the single number `cap` of mid-2025."""
    ours = "algorithm.correction"

    def weights(value: Any, facts: Facts) -> Any:
        if value not in ("token", "sequence", "geometric"):
            return refuse("strop's weights are token, sequence and geometric")
        if facts.get(f"{section}.bypass_mode") is True and facts.get(f"{section}.loss_type") != "reinforce":
            return skip("with bypass_mode and ppo_clip, the ratio of the loss holds the weights already")
        return value

    def threshold(key: str, value: Any, facts: Facts) -> Outcome:
        if facts.get(f"{section}.rollout_is") is None:
            return skip("read with rollout_is alone")
        lower, upper = read_range(value)
        if lower is None:
            return many({f"{ours}.upper": upper})
        return many({f"{ours}.mode": "mask", f"{ours}.lower": lower, f"{ours}.upper": upper}, "a range masks")

    def reject(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None or value == "":
            return skip("not set")
        options = [LEGACY_REJECTIONS.get(name.strip(), name.strip()) for name in str(value).split(",")]
        given = facts.get(f"{section}.rollout_rs_threshold")
        texts = (
            given if isinstance(given, list) else str(given).split(",") if isinstance(given, str) else [given]
        )
        if given is None:
            raise UnreadableError(f"{section}.rollout_rs_threshold is not set, and verl refuses that too")
        if len(texts) not in (1, len(options)):
            raise UnreadableError(
                f"{len(options)} statistics and {len(texts)} thresholds: give one, or as many"
            )
        bounds: dict[str, Any] = {}
        turned = []
        for index, option in enumerate(options):
            lower, upper = read_range(texts[index if len(texts) > 1 else 0])
            lower = facts.get(f"{section}.rollout_rs_threshold_lower") if lower is None else lower
            if not option.endswith("_k1"):
                bounds[option] = upper
                continue
            bounds[option] = upper if lower is None else [lower, upper]
            if lower is not None and abs(lower * upper - 1) > 0.02:
                turned.append(f"{option} [{1 / upper:.6g}, {1 / lower:.6g}]")
        note = (
            f"verl's bounds act on the inverse ratio; to reject what it did: {', '.join(turned)}"
            if turned
            else ""
        )
        return many({f"{ours}.reject": bounds}, note)

    def loss_type(key: str, value: Any, facts: Facts) -> Outcome:
        if facts.get(f"{section}.bypass_mode") is not True:
            return skip("read with bypass_mode=true alone")
        if value == "reinforce":
            return many({"algorithm.policy_loss": "reinforce"})
        return skip("the clipped loss is algorithm.policy_loss=vanilla")

    def old_cap(value: Any, facts: Facts) -> Any:
        if not isinstance(value, int | float) or value <= 0:
            return skip("off there too")
        return many({f"{ours}.weights": "token", f"{ours}.upper": value})

    return {
        f"{section}.rollout_is": to(f"{ours}.weights", if_set(weights)),
        f"{section}.rollout_is_threshold": threshold,
        f"{section}.rollout_is_threshold_lower": to(
            f"{ours}.lower",
            if_set(lambda value, facts: many({f"{ours}.mode": "mask", f"{ours}.lower": value})),
        ),
        f"{section}.rollout_is_batch_normalize": lambda key, value, facts: (
            many({f"{ours}.normalize": True})
            if value is True and facts.get(f"{section}.rollout_is") is not None
            else skip("off, or without weights")
        ),
        f"{section}.rollout_rs": reject,
        f"{section}.rollout_rs_threshold": lambda key, value, facts: (
            skip("read with rollout_rs alone")
            if facts.get(f"{section}.rollout_rs") is None
            else many({}, f"in {ours}.reject")
        ),
        f"{section}.rollout_rs_threshold_lower": lambda key, value, facts: (
            skip("not set") if value is None else many({}, f"in {ours}.reject")
        ),
        f"{section}.rollout_token_veto_threshold": unless(
            [], f"a veto by the smallest ratio of a token is {ours}.reject.seq_max_k2"
        ),
        f"{section}.bypass_mode": when_true(
            {"algorithm.old_log_probs": "rollout"},
            otherwise="old log-probs are computed again, as by default",
        ),
        f"{section}.bypass_old_logprob_for_rollout": when_true(
            {"algorithm.old_log_probs": "rollout"},
            otherwise="old log-probs are computed again, as by default",
        ),
        f"{section}.loss_type": loss_type,
        f"{section}.use_policy_gradient": lambda key, value, facts: (
            many({"algorithm.policy_loss": "reinforce"}) if value is True else skip("off there too")
        ),
        cap: to(f"{ours}.weights", if_set(old_cap)),
    }


LEGACY_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Names of rejections in 2025."""


def read_range(value: Any) -> tuple[float | None, float]:
    """(lower, upper) of a threshold: a number, its text, or `lower_upper`.

    Raises:
        UnreadableError: it is none of these.
    """
    try:
        if isinstance(value, bool) or value is None:
            raise ValueError
        lower, _, upper = str(value).strip().rpartition("_")
        return (float(lower) if lower else None), float(upper)
    except ValueError as error:
        raise UnreadableError(f"{value!r} would have to be a number, or two with _ between them") from error


def optimizer_rows(theirs: str, ours: str, mini_batch: str, epochs: str) -> dict[str, Rule]:
    """An optimizer; `mini_batch` and `epochs` are the keys that say how many steps it takes per step of training."""

    def warmup(value: Any, facts: Facts) -> Any:
        steps = integer(value, facts)
        if steps <= 0:
            return skip("no warm-up there, none here")
        updates = _updates_per_step(facts, mini_batch, epochs)
        note = f"{steps} steps of {updates} optimizer steps, which strop counts" if updates > 1 else ""
        return many({f"{ours}.warmup_steps": steps * updates}, note)

    def share(value: Any, facts: Facts) -> Any:
        if not value:
            return skip("no warm-up there, none here")
        total = facts.get("trainer.total_training_steps")
        if not isinstance(total, int):
            return refuse(f"the number of steps is known only with the data: set {ours}.warmup_steps")
        updates = _updates_per_step(facts, mini_batch, epochs)
        return many(
            {f"{ours}.warmup_steps": int(float(value) * total) * updates}, f"{value} of {total} steps"
        )

    return {
        f"{theirs}.lr": to(f"{ours}.lr", number),
        f"{theirs}.lr_warmup_steps": to(f"{ours}.warmup_steps", if_set(warmup)),
        f"{theirs}.lr_warmup_steps_ratio": to(f"{ours}.warmup_steps", if_set(share)),
        f"{theirs}.total_training_steps": not_needed("the number of steps follows from data and epochs"),
        f"{theirs}.weight_decay": to(f"{ours}.weight_decay", number),
        f"{theirs}.betas": to(f"{ours}.betas", pair),
        f"{theirs}.eps": to(f"{ours}.eps", number),
        f"{theirs}.clip_grad": to(f"{ours}.max_grad_norm", number),
        f"{theirs}.min_lr_ratio": to(f"{ours}.min_lr_ratio", if_set(number)),
        f"{theirs}.num_cycles": unless([0.5], "the cosine goes down once", else_note="half a cosine"),
        f"{theirs}.lr_scheduler_type": to(f"{ours}.schedule", _SCHEDULE),
        f"{theirs}.warmup_style": to(f"{ours}.schedule", _SCHEDULE),
        f"{theirs}.lr_scheduler": to(f"{ours}.schedule", _SCHEDULE),
        f"{theirs}.optimizer": to(
            f"{ours}.name",
            choice({"AdamW": "adamw", "adamw": "adamw", "AdamW8bit": "adamw_8bit", "_AdamW": "adamw"},
                   instead="use adamw, adamw_8bit or muon"),
        ),
        f"{theirs}.optimizer_impl": not_needed("the name of the optimizer says it"),
        f"{theirs}.override_optimizer_config": unless([{}], f"the optimizer's settings are under {ours}"),
        f"{theirs}.zero_indexed_step": not_needed("the first step already warms up"),
    }  # fmt: skip


_SCHEDULE = choice(
    {"constant": "constant", "cosine": "cosine", "linear": "linear", "WSD": "wsd", "wsd": "wsd"},
    instead="use constant, linear, cosine or wsd",
)


def _updates_per_step(facts: Facts, mini_batch: str, epochs: str) -> int:
    prompts = integer(facts.get("data.train_batch_size"), facts)
    size = min(integer(facts.get(mini_batch), facts), prompts)
    return -(-prompts // size) * integer(facts.get(epochs), facts)


def engine_rows(theirs: str, ours: str, *, is_policy: bool = False) -> dict[str, Rule]:
    """A role's FSDP section; `is_policy` for the one whose precision is that of model.dtype."""

    def precision(value: Any, facts: Facts) -> Any:
        names = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
        if value in ("float16", "fp16"):
            return refuse("float16 needs loss scaling, which strop does not do: use bfloat16")
        if not is_policy:
            return skip("follows model.dtype")
        return names.get(value, refuse("use bfloat16 or float32"))

    return {
        f"{theirs}.param_offload": when_true(
            {"resources.offload_idle": True},
            otherwise="models stay where they are, as by default",
            note="of every role while others work",
        ),
        f"{theirs}.optimizer_offload": when_true(
            {f"{ours}.offload": "optimizer"}, otherwise="the state stays where it is, as by default"
        ),
        f"{theirs}.offload_policy": when_true({f"{ours}.offload": "all"}, otherwise="off there too"),
        f"{theirs}.grad_offload": not_needed("gradients go with the parameters"),
        f"{theirs}.reshard_after_forward": to(f"{ours}.reshard_after_forward"),
        f"{theirs}.fsdp_size": to(
            f"{ours}.shard_size", lambda value, facts: max(0, integer(value, facts)), note="0: all ranks"
        ),
        f"{theirs}.dtype": to("model.dtype", if_set(precision)),
        f"{theirs}.mixed_precision.param_dtype": to("model.dtype", if_set(precision)),
        f"{theirs}.mixed_precision.*": not_needed("gradients are reduced in float32"),
        f"{theirs}.mixed_precision": unless([{}], "precision is model.dtype"),
        f"{theirs}.model_dtype": unless(
            ["fp32", "float32", "bfloat16", "bf16"], "use float32", else_note="master weights are in float32"
        ),
        f"{theirs}.ulysses_sequence_parallel_size": to(f"{ours}.sequence_parallel", integer),
        f"{theirs}.qat.*": not_needed("weights are not quantized in training"),
        f"{theirs}.*": not_needed("a detail of verl's FSDP wrapping; ours has no such choice"),
    }


_ENGINE = (
    "strop samples with its own engine, with the trainer's own weights; vLLM and SGLang are not connected yet"
)
_LOG_PROBS = "log-probs are computed within actor.engine.max_tokens_per_device"
_TOOLS = "tools and agent loops of several turns are not there yet"


def rollout_rows(r: str) -> dict[str, Rule]:
    """Generation, below the rollout `r`."""
    tuning = (
        "mode", "dtype", "gpu_memory_utilization", "enforce_eager", "cudagraph_capture_sizes", "free_cache_engine",
        "tensor_model_parallel_size", "data_parallel_size", "expert_parallel_size", "pipeline_model_parallel_size",
        "max_num_batched_tokens", "max_model_len", "enable_chunked_prefill", "enable_prefix_caching", "logprobs_mode",
        "scheduling_policy", "load_format", "disable_log_stats", "layered_summon", "update_weights_bucket_megabytes",
        "nnodes", "n_gpus_per_node", "micro_batch_size", "enable_sleep_mode", "skip_tokenizer_init", "limit_images",
    )  # fmt: skip
    budgets = (
        "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz",
        "log_prob_max_token_len_per_gpu",
    )  # fmt: skip
    nothing = (
        "do_sample", "repetition_penalty", "over_sample_rate", "multi_stage_wake_up", "val_kwargs.do_sample",
        "multi_turn.enable", "multi_turn.enable_tokenization_sanity_check", "multi_turn.use_inference_chat_template",
        "multi_turn.tokenization_sanity_check_mode", "multi_turn.num_repeat_rollouts",
    )  # fmt: skip
    limits = (
        "max_assistant_turns", "max_user_turns", "max_parallel_calls", "max_tool_response_length",
        "tool_response_truncate_side", "format", "completion_callback",
    )  # fmt: skip
    files = ("tool_config_path", "function_tool_path", "interaction_config_path")
    return {
        f"{r}.name": not_needed(_ENGINE),
        f"{r}.n": to("rollout.samples_per_prompt", integer),
        f"{r}.temperature": to("rollout.temperature", number),
        f"{r}.top_p": to("rollout.top_p", number),
        f"{r}.top_k": to("rollout.top_k", lambda value, facts: max(0, integer(value, facts)), note="0: off"),
        f"{r}.max_num_seqs": to("rollout.max_running", integer),
        f"{r}.prompt_length": not_needed("data.max_prompt_tokens says it"),
        f"{r}.response_length": not_needed("data.max_response_tokens says it"),
        f"{r}.ignore_eos": unless([False], "a response ends at its end-of-sequence token", else_note="off there too"),
        f"{r}.calculate_log_probs": not_needed("log-probs of sampled tokens are always recorded"),
        f"{r}.val_kwargs.n": to("eval.samples_per_prompt", integer),
        f"{r}.val_kwargs.temperature": to("eval.temperature", number),
        f"{r}.val_kwargs.top_p": unless([1, 1.0], "validation samples from the whole distribution", else_note="off"),
        f"{r}.val_kwargs.top_k": unless([-1, 0], "validation samples from the whole distribution", else_note="off"),
        f"{r}.multi_turn": unless([{}], _TOOLS),
        **{f"{r}.multi_turn.{name}": unless([], _TOOLS, else_note="not set") for name in files},
        **{f"{r}.multi_turn.{name}": not_needed("read with tools alone") for name in limits},
        f"{r}.agent.default_agent_loop": unless(
            ["single_turn_agent"], _TOOLS, else_note="one turn is what strop plays by default"
        ),
        f"{r}.agent.agent_loop_config_path": unless([], _TOOLS, else_note="not set"),
        f"{r}.agent.num_workers": not_needed("episodes share the rollout's processes"),
        f"{r}.agent.*": not_needed("belongs to verl's agent server"),
        f"{r}.engine_kwargs.*": not_needed(_ENGINE),
        f"{r}.engine_kwargs": not_needed(_ENGINE),
        f"{r}.checkpoint_engine.*": not_needed("weights go to the rollout in one verified exchange"),
        f"{r}.trace.*": not_needed("every sample is in the run folder: strop samples RUN"),
        f"{r}.skip.*": unless([False], "rollouts are never replayed from files", else_note="off there too"),
        f"{r}.skip_rollout": unless([False], "rollouts are never replayed from files", else_note="off there too"),
        f"{r}.skip_dump_dir": not_needed("read with skip_rollout=true alone"),
        f"{r}.enable_rollout_routing_replay": unless([False], "expert routing is not replayed", else_note="off"),
        f"{r}.profiler.*": not_needed("profiling is set up outside strop"),
        f"{r}.prometheus.*": not_needed("metrics go to trainer.trackers"),
        f"{r}.quantization": unless([], "the rollout uses the trainer's own weights", else_note="off there too"),
        f"{r}.quantization_config_file": unless([], "the rollout uses the trainer's own weights", else_note="not set"),
        f"{r}.mtp.*": not_needed("multi-token prediction is neither trained nor used"),
        **{f"{r}.{name}": not_needed(_ENGINE) for name in tuning},
        **{f"{r}.{name}": not_needed(_LOG_PROBS) for name in budgets},
        **{f"{r}.{name}": not_needed("does nothing in verl either") for name in nothing},
    }  # fmt: skip


def _overlong_rows(section: str) -> dict[str, Rule]:
    """DAPO's penalty on long answers."""

    def if_on(convert: Convert) -> Convert:
        def rule(value: Any, facts: Facts) -> Any:
            is_on = facts.get(f"{section}.enable") is True
            return convert(value, facts) if is_on else skip("read with enable=true alone")

        return rule

    return {
        f"{section}.enable": not_needed("reward.overlong_buffer=0 is off"),
        f"{section}.len": to("reward.overlong_buffer", if_on(integer)),
        f"{section}.penalty_factor": to("reward.overlong_penalty", if_on(number)),
        f"{section}.log": not_needed("critic/score and critic/rewards differ by it"),
    }


def reward_rows(longest: Callable[[Facts], int]) -> dict[str, Rule]:
    """Scoring: the sections of today (reward) and of 2025 (reward_model, custom_reward_function)."""
    rows: dict[str, Rule] = {}
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        rows |= {
            f"{section}.path": to("reward.path", if_set()),
            f"{section}.name": lambda key, value, facts, section=section: (  # type: ignore[misc]
                many({"reward.name": value}) if facts.get(f"{section}.path") else skip("no file, no name")
            ),
            f"{section}.reward_kwargs": to(
                "reward.kwargs", lambda value, facts: value or skip("empty there too")
            ),
            f"{section}.reward_kwargs.*": below(f"{section}.reward_kwargs", "reward.kwargs"),
        }
    managers = unless(
        ["naive", "batch", "prime", "dapo", "rate_limited", "function"],
        "your own reward manager: write a reward function instead, reward.path",
        else_note="functions for one sample and for batches are told apart by their parameters",
    )
    for section in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg",
                    "reward.reward_kwargs.overlong_buffer_cfg"):  # fmt: skip
        rows |= _overlong_rows(section)
    for section in ("reward_model", "reward"):
        rows |= {
            f"{section}.sandbox_fusion.url": unless(
                [], "a sandbox server is not used yet", else_note="not set"
            ),
            f"{section}.sandbox_fusion.*": not_needed("read with a sandbox url alone"),
            f"{section}.reward_kwargs.max_resp_len": not_needed("data.max_response_tokens says it"),
            f"{section}.reward_kwargs": unless([{}], "the arguments of a reward function are reward.kwargs"),
            f"{section}.reward_kwargs.*": refused("the arguments of a reward function are reward.kwargs"),
            f"{section}.num_workers": to("reward.num_workers", integer),
        }
    model = {
        "path": model_path("reward_model.path"),
        "max_length": to("reward_model.max_tokens", if_set(integer)),
        "forward_max_token_len_per_gpu": to("reward_model.engine.max_tokens_per_device", integer),
        "micro_batch_size_per_gpu": to(
            "reward_model.engine.max_tokens_per_device",
            if_set(lambda value, facts: many(
                {"reward_model.engine.max_tokens_per_device": integer(value, facts) * longest(facts)},
                f"{value} samples of at most {longest(facts)} tokens",
            )),
        ),
    }  # fmt: skip
    rows |= {
        "reward_model.enable": _reward_model("custom_reward_function.path"),
        "reward_model.model.path": _with_model("reward_model.enable", model["path"]),
        "reward_model.max_length": _with_model("reward_model.enable", model["max_length"]),
        "reward_model.forward_max_token_len_per_gpu": _with_model(
            "reward_model.enable", model["forward_max_token_len_per_gpu"]
        ),
        "reward_model.micro_batch_size_per_gpu": _with_model(
            "reward_model.enable", model["micro_batch_size_per_gpu"]
        ),
        "reward_model.micro_batch_size": not_needed("ours is reward_model.engine.max_tokens_per_device"),
        "reward_model.use_dynamic_bsz": not_needed("batches are always cut by tokens"),
        "reward_model.strategy": not_needed("a reward model is run with FSDP2"),
        "reward_model.model.input_tokenizer": not_needed(
            "the conversation is rendered again with its own template"
        ),
        "reward_model.model.*": not_needed("follows the reward model's folder"),
        "reward_model.reward_manager": managers,
        "reward_model.launch_reward_fn_async": not_needed("answers are scored as they end"),
        "reward_model.use_reward_loop": not_needed("answers are scored as they end"),
        "reward_model.enable_resource_pool": unless(
            [False], "a reward model of its own processes is resources.apart: {reward_model: N}"
        ),
        "reward_model.nnodes": not_needed("processes of its own are resources.apart: {reward_model: N}"),
        "reward_model.n_gpus_per_node": not_needed(
            "processes of its own are resources.apart: {reward_model: N}"
        ),
        "reward_model.profiler.*": not_needed("profiling is set up outside strop"),
        "reward_model.rollout.*": not_needed("a reward model scores; it does not generate"),
        "reward_model.reward_loop_source": not_needed("there is one way to score"),
        "reward_model.reward_loop_module_path": unless(
            [], "your own reward manager: write a reward function instead"
        ),
        "reward_model.reward_loop_class_name": unless(
            [], "your own reward manager: write a reward function instead"
        ),
        "reward.reward_model.enable": _reward_model("reward.custom_reward_function.path"),
        "reward.reward_model.model_path": _with_model("reward.reward_model.enable", model["path"]),
        "reward.reward_model.enable_resource_pool": unless(
            [False], "a reward model of its own processes is resources.apart: {reward_model: N}"
        ),
        "reward.reward_model.*": not_needed("a reward model scores here; it does not generate"),
        "reward.reward_manager.name": managers,
        "reward.reward_manager.module.path": unless(
            [], "your own reward manager: write a reward function instead"
        ),
        "reward.reward_manager.module.name": not_needed("read with a module path alone"),
        "reward.reward_manager.source": not_needed("there is one way to score"),
    }
    return rows


def _reward_model(function: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is not True:
            return skip("no reward model there, none here")
        if facts.get(function):
            return refuse(
                "a function that asks a model's server: here both scores are added, reward.weight is its share"
            )
        return many({"reward.weight": 0.0}, "the reward is the model's alone")

    return rule


def _with_model(enable: str, rule: Rule) -> Rule:
    return lambda key, value, facts: (
        rule(key, value, facts) if facts.get(enable) is True else skip("no reward model there, none here")
    )
