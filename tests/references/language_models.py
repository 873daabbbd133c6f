"""Tiny random models of several architectures, and what they compute when asked one sequence at a time.

The references here are the models' own forward passes with the masks of transformers: no packing, no shared
prompt, no chunked head.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from references.model_families import more

VOCAB = 61
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
WINDOW = 5
"""Sliding window of the models that have one: shorter than the sequences of the tests."""


def config(kind: str) -> Any:
    """A tiny configuration of one architecture."""
    t = transformers
    match kind:
        case "qwen3":  # grouped queries, tied head, norms on queries and keys
            return t.Qwen3Config(**_SHAPE, head_dim=8, tie_word_embeddings=True)
        case "qwen3_mha":
            return t.Qwen3Config(**{**_SHAPE, "num_key_value_heads": 4}, head_dim=8)
        case "llama":  # grouped queries, a head of its own
            return t.LlamaConfig(**_SHAPE)
        case "llama_biased":  # a bias of every matrix but the head
            return t.LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True)
        case "llama_mqa":
            return t.LlamaConfig(**{**_SHAPE, "num_key_value_heads": 1})
        case "gpt2":  # learned positions, biases, dropout modules
            return t.GPT2Config(
                vocab_size=VOCAB,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=64,
                bos_token_id=None,
                eos_token_id=1,
                pad_token_id=0,
            )
        case "opt":  # learned positions with an offset, dropout rates as plain numbers
            return t.OPTConfig(
                vocab_size=VOCAB,
                hidden_size=32,
                num_hidden_layers=2,
                ffn_dim=48,
                num_attention_heads=4,
                max_position_embeddings=64,
                word_embed_proj_dim=32,
                bos_token_id=None,
                eos_token_id=1,
                pad_token_id=0,
                dropout=0.3,
                attention_dropout=0.3,
            )
        case "phi":  # partial rotary embedding, a head with a bias
            return t.PhiConfig(**_SHAPE)
        case "mistral":  # every layer with a sliding window
            return t.MistralConfig(**_SHAPE, sliding_window=WINDOW)
        case "gemma3":  # layers with and without a window
            kinds = ["sliding_attention", "full_attention"]
            return t.Gemma3TextConfig(**_SHAPE, head_dim=8, sliding_window=WINDOW, layer_types=kinds)
        case "mistral_wide":  # a window that only long sequences reach
            return t.MistralConfig(**_SHAPE, sliding_window=WIDE_WINDOW)
        case "mixtral":  # experts, and a router that draws noise in training
            return t.MixtralConfig(**_SHAPE, num_local_experts=4, router_jitter_noise=0.3)
        case "nanochat":  # capped logits
            return t.NanoChatConfig(**_SHAPE, final_logit_softcapping=15.0)
        case "deepseek_v3":  # keys and values of different size
            parts = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8}
            return t.DeepseekV3Config(
                **{**_SHAPE, "num_key_value_heads": 4}, **parts, first_k_dense_replace=2
            )
        case "doge":  # attention masks of its own
            return t.DogeConfig(**_SHAPE)
        case "deepseek_v32":  # an index chooses the keys
            parts = {
                "qk_rope_head_dim": 4,
                "qk_nope_head_dim": 8,
                "v_head_dim": 8,
                "kv_lora_rank": 8,
                "q_lora_rank": 16,
            }
            index = {"index_topk": 4, "index_n_heads": 2, "index_head_dim": 8, "first_k_dense_replace": 2}
            return t.DeepseekV32Config(**{**_SHAPE, "num_key_value_heads": 4}, **parts, **index)
        case "stablelm":  # calls its attention without the arguments of the forward call
            return t.StableLmConfig(**_SHAPE)
        case "mamba":
            return t.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
        case "lfm2":  # one convolution, one attention layer
            return t.Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention"])
        case "gemma2":  # soft-capped attention and logits, layers with and without a window
            kinds = ["sliding_attention", "full_attention"]
            caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
            return t.Gemma2Config(**_SHAPE, **caps, head_dim=8, sliding_window=WINDOW, layer_types=kinds)
        case "gpt_oss":  # sinks, experts, layers with and without a window
            kinds = ["sliding_attention", "full_attention"]
            experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
            return t.GptOssConfig(
                **_SHAPE,
                **experts,
                head_dim=8,
                sliding_window=WINDOW,
                layer_types=kinds,
                rope_parameters=_ROPE,
            )
        case "deepseek_v2":  # latent attention with few queries' ranks, experts in groups
            parts = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 8}
            experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            return t.DeepseekV2Config(
                **{**_SHAPE, "num_key_value_heads": 4},
                **parts,
                **experts,
                q_lora_rank=16,
                first_k_dense_replace=1,
            )
        case "cohere2":  # scaled logits, layers without positions
            kinds = ["sliding_attention", "full_attention"]
            return t.Cohere2Config(**_SHAPE, sliding_window=WINDOW, layer_types=kinds, logit_scale=0.25)
        case "smollm3":  # layers without positions
            return t.SmolLM3Config(**_SHAPE, no_rope_layers=[1, 0])
        case "glm4" | "olmo2" | "olmo3" | "qwen2" | "qwen3_moe" | "qwen3_next":
            return _more(kind)
        case "granite":  # scaled logits
            return t.GraniteConfig(**_SHAPE, logits_scaling=8.0)
    return more(kind, _SHAPE)


def _more(kind: str) -> Any:
    """Architectures whose configuration needs little."""
    t = transformers
    match kind:
        case "glm4":
            return t.Glm4Config(**_SHAPE, head_dim=8)
        case "olmo2":
            return t.Olmo2Config(**_SHAPE)
        case "olmo3":
            return t.Olmo3Config(
                **_SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
            )
        case "qwen2":
            return t.Qwen2Config(**_SHAPE)
        case "qwen3_moe":
            return t.Qwen3MoeConfig(
                **_SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
            )
        case "qwen3_next":
            return t.Qwen3NextConfig(**_SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2)
    raise ValueError(kind)


WIDE_WINDOW = 20
"""Shorter than the longest sequence of the tests, longer than most."""

SUPPORTED = ("qwen3", "qwen3_mha", "llama", "llama_mqa", "gpt2", "opt", "phi", "mistral", "gemma3")
"""Architectures that packed computation must run, compared in float64."""

FAMILIES = (
    "qwen2",
    "qwen3_moe",
    "mixtral",
    "gemma2",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "cohere2",
    "granite",
    "glm4",
    "nanochat",
    "olmo2",
    "olmo3",
    "smollm3",
)
"""More architectures that it must run, each with something that the others do not have, compared in float32."""


def save_tiny(kind: str, folder: Path, *, seed: int = 0) -> None:
    """Write a random model whose distributions are far from uniform and differ from token to token.

    A kind that ends in `_score` is the same architecture as a sequence classifier with one label.
    """
    base = kind.removesuffix("_score")
    shape = config(base)
    if kind != base:
        shape.num_labels = 1
    save_model(shape, folder, seed=seed, is_classifier=kind != base)


def save_model(shape: Any, folder: Path, *, seed: int = 0, is_classifier: bool = False) -> None:
    """Write a random model of a configuration, with weights as of `save_tiny`."""
    generator = torch.Generator().manual_seed(seed)
    auto = transformers.AutoModelForCausalLM
    if is_classifier:
        auto = transformers.AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # noise is added to what a class draws itself
        model = auto.from_config(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).normal_(generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)


def _norm(self: Any, hidden: Tensor) -> Tensor:
    eps = getattr(self, "variance_epsilon", None) or self.eps
    return self.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)


def _norm_around_one(self: Any, hidden: Tensor) -> Tensor:
    return (1 + self.weight) * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.eps)


@contextlib.contextmanager
def exact_norms() -> Iterator[None]:
    """Norms that compute in the precision of their input.

    Those of transformers compute in float32 whatever the model has, which rounds a difference of 1e-16 between
    two layouts of the same tokens up to one of 1e-8.
    """
    with pytest.MonkeyPatch.context() as patch:
        for norm in (qwen3.Qwen3RMSNorm, llama.LlamaRMSNorm, mistral.MistralRMSNorm):
            patch.setattr(norm, "forward", _norm)
        patch.setattr(gemma3.Gemma3RMSNorm, "forward", _norm_around_one)
        yield


def load_plain(folder: Path, *, dtype: torch.dtype) -> Any:
    """The model as transformers runs it: its own attention, which rounds to float32, but for float64."""
    attention = "sdpa" if dtype == torch.float64 else "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    )
    return model.eval()


def plain_log_probs(
    model: Any, prompt: Sequence[int], response: Sequence[int], *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response tokens, [R] each, from one forward pass over one sequence."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0] / temperature
    logits = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    log_probs = torch.stack([row[token] for row, token in zip(logits, response, strict=True)])
    entropies = torch.stack([-(row.exp() * row).sum() for row in logits])
    return log_probs, entropies


def plain_greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The `num_tokens` most likely next tokens, each by transformers' generate."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=1,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()
