"""Traces of passes: beside what an H100 took, beside real passes, and sizes of well-known models."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_configs import config_of
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Qwen2_5_VLConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from strop.engines import cpu_products, head
from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM, use_packed_attention
from strop.engines.config import LoraConfig
from strop.engines.cpu import library
from strop.engines.cpu.layers import use_cpu_layers
from strop.engines.lora import products
from strop.engines.lora.adapters import add_lora
from strop.engines.rotary_kernels import use_rotary_kernel
from strop.trainer.plan import passes as passes_module
from strop.trainer.plan.accelerator import NormKernel, use_traced_norms
from strop.trainer.plan.batches import Group, packed_shape
from strop.trainer.plan.meta_model import PassForm
from strop.trainer.plan.parameters import model_sizes
from strop.trainer.plan.pass_memory import update_phase
from strop.trainer.plan.passes import Passes, trace_forward_bytes, trace_passes
from strop.trainer.plan.plan import lengths_of
from strop.trainer.plan.roles import planned_roles
from strop.trainer.plan.tracing import Recorder

GIB = 2**30
QWEN3_06B = Qwen3Config(
    hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    intermediate_size=3072, vocab_size=151_936, tie_word_embeddings=True,
)  # fmt: skip
NUMBERS_06B = 596_049_920


def wide_norm(norm: Any, hidden: Tensor) -> Tensor:
    wide = torch.promote_types(hidden.dtype, norm.weight.dtype)
    out: Tensor = NormKernel.apply(hidden.to(wide), norm.weight, wide)  # type: ignore[no-untyped-call]
    return out


@pytest.mark.parametrize(
    ("prompts", "samples", "checkpointing", "measured"),
    [
        pytest.param(64, 1, False, 42.26, marks=pytest.mark.slow),
        (2, 8, False, 36.35),
        (2, 8, True, 11.62),
    ],
)
def test_an_update_takes_what_an_h100_took(
    prompts: int, samples: int, checkpointing: bool, measured: float, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Peaks of updates of 64 and 16 rows of 1,024 tokens in bfloat16, 16 rows at a time: benchmarks/RESULTS.md. Norms
    # were torch's then, in the wider precision of states and weight, and gates were two operations.
    monkeypatch.setattr(
        passes_module, "use_traced_norms", lambda module, *_, **__: use_traced_norms(module, wide_norm)
    )
    monkeypatch.setattr(passes_module, "use_traced_gates", lambda *_: None)
    config = config_of(
        tmp_path, "data.max_prompt_tokens=256", "data.max_response_tokens=768",
        "actor.engine.max_tokens_per_device=16384", f"model.gradient_checkpointing={str(checkpointing).lower()}",
        model=QWEN3_06B,
    )  # fmt: skip
    actor = planned_roles(config, lengths_of(config, None, None), is_accelerator=True)[0]
    actor = dataclasses.replace(actor, num_samples=prompts * samples, group_size=samples, num_kept=samples)
    assert update_phase(actor, {}, is_cpu=False).device_bytes / GIB == pytest.approx(measured, rel=0.1)


def real_model(config: Qwen3Config, dtype: torch.dtype = torch.float32) -> CausalLM:
    module = Qwen3ForCausalLM(config).eval()
    use_packed_attention(module, None, by_formula=False)
    use_cpu_layers(module)
    use_rotary_kernel(module)
    return CausalLM(module, compute_dtype=dtype)


def real_passes(
    config: Qwen3Config,
    groups: list[Group],
    dtype: torch.dtype = torch.float32,
    lora: LoraConfig | None = None,
    takes_entropy: bool = False,
) -> tuple[int, int]:
    """Bytes that a real forward pass keeps, and most of a whole update, beside weights and gradients."""
    batch = packed_shape(groups)
    attention = PackedAttention(batch.segments, device=torch.device("cpu"))
    attention.prepare()
    ids = torch.zeros(1, batch.num_tokens, dtype=torch.int64)
    recorder = Recorder()
    with recorder:
        causal = real_model(config, dtype)
        model = causal.module
        if lora is not None:
            add_lora(causal, lora)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        state = recorder.live
        hidden = causal.backbone(ids, ids, attention)
        predicting = torch.nn.functional.embedding(
            torch.zeros(batch.num_predicted, dtype=torch.int64), hidden
        )
        saved = recorder.live - state
        log_probs, entropies = causal.head.log_probs(
            predicting, torch.zeros(batch.num_predicted, dtype=torch.int64), temperature=1.0
        )
        (log_probs + entropies if takes_entropy else log_probs).sum().backward()
        return saved, recorder.peak - state


@pytest.mark.parametrize(
    ("inner", "lora"),
    [(160, LoraConfig()), (272, LoraConfig()), (272, LoraConfig(rank=4, target_modules=("q_proj",)))],
    ids=["small", "in C as a whole", "in C and frozen"],
)
def test_all_layers_follow_from_two(inner: int, lora: LoraConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "is_compiled_faster", lambda: True)
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=9, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=inner, vocab_size=300, tie_word_embeddings=True,
    )  # fmt: skip
    groups: list[Group] = [(16, (40, 32)), (24, (64,))]
    passes = trace_passes(config, PassForm(compute_dtype=torch.float32, lora=lora), packed_shape(groups))
    saved, update = real_passes(config, groups, lora=lora if lora.enabled else None)
    assert passes.saved_bytes() == pytest.approx(saved, rel=0.02)
    assert max(passes.saved_bytes() + passes.top_bytes, passes.tail_bytes) == pytest.approx(update, rel=0.03)


def test_the_gradient_of_an_entropy_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "HEAD_CHUNK_ELEMENTS", 1 << 16)
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=160, vocab_size=4096, tie_word_embeddings=False,
    )  # fmt: skip
    groups: list[Group] = [(8, (12, 12))]
    peaks = []
    for takes_entropy in (False, True):
        form = PassForm(compute_dtype=torch.float32, takes_entropy=takes_entropy)
        passes = trace_passes(config, form, packed_shape(groups))
        _, update = real_passes(config, groups, takes_entropy=takes_entropy)
        assert max(passes.saved_bytes() + passes.top_bytes, passes.tail_bytes) == pytest.approx(
            update, rel=0.03
        )
        peaks.append(update)
    assert peaks[1] > 1.1 * peaks[0]


def test_a_pass_without_a_gradient_holds_no_inner_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "is_compiled_faster", lambda: True)
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=512, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    batch = packed_shape([(16, (256,) * 4)])
    planned = trace_forward_bytes(config, PassForm(compute_dtype=torch.float32), batch)
    attention = PackedAttention(batch.segments, device=torch.device("cpu"))
    attention.prepare()
    ids = torch.zeros(1, batch.num_tokens, dtype=torch.int64)
    with Recorder() as recorder, torch.no_grad():
        model = real_model(config)
        state = recorder.live
        recorder.reset_peak()
        index = torch.zeros(batch.num_predicted, dtype=torch.int64)
        predicting = torch.nn.functional.embedding(index, model.backbone(ids, ids, attention))
        model.head.log_probs(predicting, index, temperature=1.0)
    assert 1 <= planned / (recorder.peak - state) < 1.15


@pytest.mark.parametrize(
    ("dtype", "lora"),
    [(torch.bfloat16, LoraConfig()), (torch.float32, LoraConfig(rank=4))],
    ids=["half", "adapter"],
)
@pytest.mark.parametrize("is_half_faster", [True, False])
def test_products_of_a_cpu_keep_what_real_ones_keep(
    dtype: torch.dtype, lora: LoraConfig, is_half_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "is_half_faster", lambda: is_half_faster)
    check_traced_as_real(dtype, lora)


def test_norms_and_gates_that_are_not_compiled_keep_what_real_ones_keep(
    without_compiler: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "is_half_faster", lambda: True)
    check_traced_as_real(torch.bfloat16, LoraConfig())


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Neither attention nor norms and gates have compiled functions."""
    monkeypatch.setattr(library, "_DEFINED", {})
    library.update_library.cache_clear()
    yield
    library.update_library.cache_clear()


def check_traced_as_real(dtype: torch.dtype, lora: LoraConfig) -> None:
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=160, vocab_size=300, tie_word_embeddings=True,
    )  # fmt: skip
    groups: list[Group] = [(16, (40, 32)), (24, (64,))]
    passes = trace_passes(config, PassForm(compute_dtype=dtype, lora=lora), packed_shape(groups))
    saved, update = real_passes(config, groups, dtype, lora if lora.enabled else None)
    assert passes.saved_bytes() == pytest.approx(saved, rel=0.002)
    assert max(passes.saved_bytes() + passes.top_bytes, passes.tail_bytes) == pytest.approx(update, rel=0.03)


def test_an_adapter_is_traced_as_it_is_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3Config(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=160, vocab_size=300,
    )  # fmt: skip
    form = PassForm(compute_dtype=torch.float32, lora=LoraConfig(rank=4))
    in_place = trace_passes(config, form, packed_shape([(16, (40,))]))
    monkeypatch.setattr(products, "_is_plain", lambda *given: False)  # PEFT's own forward pass
    apart = trace_passes(config, form, packed_shape([(16, (40,))]))
    # Per layer: seven products that are multiplied by a factor and added, in operators of their own.
    assert apart.layers_forward.num_calls - in_place.layers_forward.num_calls >= 2 * 7 * 2


def traced(config: Qwen3Config | Qwen3MoeConfig | DeepseekV3Config, **form: object) -> Passes:
    settings = {"compute_dtype": torch.bfloat16, "is_accelerator": True, **form}
    return trace_passes(config, PassForm(**settings), packed_shape([(64, (64,) * 4)]))  # type: ignore[arg-type]


def test_products_are_two_operations_for_each_weight_of_a_token_and_twice_as_many_backward() -> None:
    passes = traced(QWEN3_06B)
    tokens, predicted = 64 + 4 * 63, 4 * 64
    layers = 28 * (1024 * 128 * (16 + 2 * 8 + 16) + 3 * 1024 * 3072)
    head = 1024 * 151_936
    assert passes.forward.product_flops == pytest.approx(2 * (layers * tokens + head * predicted), rel=1e-6)
    # The head computes its logits again.
    assert passes.backward.product_flops == pytest.approx(
        4 * layers * tokens + 6 * head * predicted, rel=1e-6
    )


def test_checkpoints_keep_the_inputs_of_layers_and_compute_them_again() -> None:
    plain, checkpointed = traced(QWEN3_06B), traced(QWEN3_06B, checkpointing=True)
    tokens = 64 + 4 * 63
    (layer,) = checkpointed.layers.values()
    assert layer.saved_bytes == tokens * 1024 * 4
    (whole,) = plain.layers.values()
    # All but the layer's last product, whose result nobody needs again.
    again = whole.forward.product_flops - 2 * tokens * 1024 * 3072
    assert layer.backward.product_flops == pytest.approx(whole.backward.product_flops + again, rel=1e-6)


def test_a_mixture_of_671_billion_is_counted_and_traced_without_its_weights() -> None:
    config = (
        DeepseekV3Config()
    )  # its own sizes are those of DeepSeek-V3, arXiv:2412.19437: 671 B, 37 B of a token
    form = PassForm(compute_dtype=torch.bfloat16, is_accelerator=True, is_sharded=True)
    sizes = model_sizes(config, form)
    assert sizes.total == pytest.approx(671.0e9, rel=1e-3)
    assert sizes.active == pytest.approx(36.6e9, rel=1e-2)
    passes = traced(config, is_sharded=True)
    assert len(passes.layers) == 2  # three dense layers, 58 with experts
    tokens = 64 + 4 * 63
    assert passes.forward.product_flops == pytest.approx(2 * sizes.active * tokens, rel=0.1)


def test_attention_on_an_accelerator_keeps_no_scores() -> None:
    # Keys of 192 numbers and values of 128, which FlashAttention has not: twice the tokens take twice the memory, and
    # scores would take four times as much.
    config = DeepseekV3Config(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=8, vocab_size=128,
        first_k_dense_replace=1, q_lora_rank=None,
    )  # fmt: skip
    form = PassForm(compute_dtype=torch.bfloat16, is_accelerator=True, is_sharded=True)
    short, long = (trace_passes(config, form, packed_shape([(length, (2,))])) for length in (2047, 4095))
    assert long.saved_bytes() / short.saved_bytes() == pytest.approx(2, rel=0.01)
    assert 1.5 < long.top_bytes / short.top_bytes < 2.1


def test_a_formula_is_followed_on_an_accelerator() -> None:
    fused, by_formula = traced(QWEN3_06B), traced(QWEN3_06B, by_formula=True)
    scores = 16 * 64 * 128 * 4  # of the heads of one answer, its tokens and those before
    assert by_formula.saved_bytes() > fused.saved_bytes() + 28 * scores


def test_an_adapter_is_what_is_trained() -> None:
    form = PassForm(compute_dtype=torch.float32, lora=LoraConfig(rank=8))
    sizes = model_sizes(QWEN3_06B, form)
    # A and B of rank 8 of q, k, v, o, gate, up and down of each layer.
    each = 8 * ((1024 + 2048) + 2 * (1024 + 1024) + (2048 + 1024) + 3 * (1024 + 3072))
    assert sizes.trained == 28 * each
    assert sizes.total == NUMBERS_06B + 28 * each


def test_a_model_whose_layers_look_at_values_is_refused() -> None:
    config = Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, vocab_size=100,
        experts_implementation="eager",
    )  # fmt: skip
    with pytest.raises(ValueError, match="cannot be followed without numbers"):
        traced(config)


def test_a_model_of_linear_attention_is_refused() -> None:
    config = Qwen3NextConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        layer_types=["linear_attention", "full_attention"], num_experts=4, num_experts_per_tok=2, vocab_size=100,
    )  # fmt: skip
    with pytest.raises(ValueError, match="has layers of linear attention, which carry a state"):
        traced(config)


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_layers_that_read_images_are_no_layers_of_the_language_model(depth: int) -> None:
    """Also where they are as many: as all of its layers (5), or as those that are traced (2)."""
    text = {
        "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }  # fmt: skip
    vision = {
        "depth": depth,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
    }
    shape = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    form, batch = PassForm(compute_dtype=torch.float32), packed_shape([(20, (30,) * 2)])
    passes = trace_passes(shape, form, batch)
    assert len(passes.kinds) == 5
    assert {str(kind[0]) for kind in passes.kinds} == {"Qwen2_5_VLDecoderLayer"}
    layer = 64 * (64 + 2 * 32 + 64 + 3 * 128)
    assert passes.layers_forward.product_flops == 5 * 2 * batch.num_tokens * layer
