"""Decode steps by fused layers beside the model's own forward pass; operations of torch stand for the kernels, which
have tests of their own (tests/engines/test_triton_kernels.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout_cases import tokens
from torch import Tensor

from references import layer_kernels
from references.language_models import save_tiny
from strop.engines.causal_lm import CausalLM
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.model import load_model
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import EngineContext, native_generation
from strop.rollout.native import batch as batch_module
from strop.rollout.native import cuda_graph, running
from strop.rollout.native import fused_layers as layers_module
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.cuda_graph import CAPTURE_AFTER, Capture, StaticStep
from strop.rollout.native.fused_layers import FusedLayers, fused_layers
from strop.rollout.native.half_copy import HalfCopy
from strop.rollout.native.paged_cache import PagedCache
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling

Tiny = Callable[..., CausalLM]
PRODUCTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


@pytest.fixture(autouse=True)
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages, nothing in C, and kernels."""
    monkeypatch.setattr(running, "new_cache", lambda device, capacity: PagedCache(capacity, device))
    monkeypatch.setattr(batch_module, "fused_step", lambda model: None)
    monkeypatch.setattr(layers_module, "has_kernels", lambda device: True)
    for name in ("add_and_norm", "turn_heads", "gate_halves"):
        monkeypatch.setattr(layers_module, name, getattr(layer_kernels, name))


def frozen(model: CausalLM) -> CausalLM:
    model.module.requires_grad_(False)
    return model


def layers_of(model: CausalLM) -> FusedLayers:
    layers = fused_layers(model)
    assert layers is not None
    return layers


def decoded(model: CausalLM, steps: StaticStep | None, *, length: int = 16) -> list[Request]:
    batch = DecodeBatch(model, max_running=5)
    batch._steps = steps
    made = [
        Request(f"r{n}", tuple(tokens(3 + 5 * n, n, vocab=61)), Sampling(key=n, max_tokens=length + n))
        for n in range(7)
    ]
    batch.waiting.extend(made)
    while not batch.is_idle:
        batch.step(0)
    return made


def equal(found: list[Request], wanted: list[Request]) -> None:
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    for left, right in zip(found, wanted, strict=True):
        assert left.log_probs == pytest.approx(right.log_probs, abs=1e-5)


# Norms of queries and keys; a head of its own; biases of some products; windows in every layer.
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral"])
def test_a_step_gives_what_the_model_gives(tiny: Tiny, kind: str) -> None:
    wanted = decoded(tiny(kind, dtype="float32"), None)
    model = frozen(tiny(kind, dtype="float32"))
    steps = StaticStep(model, None, layers_of(model))
    own = mocked_away(model)
    equal(decoded(model, steps), wanted)
    assert own == [], "no decode step was the model's own"


def mocked_away(model: CausalLM) -> list[int]:
    """Numbers of tokens of the passes that the model computes itself, but for prompts."""
    seen: list[int] = []
    hidden = model.hidden

    def noted(ids: Tensor, positions: Tensor, attention: Any, *rest: Any, **options: Any) -> Tensor:
        if type(attention).__name__ == "DecodeAttention":
            seen.append(ids.numel())
        return hidden(ids, positions, attention, *rest, **options)

    model.hidden = noted  # type: ignore[method-assign]
    return seen


def test_the_copy_in_half_precision_goes_on_with_joined_weights(tiny: Tiny) -> None:
    """Its weights are rounded anew in place, and come back where they were given back."""
    policy = tiny("qwen3", dtype="bfloat16")
    half = HalfCopy(policy)
    half.refresh()
    layers = layers_of(half.model)
    layers.join()
    attention = layers_module._groups(half.model.layers[0])[0]
    joined = layers._weights[0].qkv
    assert torch.equal(joined, torch.cat([part.weight for part in attention]))
    layers.join()
    assert layers._weights[0].qkv is joined
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if name.split(".")[-2] in PRODUCTS:
                weight.mul_(-1.0)
    policy.num_changes += 1
    before = joined.clone()
    half.refresh()
    assert torch.equal(joined, -before)
    half.free()
    half.refresh()
    layers.join()
    assert layers._weights[0].qkv is not joined
    assert torch.equal(layers._weights[0].qkv, -before)


def test_joined_weights_take_no_memory_beside_the_parameters(tiny: Tiny) -> None:
    model = frozen(tiny("qwen2", dtype="float32"))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    layers = layers_of(model)
    layers.join()
    storages = {
        weight.untyped_storage().data_ptr(): weight.untyped_storage()
        for _, weight in model.named_parameters()
    }
    assert sum(storage.nbytes() for storage in storages.values()) == sum(
        weight.nbytes for weight in before.values()
    )
    for joined in layers._weights:
        for tensor in (joined.qkv, joined.qkv_bias, joined.gate_up):
            assert tensor is not None
            assert tensor.untyped_storage().data_ptr() in storages
        assert joined.gate_up_bias is None
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


@pytest.mark.parametrize("kind", ["gemma3", "gpt2", "qwen3_moe"])
def test_layers_of_another_form_have_none(tmp_path: Any, kind: str) -> None:
    save_tiny(kind, tmp_path / kind)
    assert fused_layers(frozen(load(tmp_path / kind))) is None


def load(folder: Any, **options: Any) -> CausalLM:
    return load_model(ModelConfig(path=str(folder), **{"dtype": "float32", **options}), device="cpu")


def test_weights_that_are_trained_rounded_adapted_or_too_wide_have_none(
    tiny: Tiny, tiny_folder: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fused_layers(tiny("qwen3", dtype="float32")) is None
    assert fused_layers(frozen(tiny("qwen3", dtype="bfloat16"))) is None  # float32, rounded by each pass
    assert fused_layers(frozen(tiny("qwen3", dtype="float64"))) is None
    assert fused_layers(frozen(load(tiny_folder("qwen3"), lora=LoraConfig(rank=2)))) is None
    model = frozen(tiny("qwen3", dtype="float32"))
    assert fused_layers(model) is not None
    monkeypatch.setattr(layers_module, "MAX_DIM", model.hidden_size - 1)
    assert fused_layers(model) is None


def repeated(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """A capture that computes anew."""
    result = function().clone()

    def replay() -> None:
        result.copy_(function())

    return replay, result


def failing(error: Exception) -> Capture:
    """The first capture fails."""
    attempts: list[int] = []

    def capture(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        attempts.append(1)
        if len(attempts) == 1:
            raise error
        return repeated(function)

    return capture


def wrong_at_first(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    replay, result = repeated(function)
    if isinstance(getattr(function.__self__._hidden, "__self__", None), FusedLayers):  # type: ignore[attr-defined]
        result += 1.0
        return lambda: None, result
    return replay, result


class Uncompiled(Exception):
    """Stands for an error of Triton, which may not be there."""


@pytest.mark.parametrize(
    "capture",
    [
        failing(RuntimeError("no kernel image is available")),
        failing(Uncompiled("out of resource: shared memory")),
        wrong_at_first,
    ],
    ids=["fails", "does not compile", "differs"],
)
def test_where_they_fail_the_models_own_pass_is_captured(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capture: Capture
) -> None:
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(cuda_graph, "KernelError", Uncompiled)
    wanted = decoded(tiny("qwen3", dtype="float32"), None, length=4 * CAPTURE_AFTER)
    model = frozen(tiny("qwen3", dtype="float32"))
    steps = StaticStep(model, capture, layers_of(model))
    equal(decoded(model, steps, length=4 * CAPTURE_AFTER), wanted)
    assert not steps.is_disabled
    assert not steps.has_fused_layers
    assert all(shape._hidden == steps._own_hidden for shape in steps._shapes.values())
    assert steps.num_captured >= 1


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2", "mistral"])
def test_in_half_precision_a_captured_step_agrees_and_is_kept(tiny: Tiny, kind: str) -> None:
    half = HalfCopy(tiny(kind, dtype="bfloat16"))
    half.refresh()
    steps = StaticStep(half.model, repeated, layers_of(half.model))
    decoded(half.model, steps, length=4 * CAPTURE_AFTER)
    assert steps.num_captured >= 1
    assert steps.has_fused_layers


def test_a_model_apart_from_the_trainer_has_them(tiny_folder: Callable[[str], Any]) -> None:
    """Its weights are rounded when they are loaded, and received later."""
    context = EngineContext(
        model=ModelConfig(path=str(tiny_folder("qwen3")), dtype="bfloat16"), rollout=RolloutConfig(),
        device="cpu", version=0, trained=None, max_tokens=0, logs=None, rank=0,
    )  # fmt: skip
    policy = native_generation(context).policy
    assert policy is not None
    assert fused_layers(policy) is not None


def test_without_memory_to_join_weights_the_models_own_pass_is_captured(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = decoded(tiny("qwen3", dtype="float32"), None)
    model = frozen(tiny("qwen3", dtype="float32"))
    steps = StaticStep(model, None, layers_of(model))

    def short(parameters: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(layers_module, "_in_one", short)
    equal(decoded(model, steps), wanted)
    assert not steps.has_fused_layers
