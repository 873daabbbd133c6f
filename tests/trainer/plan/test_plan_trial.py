"""First layers of a model, carried out on this processor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_configs import SMALL, config_of
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from strop.engines.config import LoraConfig
from strop.engines.optimizers.muon import Muon
from strop.rollout.types import Sampling
from strop.trainer.plan.batches import packed_shape
from strop.trainer.plan.devices import device_named
from strop.trainer.plan.meta_model import PassForm
from strop.trainer.plan.parameters import model_sizes
from strop.trainer.plan.pass_time import has_trial, pass_seconds, update_ratios
from strop.trainer.plan.passes import trace_passes
from strop.trainer.plan.plan import lengths_of
from strop.trainer.plan.roles import Shape, planned_roles
from strop.trainer.plan.tracing import Work
from strop.trainer.plan.trial import (
    BEFORE_STEPS,
    LEAST_STEPS,
    MOST_STEPS,
    PassTimes,
    _update,
    decode_times,
    pass_ratios,
    real_model,
)

EXPERTS = Qwen3MoeConfig(
    hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, vocab_size=128,
)  # fmt: skip
PLAIN = PassForm(compute_dtype=torch.float32)
FORMS = {
    "plain": PLAIN,
    "checkpointing": replace(PLAIN, checkpointing=True),
    "sharded": replace(PLAIN, compute_dtype=torch.bfloat16, is_sharded=True),
    "adapter": replace(PLAIN, lora=LoraConfig(rank=4)),
    "value head": replace(PLAIN, has_value_head=True),
    "bfloat16": replace(PLAIN, compute_dtype=torch.bfloat16),
}


def shape_of(config: PreTrainedConfig) -> Shape:
    return Shape(config.to_json_string(), config)


def flops(work: Work) -> float:
    return work.product_flops + work.attention_flops + 1


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "config", [SMALL, pytest.param(EXPERTS, marks=pytest.mark.slow)], ids=["dense", "experts"]
)
def test_every_form_of_a_pass_is_carried_out(config: PreTrainedConfig, form: PassForm) -> None:
    batch = packed_shape([(16, (8, 12))])
    ratios = pass_ratios(shape_of(config), form, batch, flops, 1)
    assert all(value > 0 for value in vars(ratios).values())
    # Against a device that is twice as slow, the same seconds are half of what its rates say.
    halves = pass_ratios(shape_of(config), form, batch, lambda work: 2 * flops(work), 1)
    assert vars(halves) == pytest.approx({name: value / 2 for name, value in vars(ratios).items()})


@pytest.mark.parametrize("form", ["plain", "checkpointing"])
def test_a_trial_has_the_heap_of_a_process_that_trains(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heaps: list[bool] = []
    monkeypatch.setattr(
        "strop.trainer.plan.trial.keep_heap", lambda *, is_recomputed: heaps.append(is_recomputed)
    )
    pass_ratios(shape_of(SMALL), FORMS[form], packed_shape([(16, (9, 11))]), flops, 1)
    assert heaps == [form == "checkpointing"]


class Made(TorchDispatchMode):
    """Numbers of the tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numbers += sum(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out


@pytest.mark.parametrize("form", ["plain", "checkpointing", "sharded"])
def test_the_gradient_of_an_embedding_is_beside_the_layers(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In place of seconds, numbers that operators make: those of layers do not depend on the vocabulary.
    batch = packed_shape([(16, (8, 12))])
    parts = []
    for vocab in (64, 2**14):
        shape = Qwen3Config(**{**SMALL.to_dict(), "vocab_size": vocab, "tie_word_embeddings": True})
        model, _ = real_model(shape, FORMS[form])
        _update(model, FORMS[form], batch)  # gradients are there
        with Made() as made:
            monkeypatch.setattr("time.thread_time", lambda made=made: made.numbers)
            parts.append(_update(model, FORMS[form], batch))
            monkeypatch.undo()
    few, many = parts
    assert few.layers_forward == many.layers_forward > 0
    assert few.layers_backward == many.layers_backward > 0
    assert many.base_backward - few.base_backward > (2**14 - 64) * SMALL.hidden_size


def test_the_layers_of_an_adapter_have_their_whole_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing behind them is trained, and their input has no gradient.
    model, _ = real_model(SMALL, FORMS["adapter"])
    with Made() as made:
        monkeypatch.setattr("time.thread_time", lambda: made.numbers)
        times = _update(model, FORMS["adapter"], packed_shape([(16, (8, 12))]))
        monkeypatch.undo()
    assert min(vars(times).values()) > 0
    assert sum(vars(times).values()) <= made.numbers


class Products(TorchFunctionMode):
    """Dtypes that products of experts are in."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "grouped_mm" in getattr(func, "__name__", ""):
            self.dtypes |= {part.dtype for part in args[:2]}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["plain", "sharded", "bfloat16"])
def test_experts_multiply_in_a_trial_as_in_a_trace(form: str) -> None:
    batch = packed_shape([(16, (8, 12))])
    with Products() as traced:
        trace_passes(EXPERTS, FORMS[form], batch)
    model, _ = real_model(EXPERTS, FORMS[form])
    with Products() as carried_out:
        _update(model, FORMS[form], batch)
    assert carried_out.dtypes == traced.dtypes != set()


@pytest.mark.parametrize(
    "form",
    ["plain", "adapter", *(pytest.param(form, marks=pytest.mark.slow) for form in ("sharded", "bfloat16"))],
)
def test_decode_steps_are_carried_out(form: str) -> None:
    for config in (SMALL, EXPERTS):
        times = decode_times(shape_of(config), FORMS[form], 4, 16, 1, Sampling(key=1, max_tokens=1))
        assert 16 + BEFORE_STEPS + LEAST_STEPS / 2 <= times.context <= 16 + BEFORE_STEPS + MOST_STEPS / 2
        assert times.layer + times.rest > 0
        assert min(vars(times).values()) >= 0


def test_a_stage_takes_as_much_longer_as_its_trial(tmp_path: Path) -> None:
    # A device without calls and memory, at one operation a second: an update is its operations, each taken at the
    # ratio of what was carried out to what was traced, and of 4 layers all are like the 2 that are carried out.
    config = config_of(tmp_path)
    role = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    cpu = replace(
        device_named("h100"), product_flops=1.0, attention_flops=1.0, bandwidth=1e30, call_s=0.0,
        weight_bandwidth=1e30, threads=1,
    )  # fmt: skip
    ratios = pass_ratios(role.shape, role.form, role.small_batch(64), cpu.seconds, 1)
    passes, share = role.usual_passes, sum(role.usual_tokens) / role.usual_batch.num_tokens
    expected = share * (
        ratios.layers_forward * cpu.seconds(passes.layers_forward)
        + ratios.base_forward * cpu.seconds(passes.base_forward)
        + ratios.layers_backward * cpu.seconds(passes.layers_backward)
        + ratios.base_backward * cpu.seconds(passes.base_backward)
    )
    assert pass_seconds(role, cpu).update == pytest.approx(expected)


def test_a_small_batch_is_like_a_large_one(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    role = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    for most in (100, 300, 1000):
        batch = role.small_batch(most)
        assert most / 3 < batch.num_tokens <= most
    assert role.small_batch(10_000) == role.usual_batch


def test_operations_of_muon_are_those_that_torch_counts() -> None:
    config = Qwen3Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=48, vocab_size=64,
    )  # fmt: skip
    sizes = model_sizes(config, PLAIN)
    layer = [(16, 32), (8, 32), (8, 32), (32, 16), (48, 32), (48, 32), (32, 48)]
    matrices = [nn.Parameter(torch.randn(*shape)) for shape in layer * 2]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    with FlopCounterMode(display=False) as counter:
        Muon(matrices, lr=0.1, weight_decay=0.0, momentum=0.9, matrix_group=None).step()
    assert sizes.whole_model.all.muon_flops == counter.get_total_flops()


def test_a_model_that_is_too_large_here_is_taken_at_the_rates_of_the_device(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    role = planned_roles(config, lengths_of(config, None, None), is_accelerator=False)[0]
    cpu = replace(device_named("h100"), threads=1)
    assert has_trial(role, cpu)
    assert not has_trial(role, replace(cpu, memory_bytes=role.sizes.total))
    assert not has_trial(role, device_named("h100"))
    assert update_ratios(role, replace(cpu, memory_bytes=role.sizes.total)) == PassTimes()
