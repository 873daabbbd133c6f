"""The section `data` of verl's reinforcement learning."""

from __future__ import annotations

from typing import Any

from strop.config.migration.outcomes import Convert, Facts, Outcome, many, refuse, skip
from strop.config.migration.rules import Below, NotNeeded, To, Unless
from strop.config.migration.tables import Entry, same, under
from strop.config.migration.values import ORDER, if_any, if_set, integer, one_or_more

_NOTHING = "does nothing in verl either"
_MEDIA = "only rows with images, video or audio need it, and strop reads text"


def _filter_overlong(value: Any, facts: Facts) -> Any:
    note = "a prompt over the limit is an error here, with its row" if value is False else ""
    return many({"data.filter_overlong_prompts": value}, note)


def _sample_limit(key: str) -> Convert:
    def rule(value: Any, facts: Facts) -> Any:
        if value is None or (isinstance(value, int) and value < 0):
            return skip("no limit there, none here")
        return many({key: integer(value, facts)}, "spread over the rows, not the first ones")

    return rule


def _generated(key: str, value: Any, facts: Facts) -> Outcome:
    if value is None or value == facts.get("data.train_batch_size"):
        return skip("equal to data.train_batch_size")
    if facts.get("algorithm.filter_groups.enable") is True:
        return skip("algorithm.filter_groups draws as many prompts as a full batch takes")
    return refuse("more prompts are drawn than trained with dynamic sampling alone: algorithm.filter_groups")


ENTRIES = under(
    "data",
    Entry("train_files", To("data.train_files", one_or_more)),
    Entry("val_files", To("data.val_files", one_or_more)),
    Entry("train_batch_size", To("data.prompts_per_step", integer, note="prompts in both")),
    Entry("gen_batch_size", _generated),
    Entry("max_prompt_length", To("data.max_prompt_tokens", integer)),
    Entry("max_response_length", To("data.max_response_tokens", integer)),
    Entry("filter_overlong_prompts", To("data.filter_overlong_prompts", _filter_overlong)),
    Entry("prompt_key", To("data.prompt_key")),
    Entry("shuffle", To("data.sampler", ORDER)),
    Entry("seed", To("trainer.seed", if_set(integer))),
    Entry("apply_chat_template_kwargs", To("data.chat_template_kwargs", if_any)),
    Entry(
        "apply_chat_template_kwargs.*", Below("data.apply_chat_template_kwargs", "data.chat_template_kwargs")
    ),
    Entry("val_max_samples", To("data.max_val_prompts", _sample_limit("data.max_val_prompts"))),
    Entry("train_max_samples", To("data.max_train_prompts", _sample_limit("data.max_train_prompts"))),
    Entry("trust_remote_code", To("model.trust_remote_code")),
    Entry("tokenizer", Unless(("",), "the tokenizer is the one in the model's folder: put yours there")),
    Entry("val_batch_size", NotNeeded("validation is one batch of any size")),
    Entry(
        "truncation",
        NotNeeded("does nothing in verl's RL data; prompts over the limit are dropped or an error"),
    ),
    Entry("reward_fn_key", NotNeeded(f"{_NOTHING}; ours is data.data_source_key")),
    *same(
        NotNeeded(_NOTHING),
        "return_raw_chat return_raw_input_ids return_full_prompt return_multi_modal_inputs chat_template_func "
        "filter_prompts",
    ),
    Entry("filter_overlong_prompts_workers", NotNeeded("the filter needs no workers")),
    Entry("dataloader_num_workers", NotNeeded("rows are read once, at the start")),
    Entry("validation_shuffle", NotNeeded("the order of validation changes no metric")),
    Entry("use_shm", NotNeeded("rows are read once")),
    *same(
        NotNeeded(_MEDIA),
        "image_key video_key audio_key image_patch_size mm_processor_kwargs mm_processor_kwargs.*",
    ),
    *same(
        NotNeeded("the schemas of agent.tools and agent.function_tools are counted"),
        "tool_config_path function_tool_path",
    ),
    Entry("custom_cls.path", To("data.dataset_class.path", if_set())),
    Entry("custom_cls.name", To("data.dataset_class.name", if_set())),
    *same(
        Unless(
            (),
            "a sampler is a function here: register yours in algorithm.extensions, name it in data.sampler",
            "not set",
        ),
        "sampler.class_path sampler.class_name",
    ),
    *same(
        NotNeeded("read by a sampler class of verl alone; weights of sources are data.source_weights"),
        "sampler.group_key sampler.group_names sampler.group_ratios",
    ),
    *same(
        Unless((), "data that is made during training has no place here: write it to files", "not set"),
        "datagen.path datagen.name",
    ),
)
"""What becomes of the keys of `data`."""
