"""Weights held in half precision while an accelerator generates: the numbers of the policy, its changes, its memory."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from rollout_cases import tokens

from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.half_weights import hold_half
from strop.engines.lora.adapters import adapter_off
from strop.engines.model import load_model
from strop.engines.moe.precision import use_compute_precision
from strop.engines.segments import Segment
from strop.rollout.native.half_copy import HalfCopy, half_copy

Tiny = Callable[..., CausalLM]


def logits(model: CausalLM, ids: list[int]) -> torch.Tensor:
    attention = PackedAttention([Segment(start=0, length=len(ids))], device=model.device)
    given, at = torch.tensor(ids)[None], torch.arange(len(ids))[None]
    with torch.no_grad():
        return model.head.logits(model.hidden(given, at, attention).to(torch.bfloat16))


def num_wide_experts(model: CausalLM) -> int:
    return sum("experts" in name and part.dtype == torch.float32 for name, part in model.named_parameters())


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "gemma3", "mixtral"])
def test_the_copy_gives_the_numbers_of_the_policy(tiny: Tiny, kind: str) -> None:
    model = tiny(kind, dtype="bfloat16")
    use_compute_precision(model.module, torch.device("cuda"))
    half = HalfCopy(model)
    assert num_wide_experts(half.model) == 0
    half.refresh()
    ids = tokens(9, 1, vocab=61)
    assert torch.equal(logits(half.model, ids), logits(model, ids))


def test_the_copy_of_a_policy_with_an_adapter_gives_its_numbers(tiny_folder: Callable[[str], Path]) -> None:
    folder = str(tiny_folder("qwen3"))
    model = load_model(ModelConfig(path=folder, dtype="bfloat16", lora=LoraConfig(rank=4)), device="cpu")
    with torch.no_grad():  # else the adapter adds nothing
        for name, part in model.named_parameters():
            if "lora_B" in name:
                part.fill_(0.1)
    use_compute_precision(model.module, torch.device("cuda"))
    half = HalfCopy(model)
    half.refresh()
    ids = tokens(9, 1, vocab=61)
    expected = logits(model, ids)
    assert torch.equal(logits(half.model, ids), expected)
    with adapter_off(model):
        assert not torch.equal(logits(model, ids), expected)


def test_only_products_are_copied_and_a_change_is_seen_when_asked_for(tiny: Tiny) -> None:
    model = tiny("llama", dtype="bfloat16")
    half = HalfCopy(model)
    half.refresh()
    own, copy = dict(model.module.named_parameters()), dict(half.model.module.named_parameters())
    apart = {name for name in own if copy[name] is not own[name]}
    assert apart
    assert all("proj" in name or "lm_head" in name for name in apart)
    assert {copy[name].dtype for name in apart} == {torch.bfloat16}
    ids = tokens(9, 1, vocab=61)
    before, at = logits(half.model, ids), [copy[name].data_ptr() for name in apart]
    kept = {name: value.data.clone() for name, value in own.items()}
    try:
        with torch.no_grad():
            for name in apart:
                own[name].mul_(0.5)
        half.refresh()
        assert torch.equal(logits(half.model, ids), before), "nobody said that the weights are others"
        half.weights_changed()
        half.refresh()
        assert torch.equal(logits(half.model, ids), logits(model, ids))
        assert [copy[name].data_ptr() for name in apart] == at, "what was captured over them stays valid"
    finally:
        for name, value in kept.items():
            own[name].data.copy_(value)


def test_memory_is_given_back_and_taken_again(tiny: Tiny) -> None:
    model = tiny("qwen3", dtype="bfloat16")
    half = HalfCopy(model)
    held = [one for one in half.model.module.parameters() if one.dtype == torch.bfloat16]
    assert sum(one.numel() for one in held) == 0, "nothing is copied before it is used"
    half.refresh()
    assert 2 * sum(one.numel() for one in held) == half.num_bytes > 0
    half.free()
    assert sum(one.numel() for one in held) == 0
    half.refresh()
    ids = tokens(5, 2, vocab=61)
    assert torch.equal(logits(half.model, ids), logits(model, ids))


def test_a_cpu_and_a_wide_model_decode_with_their_own_weights(tiny: Tiny) -> None:
    assert half_copy(tiny("qwen3", dtype="bfloat16")) is None
    assert half_copy(tiny("qwen3")) is None


@pytest.mark.parametrize("kind", ["qwen3", "llama", "gpt2", "gemma3", "mixtral"])
def test_a_copy_that_holds_its_layers_in_half_gives_the_numbers_of_the_policy(tiny: Tiny, kind: str) -> None:
    model = tiny(kind, dtype="bfloat16")
    use_compute_precision(model.module, torch.device("cuda"))
    copy = CausalLM(deepcopy(model.module), compute_dtype=torch.bfloat16)
    hold_half(copy, device=copy.device)
    rounded = {name for name, tensor in copy.named_parameters() if tensor.dtype == torch.bfloat16}
    assert rounded
    assert all("proj" in name or ".c_" in name for name in rounded)
    assert num_wide_experts(copy) == 0
    ids = tokens(9, 1, vocab=61)
    assert torch.equal(logits(copy, ids), logits(model, ids))
    again = HalfCopy(copy)
    again.refresh()
    assert torch.equal(logits(again.model, ids), logits(model, ids))
