"""Tiny configurations of many more families: of those that are carried, and of those that are refused by name."""

from __future__ import annotations

from typing import Any

import transformers

_KINDS = ["sliding_attention", "full_attention"]
_WINDOW: dict[str, Any] = {"sliding_window": 5, "layer_types": _KINDS}
_LATENT: dict[str, Any] = {
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "kv_lora_rank": 8, "q_lora_rank": 16,
    "num_key_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_HEAD = {"head_dim": 8}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 50,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.0],
}  # fmt: skip
_GRANITE = {"logits_scaling": 4.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.3}
_PER_LAYER = {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8}
_GEMMA4 = {**_HEAD, **_WINDOW, "global_head_dim": 16, "num_global_key_value_heads": 1}
_PARTIAL = {**_ROPE, "partial_rotary_factor": 0.5}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_LLAMA4 = {**_HEAD, "num_local_experts": 2, "intermediate_size_mlp": 48, "rope_parameters": _ROPE}

MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {**_HEAD, **_WINDOW, **_EXPERTS, "num_dense_layers": 1}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "bitnet": ("bitnet", {}),
    "cohere": ("cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    "deepseek_v3_experts": (
        "deepseek_v3",
        {
            **_LATENT,
            **_ROUTED,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        }
        | {"rope_parameters": _YARN},
    ),
    "dots1": (
        "dots1",
        {**_HEAD, **_WINDOW, **_ROUTED, **_ONE_GROUP, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "ernie4_5": ("ernie4_5", _HEAD),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    ),
    "exaone4": ("exaone4", {**_HEAD, **_WINDOW}),
    "exaone_moe": ("exaone_moe", {**_HEAD, **_WINDOW, **_EXPERTS}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": ("gemma", _HEAD),
    "gemma3_scaled": (
        "gemma3_text",
        {**_HEAD, **_WINDOW, "query_pre_attn_scalar": 12, "final_logit_softcapping": 3.0}
        | {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": _ROPE,
            }
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {**_HEAD, **_PER_LAYER, "num_hidden_layers": 4, "sliding_window": 5, "layer_types": _KINDS * 2}
        | {"laurel_rank": 4, "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4},
    ),
    "gemma4": ("gemma4_text", {**_GEMMA4, **_PER_LAYER, "num_kv_shared_layers": 0}),
    "gemma4_shared": (
        "gemma4_text",
        {
            **_GEMMA4,
            **_PER_LAYER,
            "num_hidden_layers": 4,
            "layer_types": _KINDS * 2,
            "num_kv_shared_layers": 2,
        },
    ),
    "gemma4_moe": (
        "gemma4_text",
        {**_GEMMA4, **_PER_LAYER, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
        | {"attention_k_eq_v": True},
    ),
    "glm": ("glm", _HEAD),
    "glm4_moe": ("glm4_moe", {**_HEAD, **_ROUTED, **_ONE_GROUP, "first_k_dense_replace": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {**_LATENT, **_ROUTED, **_ONE_GROUP, "first_k_dense_replace": 1}),
    "gpt_bigcode": ("gpt_bigcode", {"n_positions": 64, "n_inner": 48}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_oss_yarn": ("gpt_oss", {**_HEAD, **_WINDOW, **_LOCAL}),
    "granite_scaled": ("granite", {**_GRANITE, "attention_multiplier": 0.2}),
    "granite_swa": ("granite_swa", _WINDOW),
    "granitemoe": ("granitemoe", {**_GRANITE, **_LOCAL, "attention_multiplier": 0.2}),
    "granitemoehybrid_attention": (
        "granitemoehybrid",
        {**_LOCAL, "shared_intermediate_size": 16, "layer_types": ["attention"] * 2, "mamba_n_heads": 4},
    ),
    "granitemoeshared": ("granitemoeshared", {**_GRANITE, **_LOCAL, "shared_intermediate_size": 16}),
    "helium": ("helium", _HEAD),
    "hunyuan": ("hunyuan_v1_dense", _HEAD),
    "hunyuan_moe": ("hunyuan_v1_moe", {**_HEAD, "num_experts": 4, "moe_topk": 2}),
    "jetmoe": ("jetmoe", {**_LOCAL, "kv_channels": 8}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "llama4": (
        "llama4_text",
        {**_LLAMA4, "attention_chunk_size": 5, "floor_scale": 4, "no_rope_layers": [1, 0]},
    ),
    "longcat_flash": (
        "longcat_flash",
        {**_LATENT, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "head_dim": 4}
        | {"n_routed_experts": 4, "zero_expert_num": 2, "moe_topk": 2},
    ),
    "mimo_v2_flash": ("mimo_v2_flash", {**_HEAD, **_ROUTED}),
    "minicpm3": ("minicpm3", _LATENT),
    "minimax_m2": ("minimax_m2", {**_HEAD, **_LOCAL}),
    "ministral": ("ministral", {**_HEAD, **_WINDOW}),
    "ministral3": (
        "ministral3",
        {**_HEAD, "sliding_window": None, "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1}},
    ),
    "olmo": ("olmo", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "persimmon": ("persimmon", {}),
    "phi3": ("phi3", {"sliding_window": 5}),
    "phi3_longrope": ("phi3", {"original_max_position_embeddings": 50, "rope_parameters": _LONGROPE}),
    "qwen3_moe_pair": ("qwen3_moe", {**_HEAD, **_EXPERTS, "num_experts": 2, "num_experts_per_tok": 1}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3_next_hybrid": (
        "qwen3_next",
        {**_HEAD, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16, "rope_parameters": _PARTIAL},
    ),
    "qwen3_5": ("qwen3_5_text", {**_HEAD, **_DELTA, "rope_parameters": _PARTIAL}),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        {**_HEAD, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16, "rope_parameters": _PARTIAL},
    ),
    "qwen2_window": ("qwen2", {**_WINDOW, "use_sliding_window": True}),
    "seed_oss": ("seed_oss", _HEAD),
    "solar_open": ("solar_open", {**_HEAD, **_ROUTED, **_ONE_GROUP}),
    "starcoder2": ("starcoder2", {"sliding_window": 5}),
    "vaultgemma": (
        "vaultgemma",
        {**_HEAD, **_WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "youtu": ("youtu", _LATENT),
}
"""Families that packed computation must run: kind -> model type and what it has beside the common shape."""

EVERY_RUN = ("llama4", "gemma4", "qwen3_next_hybrid")
"""Those of MORE that every run of the tests compares: chunks and tempered queries; layers of different heads; layers
that carry a state. The
others are slow tests."""

_STATE, _OWN = "carry a state from token to token", "computes attention in code of its own"
_HEARS = "which has a part that hears, and sound is given to no model here"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3n": ({}, f"Gemma3nForConditionalGeneration, {_HEARS}"),
    "phi4_multimodal": ({}, f"Phi4MultimodalForCausalLM, {_HEARS}"),
    "qwen2_5_omni": ({}, f"qwen2_5_omni, {_HEARS}"),
    "qwen2_audio": ({}, f"qwen2_audio, {_HEARS}"),
    "whisper": ({}, f"WhisperForCausalLM, {_HEARS}"),
    "bamba": ({"attn_layer_indices": [1]}, rf"BambaForCausalLM, which has layers .* {_STATE}"),
    "bloom": ({}, f"BloomForCausalLM, which {_OWN}"),
    "codegen": ({}, f"CodeGenForCausalLM, which {_OWN}"),
    "deepseek_v32": ({}, "DeepseekV32ForCausalLM, which chooses by an index"),
    "deepseek_v4": ({}, "DeepseekV4ForCausalLM, which attends to compressed runs"),
    "diffllama": ({}, "DiffLlamaForCausalLM, which attends twice"),
    "doge": ({}, "DogeForCausalLM, which weighs earlier tokens"),
    "falcon": ({}, f"FalconForCausalLM, which {_OWN}"),
    "falcon_h1": ({}, rf"FalconH1ForCausalLM, which has layers \(hybrid\) that {_STATE}"),
    "falcon_mamba": ({}, rf"FalconMambaForCausalLM, which has layers \(.*\) that {_STATE}"),
    "gemma3_text": ({"use_bidirectional_attention": True}, "Gemma3ForCausalLM, which looks at later tokens"),
    "glm_moe_dsa": ({}, "GlmMoeDsaForCausalLM, which chooses by an index"),
    "gpt_neo": ({}, f"GPTNeoForCausalLM, which {_OWN}"),
    "gptj": ({}, f"GPTJForCausalLM, which {_OWN}"),
    "jamba": ({}, f"JambaForCausalLM, which has layers .* {_STATE}"),
    "kimi_linear": ({}, f"KimiLinearForCausalLM, which has layers .* {_STATE}"),
    "lfm2": (
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        rf"Lfm2ForCausalLM, which has layers \(conv\) that {_STATE}",
    ),
    "mamba": ({}, rf"MambaForCausalLM, which has layers \(.*\) that {_STATE}"),
    "mamba2": ({}, rf"Mamba2ForCausalLM, which has layers \(.*\) that {_STATE}"),
    "minimax": ({}, rf"MiniMaxForCausalLM, which has layers \(linear_attention\) that {_STATE}"),
    "mpt": ({}, f"MptForCausalLM, which {_OWN}"),
    "nemotron": ({}, "NemotronForCausalLM, which does not hand the arguments"),
    "nemotron_h": ({}, f"NemotronHForCausalLM, which has layers .* {_STATE}"),
    "olmo_hybrid": ({}, rf"OlmoHybridForCausalLM, which has layers \(linear_attention\) that {_STATE}"),
    "phimoe": ({}, "PhimoeForCausalLM, which draws experts at random"),
    "recurrent_gemma": ({}, f"RecurrentGemmaForCausalLM, which has layers .* {_STATE}"),
    "rwkv": ({}, rf"RwkvForCausalLM, which has layers \(.*\) that {_STATE}"),
    "stablelm": ({}, "StableLmForCausalLM, which does not hand the arguments"),
    "zamba2": ({}, f"Zamba2ForCausalLM, which has layers .* {_STATE}"),
    # with images
    "llava": ({}, "is a llava, which reads images in a way that is not known here"),
    "mistral3": ({}, "is a mistral3, which reads images in a way that is not known here"),
    # no language models
    "bert": ({}, r"BertLMHeadModel, which looks at later tokens too \(is_decoder is false\)"),
    "t5": ({}, "is a t5, which transformers does not have as a causal language model"),
}
"""Model type -> what its configuration says beside the defaults of transformers, and the sentence that refuses it."""


def more(kind: str, shape: dict[str, Any]) -> Any:
    """A tiny configuration of one of MORE, over the common shape."""
    model_type, settings = MORE[kind]
    return transformers.AutoConfig.for_model(model_type, **{**shape, **settings})
