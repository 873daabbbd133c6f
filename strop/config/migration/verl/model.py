"""Models: the section `actor_rollout_ref.model`, and the same tree below `critic.model` and in fine-tuning."""

from __future__ import annotations

from strop.config.migration.rules import NotNeeded, Refused, To, Unless
from strop.config.migration.tables import Entry, same, under
from strop.config.migration.values import if_set, integer, model_path, number, one_or_more

_CONFIG = "the model's config.json is taken as it is: change it there"
_MEGATRON_LORA = "belongs to verl's Megatron adapters; ours are under model.lora"
_LEFT_AS_THEY_ARE = (
    Entry("override_config", Unless(({},), _CONFIG, "empty there too")),
    Entry("override_config.*", Refused(_CONFIG)),
    *same(
        Unless((False,), "multi-token prediction is neither trained nor used: leave it off", "off there too"),
        "mtp.enable mtp.enable_train mtp.enable_rollout",
    ),
    Entry("mtp.*", NotNeeded("read with mtp.enable=true alone")),
    Entry(
        "mtp",
        Unless(({},), "multi-token prediction is neither trained nor used: leave it off", "off there too"),
    ),
)


def model_entries(
    section: str, ours: str, *, engine: str, has_own_template: bool = True
) -> tuple[Entry, ...]:
    """What becomes of the keys of a model.

    Args:
        section: their section.
        ours: our section with `path` and `lora`.
        engine: our section with `offload_activations`.
        has_own_template: it is the policy, whose tokenizer and template count.
    """
    template = "the chat template is that of the tokenizer in model.path: put yours there"
    tokenizer = Unless((), "the tokenizer is read from model.path: put yours there", "not set")
    checkpointing = (
        To("model.gradient_checkpointing")
        if has_own_template
        else NotNeeded("follows model.gradient_checkpointing")
    )
    return under(
        section,
        Entry("path", To(f"{ours}.path", model_path(f"{ours}.path"))),
        Entry("enable_gradient_checkpointing", checkpointing),
        Entry("enable_activation_offload", To(f"{engine}.offload_activations")),
        Entry("trust_remote_code", To("model.trust_remote_code")),
        Entry("lora_rank", To(f"{ours}.lora.rank", integer)),
        Entry("lora_alpha", To(f"{ours}.lora.alpha", number)),
        Entry("target_modules", To(f"{ours}.lora.target_modules", one_or_more)),
        Entry("lora_adapter_path", To(f"{ours}.lora.path", if_set())),
        Entry("exclude_modules", Unless(([],), f"list the modules to adapt in {ours}.lora.target_modules")),
        Entry("target_parameters", Unless(([],), "adapters are put on linear layers alone")),
        *same(
            NotNeeded(_MEGATRON_LORA),
            "lora.type lora.merge lora.rank lora.alpha lora.dropout lora.target_modules lora.exclude_modules "
            "lora.dropout_position lora.lora_A_init_method lora.lora_B_init_method lora.a2a_experimental lora.dtype "
            "lora.adapter_path lora.freeze_vision_model lora.freeze_vision_projection lora.freeze_language_model",
        ),
        Entry("use_liger", To("model.use_liger")),
        *same(NotNeeded("sequences are always packed, never padded"), "use_remove_padding truncate_padding"),
        *same(
            NotNeeded("log-probs never need the logits of all tokens at once"),
            "use_fused_kernels fused_kernel_options.impl_backend use_fused_loss",
        ),
        Entry("return_last_hidden_state", NotNeeded("hidden states stay inside the engine")),
        Entry("use_shm", NotNeeded("weights are read once")),
        Entry(
            "hf_config_path", Unless((), "config and weights are read from one folder, model.path", "not set")
        ),
        Entry("tokenizer_path", tokenizer if has_own_template else NotNeeded("it reads the policy's tokens")),
        Entry(
            "external_lib",
            Unless((), "nothing of yours is imported before the model: use transformers' own", "none"),
        ),
        Entry(
            "custom_chat_template",
            Unless((), template, "not set") if has_own_template else NotNeeded(template),
        ),
        *same(
            NotNeeded(f"lower {engine}.max_tokens_per_device for less memory"),
            "tiled_mlp.enabled tiled_mlp.num_shards",
        ),
        *_LEFT_AS_THEY_ARE,
    )
