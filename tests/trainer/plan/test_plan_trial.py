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
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from strop.engines.config import LoraConfig
from strop.engines.optimizers.muon import Muon
from strop.rollout.types import Sampling
from strop.trainer.plan.batches import packed_shape
from strop.trainer.plan.devices import device_named
from strop.trainer.plan.meta_model import PassForm
from strop.trainer.plan.parameters import model_sizes
from strop.trainer.plan.pass_time import has_trial, pass_seconds, update_fit
from strop.trainer.plan.passes import trace_passes
from strop.trainer.plan.plan import lengths_of
from strop.trainer.plan.roles import Shape, planned_roles
from strop.trainer.plan.tracing import Work
from strop.trainer.plan.trial import PassFit, PassTimes, _line, _update, decode_times, pass_fit, real_model

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
@pytest.mark.parametrize("config", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_every_form_of_a_pass_is_carried_out(config: PreTrainedConfig, form: PassForm) -> None:
    batch = packed_shape([(16, (8, 12))])
    few = packed_shape([(8, (4, 6))])
    fit = pass_fit(shape_of(config), form, (batch, few), flops, 1)
    assert all(value >= 0 for value in vars(fit.ratios).values())
    # Against a device that is twice as slow, the same seconds are half of what its rates say.
    halves = pass_fit(shape_of(config), form, (batch, few), lambda work: 2 * flops(work), 1)
    assert vars(halves.ratios) == pytest.approx({name: value / 2 for name, value in vars(fit.ratios).items()})
    assert halves.fixed == fit.fixed


@pytest.mark.parametrize(
    ("real", "real_few", "slope", "constant"),
    # By the device's rates 6 s and 2 s: as long, with 3 s beside them, shorter with more tokens, and none a token.
    [
        (6.0, 2.0, 1.0, 0.0),
        (9.0, 5.0, 1.0, 3.0),
        (3.0, 0.5, 0.5, 0.0),
        (4.0, 4.0, 0.0, 4.0),
        (4.0, 5.0, 0.0, 4.0),
    ],
)
def test_what_no_token_adds_to_is_told_from_the_rest(
    real: float, real_few: float, slope: float, constant: float
) -> None:
    assert _line(real, 6.0, real_few, 2.0) == pytest.approx((slope, constant))


def test_a_single_size_tells_a_ratio() -> None:
    assert _line(9.0, 6.0, 9.0, 6.0) == (1.5, 0.0)


def test_what_no_token_adds_to_is_there_for_each_micro_batch() -> None:
    parts = {"layers_forward": 1.0, "base_forward": 2.0, "base_backward": 3.0, "layers_backward": 4.0}
    fit = PassFit(ratios=PassTimes(**dict.fromkeys(parts, 2.0)), fixed=PassTimes(**parts))
    real = fit.seconds(PassTimes(**dict.fromkeys(parts, 100.0)), num_layers=5, num_batches=3)
    # 200 s by the ratio; of layers five times as much, and all of it three times.
    assert vars(real) == {
        "layers_forward": 215.0, "base_forward": 206.0, "base_backward": 209.0, "layers_backward": 260.0,
    }  # fmt: skip


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


@pytest.mark.parametrize("form", ["plain", "sharded", "adapter", "bfloat16"])
def test_decode_steps_are_carried_out(form: str) -> None:
    for config in (SMALL, EXPERTS):
        times = decode_times(shape_of(config), FORMS[form], 4, 16, 1, Sampling(key=1, max_tokens=1))
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
    fit = pass_fit(role.shape, role.form, (role.small_batch(64), role.small_batch(16)), cpu.seconds, 1)
    passes, share = role.usual_passes, sum(role.usual_tokens) / role.usual_batch.num_tokens
    expected, batches = 0.0, len(role.usual)
    for name, (work, count) in {
        "layers_forward": (passes.layers_forward, 4),
        "base_forward": (passes.base_forward, 1),
        "layers_backward": (passes.layers_backward, 4),
        "base_backward": (passes.base_backward, 1),
    }.items():
        expected += share * cpu.seconds(work) * getattr(fit.ratios, name)
        expected += batches * count * getattr(fit.fixed, name)
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
    assert update_fit(role, replace(cpu, memory_bytes=role.sizes.total)) == PassFit()
