"""Scoring: verl's section `reward` of today, and `reward_model` and `custom_reward_function` of 2025."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from strop.config.migration.outcomes import Convert, Facts, Outcome, Rule, many, refuse, skip
from strop.config.migration.rules import Below, NotNeeded, OnlyIf, Refused, To, Unless
from strop.config.migration.tables import Entry, only_if, same, under
from strop.config.migration.values import if_any, if_set, integer, model_path, number
from strop.config.migration.verl.facts import longest

_KNOWN_MANAGERS = ("naive", "batch", "prime", "dapo", "rate_limited", "function", "loop")
_FUNCTIONS = ("custom_reward_function.path", "reward.custom_reward_function.path")
_KWARGS = "the arguments of a reward function are reward.kwargs"
_APART = "a reward model of its own processes is resources.apart: {reward_model: N}"
_SCORES = "a reward model scores; it does not generate"


def _manager(file_key: str) -> Rule:
    """A manager by name: one of verl's own, or one of the file that `file_key` names."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is None or value in _KNOWN_MANAGERS:
            return skip("functions for one sample and for batches are told apart by their parameters")
        if facts.get(file_key):
            return skip(f"read with {file_key}")
        return refuse(f"in which file {value} is, is not said: set reward.path and reward.manager")

    return rule


def _manager_file(*name_keys: str) -> Rule:
    """The file of a manager of the user's own."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if not value:
            return skip("not set")
        name = next((found for found in map(facts.get, name_keys) if found), None)
        if name is None:
            return refuse("which class of the file it is, is not said: set reward.path and reward.manager")
        if any(facts.get(function) for function in _FUNCTIONS):
            return refuse(
                "the function must be in the file of the manager: import it there, and set reward.name"
            )
        note = "import RewardManagerBase and register from strop.rewards.managers"
        return many({"reward.path": value, "reward.manager": name}, note)

    return rule


def _named(section: str) -> Rule:
    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        has_file = facts.get(f"{section}.path") and value
        return many({"reward.name": value}) if has_file else skip("no file, no name")

    return rule


def _function(section: str) -> tuple[Entry, ...]:
    return under(
        section,
        Entry("path", To("reward.path", if_set())),
        Entry("name", _named(section)),
        Entry("reward_kwargs", To("reward.kwargs", if_any)),
        Entry("reward_kwargs.*", Below(f"{section}.reward_kwargs", "reward.kwargs")),
    )


def _overlong(section: str) -> tuple[Entry, ...]:
    """DAPO's penalty on long answers."""

    def is_on(facts: Facts) -> bool:
        return facts.get(f"{section}.enable") is True

    def when_on(key: str, convert: Convert) -> OnlyIf:
        return OnlyIf(is_on, "read with enable=true alone", To(key, convert))

    return under(
        section,
        Entry("enable", NotNeeded("reward.overlong_buffer=0 is off")),
        Entry("len", when_on("reward.overlong_buffer", integer)),
        Entry("penalty_factor", when_on("reward.overlong_penalty", number)),
        Entry("log", NotNeeded("critic/score and critic/rewards differ by it")),
    )


def _sandbox(section: str) -> tuple[Entry, ...]:
    def has_url(facts: Facts) -> bool:
        return bool(facts.get(f"{section}.url"))

    def server(value: Any, facts: Facts) -> Outcome:
        return many({"reward.sandbox.backend": "sandbox_fusion", "reward.sandbox.url": value})

    return under(
        section,
        Entry("url", To("reward.sandbox.url", if_set(server))),
        *only_if(
            has_url,
            "read with a sandbox url alone",
            (
                Entry("max_concurrent", To("reward.sandbox.max_concurrent", if_set(integer))),
                Entry("memory_limit_mb", To("reward.sandbox.limits.memory_mib", if_set(integer))),
            ),
        ),
    )


def _shared(section: str) -> tuple[Entry, ...]:
    """Keys that both sections have."""
    return (
        *_sandbox(f"{section}.sandbox_fusion"),
        *_overlong(f"{section}.reward_kwargs.overlong_buffer_cfg"),
        *under(
            section,
            Entry("reward_kwargs.max_resp_len", NotNeeded("data.max_response_tokens says it")),
            Entry("reward_kwargs", Unless(({},), _KWARGS, "empty there too")),
            Entry("reward_kwargs.*", Refused(_KWARGS)),
            Entry("num_workers", To("reward.num_workers", if_set(integer))),
        ),
    )


def _model_only(function: str) -> Rule:
    """A reward model is on: it alone, unless a function of the user's is there too."""

    def rule(key: str, value: Any, facts: Facts) -> Outcome:
        if value is not True:
            return skip("no reward model there, none here")
        if facts.get(function):
            return refuse(
                "a function that asks a model's server: here both scores are added, reward.weight is its share"
            )
        return many({"reward.weight": 0.0}, "the reward is the model's alone")

    return rule


def _with_model(enable: str, entries: Iterable[Entry]) -> tuple[Entry, ...]:
    def is_on(facts: Facts) -> bool:
        return facts.get(enable) is True

    return only_if(is_on, "no reward model there, none here", entries)


def _micro_batch(value: Any, facts: Facts) -> Outcome:
    return many(
        {"reward_model.engine.max_tokens_per_device": integer(value, facts) * longest(facts)},
        f"{value} samples of at most {longest(facts)} tokens",
    )


_BUDGET = "reward_model.engine.max_tokens_per_device"
_OF_2025 = under(
    "reward_model",
    Entry("enable", _model_only("custom_reward_function.path")),
    *_with_model(
        "reward_model.enable",
        (
            Entry("model.path", To("reward_model.path", model_path("reward_model.path"))),
            Entry("max_length", To("reward_model.max_tokens", if_set(integer))),
            Entry("forward_max_token_len_per_gpu", To(_BUDGET, integer)),
            Entry("micro_batch_size_per_gpu", To(_BUDGET, if_set(_micro_batch))),
            Entry("ulysses_sequence_parallel_size", To("reward_model.engine.sequence_parallel", integer)),
            Entry(
                "strategy",
                Unless(("fsdp", "fsdp2"), "a reward model is run with FSDP2: set strategy=fsdp2", "FSDP2"),
            ),
            Entry("megatron.*", Refused("a reward model is run with FSDP2: set strategy=fsdp2")),
        ),
    ),
    Entry("micro_batch_size", NotNeeded(f"ours is {_BUDGET}")),
    Entry("use_dynamic_bsz", NotNeeded("batches are always cut by tokens")),
    Entry("model.input_tokenizer", NotNeeded("the conversation is rendered again with its own template")),
    Entry("model.*", NotNeeded("follows the reward model's folder")),
    Entry("reward_manager", _manager("reward_model.reward_loop_module_path")),
    *same(NotNeeded("answers are scored as they end"), "launch_reward_fn_async use_reward_loop"),
    Entry("enable_resource_pool", Unless((False,), _APART, "beside the policy")),
    *same(NotNeeded(_APART), "nnodes n_gpus_per_node"),
    Entry("profiler.*", NotNeeded("profiling is set up outside strop")),
    Entry("rollout.*", NotNeeded(_SCORES)),
    Entry("reward_loop_source", NotNeeded("there is one way to score")),
    Entry("reward_loop_module_path", _manager_file("reward_model.reward_loop_class_name")),
    Entry("reward_loop_class_name", NotNeeded("read with reward_loop_module_path")),
)
_OF_TODAY = under(
    "reward",
    Entry(
        "compute_score_kwargs",
        Unless(({},), "name the scorer in a reward function: reward.path", "empty there too"),
    ),
    Entry(
        "compute_score_kwargs.*",
        Refused("call the scorer with its arguments in a reward function: reward.path"),
    ),
    Entry("reward_model.enable", _model_only("reward.custom_reward_function.path")),
    *_with_model(
        "reward.reward_model.enable",
        (Entry("reward_model.model_path", To("reward_model.path", model_path("reward_model.path"))),),
    ),
    Entry("reward_model.enable_resource_pool", Unless((False,), _APART, "beside the policy")),
    *same(NotNeeded(_APART), "reward_model.nnodes reward_model.n_gpus_per_node"),
    Entry("reward_model.rollout.*", NotNeeded(_SCORES)),
    Entry("reward_manager.name", _manager("reward.reward_manager.module.path")),
    Entry("reward_manager.source", NotNeeded("there is one way to score")),
    Entry(
        "reward_manager.module.path",
        _manager_file("reward.reward_manager.module.name", "reward.reward_manager.name"),
    ),
    Entry("reward_manager.module.name", NotNeeded("read with reward_manager.module.path")),
)
ENTRIES = (
    *_function("custom_reward_function"),
    *_function("reward.custom_reward_function"),
    *_sandbox("sandbox_fusion"),
    *_overlong("reward_model.overlong_buffer"),
    *_overlong("custom_reward_function.overlong_buffer"),
    *_shared("reward_model"),
    *_shared("reward"),
    *_OF_2025,
    *_OF_TODAY,
)
"""What becomes of the keys of scoring."""
