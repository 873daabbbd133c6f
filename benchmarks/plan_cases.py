"""Runs that `benchmarks/plan.py` plans and carries out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run."""

    model: Mapping[str, Any]
    """Settings of its config.json, `model_type` among them; a Qwen3 where there is none."""
    prompt: int = 64
    response: int = 128
    prompts: int = 2
    samples: int = 4
    settings: tuple[str, ...] = ()
    """`{model}` is the folder of the model, `{reward_model}` that of a reward model of its form."""
    ranks: int = 1
    """Processes with a model, on Ray where there are several; with `resources.apart` one of them generates."""


def model(hidden: int, layers: int, inner: int, vocab: int, **others: Any) -> Mapping[str, Any]:
    """Settings of a model's config.json."""
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner, "vocab_size": vocab, **others,
    }  # fmt: skip


SMALL = model(256, 6, 768, 8192)
MIDDLE = model(512, 6, 1536, 8192)
LARGE = model(768, 10, 2304, 32768)
WIDE = model(256, 2, 768, 100_000)
CASES = {
    "small": Case(model=SMALL, prompts=4, samples=8),
    "wide vocabulary": Case(model=WIDE),
    "middle": Case(model=MIDDLE),
    "middle, budget 512": Case(model=MIDDLE, settings=("actor.engine.max_tokens_per_device=512",)),
    "middle, 32 samples": Case(model=MIDDLE, prompts=4, samples=8),
    "middle, long prompts": Case(model=MIDDLE, prompt=500, response=64),
    "middle, long answers": Case(model=MIDDLE, response=700, prompts=1, samples=2),
    "middle, checkpointing": Case(model=MIDDLE, settings=("model.gradient_checkpointing=true",)),
    "middle, two updates": Case(model=MIDDLE, settings=("actor.samples_per_update=4",)),
    "middle, reference": Case(model=MIDDLE, settings=("algorithm.use_kl_loss=true",)),
    "middle, critic": Case(model=MIDDLE, settings=("algorithm=ppo",)),
    "middle, bfloat16": Case(model=MIDDLE, settings=("model.dtype=bfloat16",)),
    "middle, muon": Case(model=MIDDLE, settings=("actor.optim.name=muon",)),
    "large": Case(model=LARGE),
    "large, adapter": Case(model=LARGE, settings=("model.lora.rank=16",)),
    "middle, two ranks": Case(model=MIDDLE, ranks=2),
    "middle, tensor parallel": Case(model=MIDDLE, ranks=2, settings=("actor.engine.tensor_parallel=2",)),
}
"""Of which benchmarks/RESULTS.md has had a table since they were chosen."""

DEEP = model(128, 32, 384, 8192)
TIED, APART = (model(256, 4, 768, 151_936, tie_word_embeddings=is_tied) for is_tied in (True, False))
FEW_LAYERS = model(1024, 4, 2816, 16_384)
EXPERTS = model(
    384, 4, 512, 8192, model_type="qwen3_moe", moe_intermediate_size=192, num_experts=16, num_experts_per_tok=4,
    decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
LATENT = model(
    384, 4, 1024, 8192, model_type="deepseek_v3", num_key_value_heads=6, q_lora_rank=128, kv_lora_rank=64,
    qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64, head_dim=32, n_routed_experts=8, num_experts_per_tok=2,
    moe_intermediate_size=256, first_k_dense_replace=1, n_group=1, topk_group=1,
)  # fmt: skip
LLAMA, PHI, OLMO = (
    model(512, 6, 1536, 8192, model_type=name, tie_word_embeddings=False)
    for name in ("llama", "phi3", "olmo2")
)
GEMMA = model(384, 6, 1024, 16_384, model_type="gemma2", sliding_window=64, query_pre_attn_scalar=64)
HALF, AGAIN = "model.dtype=bfloat16", "model.gradient_checkpointing=true"
FURTHER = {
    "vocabulary of 152 k, tied": Case(model=TIED, response=96),
    "vocabulary of 152 k, a head of its own": Case(model=APART, response=96),
    "vocabulary of 152 k, top-p of 0.9": Case(model=TIED, response=48, settings=("rollout.top_p=0.9",)),
    "entropy, temperature of 0.7": Case(
        model=WIDE, settings=("algorithm.entropy_coeff=0.01", "rollout.temperature=0.7")
    ),
    "32 layers of 128": Case(model=DEEP, prompts=4),
    "2 layers of 1,536": Case(model=model(1536, 2, 4096, 8192)),
    "prompts of 1,500": Case(model=MIDDLE, prompt=1500, response=32, samples=6),
    "answers of 600": Case(model=MIDDLE, prompt=16, response=600, samples=3),
    "float64": Case(model=MIDDLE, settings=("model.dtype=float64",)),
    "bfloat16, reference": Case(model=MIDDLE, settings=(HALF, "algorithm.use_kl_loss=true")),
    "PPO, reference": Case(model=MIDDLE, settings=("algorithm=ppo", "algorithm.use_kl_loss=true")),
    "PPO, 4 updates, 3 epochs": Case(
        model=MIDDLE, prompts=4,
        settings=(
            "algorithm=ppo", "actor.samples_per_update=4", "actor.epochs=3", "critic.samples_per_update=4",
            "critic.epochs=3",
        ),
    ),
    "PRIME": Case(model=MIDDLE, settings=("algorithm.adv_estimator=prime",)),
    "KL-Cov, 2 epochs": Case(model=MIDDLE, settings=("algorithm=kl_cov", "actor.epochs=2")),
    "best 2 of 8": Case(model=MIDDLE, prompts=4, samples=8, settings=("algorithm.keep.best=2",)),
    "distillation": Case(
        model=MIDDLE,
        settings=("algorithm=on_policy_distillation", "teacher.path={model}", "actor.samples_per_update=4"),
    ),
    "budget of 65,536, 96 samples": Case(
        model=SMALL, prompts=12, samples=8, settings=("actor.engine.max_tokens_per_device=65536",)
    ),
    "budget of 192": Case(model=MIDDLE, prompts=4, settings=("actor.engine.max_tokens_per_device=192",)),
    "64 samples, 8 at a time": Case(
        model=MIDDLE, prompts=8, samples=8, response=48, settings=("rollout.max_running=8",)
    ),
    "adapter of 1": Case(model=FEW_LAYERS, settings=("model.lora.rank=1",)),
    "adapter of 128, reference": Case(
        model=FEW_LAYERS, settings=("model.lora.rank=128", "algorithm.use_kl_loss=true")
    ),
    "adapter, bfloat16, checkpointing": Case(model=FEW_LAYERS, settings=("model.lora.rank=8", HALF, AGAIN)),
    "adapter, folder in bfloat16": Case(
        model={**FEW_LAYERS, "dtype": "bfloat16"}, settings=("model.lora.rank=8", HALF)
    ),
    "16 experts, bfloat16": Case(model=EXPERTS, settings=(HALF,)),
    "Gemma 2, bfloat16": Case(model=GEMMA, settings=(HALF,)),
    "Gemma 2, checkpointing": Case(model=GEMMA, settings=(AGAIN,)),
    "two ranks, PPO": Case(model=MIDDLE, ranks=2, settings=("algorithm=ppo",)),
    "two stages": Case(
        model=MIDDLE, ranks=2,
        settings=("actor.engine.pipeline_parallel=2", "actor.engine.max_tokens_per_device=512"),
    ),
    "sequences over two ranks": Case(model=MIDDLE, ranks=2, settings=("actor.engine.sequence_parallel=2",)),
    "experts over two ranks": Case(model=EXPERTS, ranks=2, settings=("actor.engine.expert_parallel=2",)),
    "generation apart": Case(
        model=MIDDLE, ranks=2, settings=("resources.apart={rollout:1}", "rollout.max_staleness=1")
    ),
    "one key head of 8, head of its own": Case(model={**LLAMA, "num_key_value_heads": 1}),
    "Phi 3, bfloat16, 2 updates": Case(model=PHI, settings=(HALF, "actor.samples_per_update=4")),
    "OLMo 2, as many key heads, groups of 2": Case(
        model={**OLMO, "num_key_value_heads": 8}, prompts=6, samples=2, response=100
    ),
    "latent attention, 8 experts": Case(model=LATENT),
    "PPO, reward model": Case(model=MIDDLE, settings=("algorithm=ppo", "reward_model.path={reward_model}")),
    "24 prompts, a sample each": Case(
        model=SMALL, prompts=24, samples=1, response=80, settings=("algorithm.adv_estimator=reinforce_plus_plus",)
    ),
    "a prompt of 800, 16 samples of 24": Case(model=MIDDLE, prompt=800, prompts=1, samples=16, response=24),
    "PPO, muon, bfloat16, checkpointing": Case(
        model=MIDDLE, settings=("algorithm=ppo", "actor.optim.name=muon", HALF, AGAIN)
    ),
    "two ranks, reference, groups of 3": Case(
        model=MIDDLE, ranks=2, samples=3, settings=("algorithm.use_kl_loss=true",)
    ),
    "two ranks, gradients added up each time": Case(
        model=MIDDLE, prompts=4, ranks=2,
        settings=("actor.engine.gradient_sync=each", "actor.engine.max_tokens_per_device=350"),
    ),
    "two ranks, adapter": Case(model=FEW_LAYERS, ranks=2, settings=("model.lora.rank=8",)),
}  # fmt: skip
"""Chosen later, by what a reader might ask for."""

HUGE, HUGE_APART = (model(256, 3, 768, 200_000, tie_word_embeddings=is_tied) for is_tied in (True, False))
GEMMA_3 = model(
    320, 6, 1280, 48_000, model_type="gemma3_text", num_attention_heads=4, num_key_value_heads=2, head_dim=80,
    sliding_window=96, query_pre_attn_scalar=80,
)  # fmt: skip
GPT_OSS = model(
    320, 4, 320, 24_000, model_type="gpt_oss", num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    num_local_experts=12, num_experts_per_tok=3, sliding_window=48, tie_word_embeddings=False,
)  # fmt: skip
MIXTRAL = model(
    448, 5, 960, 12_000, model_type="mixtral", num_local_experts=6, num_experts_per_tok=2, num_attention_heads=7,
    num_key_value_heads=7, tie_word_embeddings=False,
)  # fmt: skip
GLM_MOE = model(
    384, 5, 1152, 20_000, model_type="glm4_moe", moe_intermediate_size=224, n_routed_experts=20,
    num_experts_per_tok=4, n_shared_experts=1, first_k_dense_replace=1, tie_word_embeddings=False,
)  # fmt: skip
GRANITE = model(576, 8, 1536, 30_000, model_type="granite", num_key_value_heads=3)
COHERE = model(
    448, 7, 1280, 25_000, model_type="cohere2", num_attention_heads=7, num_key_value_heads=7, sliding_window=64,
)  # fmt: skip
STARCODER = model(
    512, 8, 2048, 16_000, model_type="starcoder2", sliding_window=300, num_key_value_heads=2, tie_word_embeddings=True
)  # fmt: skip
NEOX = model(512, 6, 2048, 12_000, model_type="gpt_neox", num_key_value_heads=8, tie_word_embeddings=False)
LARGER = model(1024, 6, 2816, 32_000, model_type="llama", tie_word_embeddings=False)
QWEN_2 = model(384, 16, 1024, 20_000, model_type="qwen2", num_key_value_heads=2)
SMOLLM = model(448, 10, 1216, 9_000, model_type="smollm3", num_attention_heads=7, num_key_value_heads=7)
MANY_EXPERTS = model(
    512, 6, 512, 16_000, model_type="qwen3_moe", moe_intermediate_size=128, num_experts=64, num_experts_per_tok=8,
    decoder_sparse_step=1, mlp_only_layers=[],
)  # fmt: skip
ERNIE_MOE = model(
    384, 5, 1024, 20_000, model_type="ernie4_5_moe", moe_intermediate_size=256, moe_num_experts=16, moe_k=4,
    moe_num_shared_experts=2, num_attention_heads=6, num_key_value_heads=2,
)  # fmt: skip
QWEN_VL = model(
    512, 6, 1536, 16_000, model_type="qwen2_5_vl",
    rope_parameters={"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]},
    vision_config={
        "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 512,
        "fullatt_block_indexes": [1],
    },
)  # fmt: skip
CRITIC, REFERENCE = "algorithm=ppo", "algorithm.use_kl_loss=true"
DRAWN = {
    "200 k, bfloat16": Case(model=HUGE, response=64, settings=(HALF,)),
    "200 k, a head of its own, bfloat16, reference": Case(model=HUGE_APART, response=48, settings=(HALF, REFERENCE)),
    "200 k, ReMax": Case(model=HUGE, response=48, prompts=1, settings=("algorithm=remax",)),
    "200 k, ReMax, bfloat16": Case(model=HUGE, response=48, samples=1, settings=("algorithm=remax", HALF)),
    "Gemma 3, 48 k": Case(model=GEMMA_3, response=200),
    "Gemma 3, bfloat16, checkpointing": Case(model=GEMMA_3, response=200, settings=(HALF, AGAIN)),
    "Gemma 3, adapter, bfloat16": Case(model=GEMMA_3, prompt=300, settings=(HALF, "model.lora.rank=16")),
    "gpt-oss": Case(model=GPT_OSS),
    "gpt-oss, bfloat16, checkpointing": Case(model=GPT_OSS, settings=(HALF, AGAIN)),
    "Mixtral, bfloat16, 12 samples": Case(model=MIXTRAL, samples=12, prompts=1, response=80, settings=(HALF,)),
    "64 experts, bfloat16": Case(model=MANY_EXPERTS, settings=(HALF,)),
    "64 experts, bfloat16, checkpointing, reference": Case(
        model=MANY_EXPERTS, response=200, settings=(HALF, AGAIN, REFERENCE)
    ),
    "GLM-4 with experts, RLOO": Case(model=GLM_MOE, settings=("algorithm=rloo",)),
    "ERNIE with experts, bfloat16, 2 updates": Case(
        model=ERNIE_MOE, prompts=4, settings=(HALF, "actor.samples_per_update=8")
    ),
    "Granite, bfloat16, answers of 500": Case(model=GRANITE, prompt=32, response=500, prompts=1, settings=(HALF,)),
    "Cohere 2, 32 samples": Case(model=COHERE, prompts=1, samples=32, response=60),
    "StarCoder 2, prompts of 2,000": Case(model=STARCODER, prompt=2000, response=40, prompts=1, samples=3),
    "GPT-NeoX, checkpointing": Case(model=NEOX, response=160, settings=(AGAIN,)),
    "135 M, checkpointing": Case(model=LARGER, prompt=200, response=40, settings=(AGAIN,)),
    "16 layers, checkpointing, answers of 300": Case(model=QWEN_2, response=300, settings=(AGAIN,)),
    "16 layers, checkpointing, PPO": Case(model=QWEN_2, settings=(AGAIN, CRITIC)),
    "16 layers, adapter of 64, checkpointing": Case(
        model=QWEN_2, response=200, settings=(AGAIN, "model.lora.rank=64")
    ),
    "folder, adapter, checkpointing, all bfloat16": Case(
        model={**LARGER, "dtype": "bfloat16"}, response=48, settings=("model.lora.rank=32", HALF, AGAIN)
    ),
    "SmolLM 3, 32 prompts, a sample each": Case(
        model=SMOLLM, prompts=32, samples=1, response=60, settings=("algorithm=reinforce_pp",)
    ),
    "SmolLM 3, 48 samples, 4 at a time": Case(
        model=SMOLLM, prompts=6, samples=8, response=60,
        settings=("rollout.max_running=4", "actor.engine.max_tokens_per_device=256"),
    ),
    "Qwen 2.5-VL, text": Case(model=QWEN_VL, settings=(HALF,)),
    "135 M, REINFORCE++ with a baseline, bfloat16": Case(
        model=LARGER, response=48, settings=("algorithm=reinforce_pp_baseline", HALF)
    ),
    "two ranks, bfloat16, checkpointing": Case(model=QWEN_2, ranks=2, settings=(HALF, AGAIN)),
    "two ranks, PPO, reference": Case(model=SMOLLM, ranks=2, settings=(CRITIC, REFERENCE)),
    "two ranks, 64 experts": Case(model=MANY_EXPERTS, ranks=2),
    "tensor parallel, bfloat16, reference": Case(
        model=MIDDLE, ranks=2,
        settings=(HALF, REFERENCE, "actor.engine.tensor_parallel=2", "reference.engine.tensor_parallel=2"),
    ),
    "tensor parallel, PPO": Case(
        model=MIDDLE, ranks=2, settings=(CRITIC, "actor.engine.tensor_parallel=2", "critic.engine.tensor_parallel=2")
    ),
    "sequences over two ranks, prompts of 600": Case(
        model=QWEN_2, ranks=2, prompt=600, response=64, settings=("actor.engine.sequence_parallel=2",)
    ),
    "contexts over two ranks": Case(model=MIDDLE, ranks=2, prompt=400, settings=("actor.engine.context_parallel=2",)),
    "generation apart, bfloat16, two versions ahead": Case(
        model=QWEN_2, ranks=2, settings=("resources.apart={rollout:1}", "rollout.max_staleness=2", HALF)
    ),
    "two ranks and generation apart": Case(
        model=MIDDLE, ranks=3, samples=8, settings=("resources.apart={rollout:1}", "rollout.max_staleness=1")
    ),
}  # fmt: skip
"""Drawn by somebody who had not written the plan."""

SECOND_DRAW = {
    "second draw 1: 65 k, adapter of 64, two ranks": Case(
        model=model(384, 4, 1536, 65_536), prompt=48, response=48, ranks=2,
        settings=(HALF, REFERENCE, "model.lora.rank=64"),
    ),
    "second draw 2: 2 layers of 896, adapter of 64, bfloat16": Case(
        model=model(896, 2, 2368, 32_000, model_type="qwen2"), prompt=48, response=200, samples=2,
        settings=(HALF, "model.lora.rank=64"),
    ),
    "second draw 3: PPO, checkpointing, prompts of 900, two ranks": Case(
        model=model(256, 8, 768, 49_152, model_type="llama"), prompt=900, response=48, prompts=4, samples=8, ranks=2,
        settings=(CRITIC, AGAIN),
    ),
    "second draw 4: 152 k, adapter of 64": Case(
        model=model(768, 2, 2048, 151_936, model_type="qwen2"), prompt=128, response=48, prompts=4, samples=2,
        settings=("model.lora.rank=64",),
    ),
    "second draw 5: PPO, 100 k, answers of 400, two ranks": Case(
        model=model(320, 6, 832, 100_000, model_type="smollm3", num_attention_heads=5, num_key_value_heads=5),
        prompt=900, response=400, prompts=1, samples=8, ranks=2, settings=(CRITIC,),
    ),
    "second draw 6: PPO, 28 layers, checkpointing": Case(
        model=model(512, 28, 2048, 32_000, model_type="qwen2"), prompt=128, response=48, prompts=1, samples=2,
        settings=(CRITIC, AGAIN),
    ),
    "second draw 8: 128 k, checkpointing, adapter of 64": Case(
        model=model(384, 4, 1536, 128_256, model_type="qwen2", tie_word_embeddings=False), prompt=900, response=48,
        prompts=1, samples=8, settings=(AGAIN, "model.lora.rank=64"),
    ),
    "second draw 10: Gemma 2, PPO, adapter of 8": Case(
        model=model(704, 8, 1856, 49_152, model_type="gemma2", num_attention_heads=11, num_key_value_heads=11),
        prompt=48, response=48, prompts=4, samples=2, settings=(CRITIC, "model.lora.rank=8"),
    ),
}  # fmt: skip
"""Eight of twelve that a generator of random numbers drew; four with thousands of tokens in bfloat16, or
13,000, are left out, and heads are as many as divide the width."""
