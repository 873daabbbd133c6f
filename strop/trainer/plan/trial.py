"""Passes and decode steps of a model's first layers, done for real on this processor.

A pass through layers is Python, many small operators, and memory that the system has to find first: how long that takes
beside the products of a device is no constant. So the layers that are traced are carried out as well, with random
weights, on a micro-batch that takes about a second, and on one of fewer tokens: the stages of a step are as much longer
than the rates of the device say as the first was, but for what the second takes as well.
"""

from __future__ import annotations

import dataclasses
import operator
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM, use_packed_attention
from strop.engines.cpu.layers import use_cpu_layers
from strop.engines.model import checkpoint_layers
from strop.engines.rotary_kernels import use_rotary_kernel
from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.request import Request
from strop.rollout.types import Sampling
from strop.trainer.plan.meta_model import PassForm, causal_lm, layer_list, truncated_module
from strop.trainer.plan.passes import PackedShape, Passes, trace_passes
from strop.trainer.plan.roles import Shape
from strop.trainer.plan.tracing import Work

T = TypeVar("T")

REPEATS = 3
LEAST_STEPS, MOST_STEPS, STEPS_S = 8, 64, 0.8
"""Pairs of decode steps of a measurement, and the seconds after which there are enough; medians count."""
NUM_DECODED = MOST_STEPS + REPEATS + 2
"""Tokens behind a prompt: its own, one by the model's own forward pass, and some with new weights."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of the parts of a pass with a gradient, or a factor for each."""

    layers_forward: float = 1.0
    base_forward: float = 1.0
    """Beside the layers: embedding, final norm and head."""
    base_backward: float = 1.0
    layers_backward: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PassFit:
    """Real seconds of a micro-batch: `ratios` times what the rates of a device say, and some that no token adds to:
    Python, and memory of gradients."""

    ratios: PassTimes = PassTimes()
    fixed: PassTimes = PassTimes(layers_forward=0.0, base_forward=0.0, base_backward=0.0, layers_backward=0.0)
    """In seconds, of a layer and beside the layers."""

    def seconds(self, planned: PassTimes, *, num_layers: float, num_batches: float) -> PassTimes:
        """Of micro-batches that take these together, by the rates of the device."""
        return PassTimes(
            **{
                name: value * getattr(self.ratios, name)
                + getattr(self.fixed, name) * num_batches * (num_layers if name in LAYERS else 1)
                for name, value in vars(planned).items()
            }
        )


LAYERS = ("layers_forward", "layers_backward")


@dataclass(frozen=True, kw_only=True)
class DecodeTimes:
    """Seconds of a decode step."""

    layer: float
    """Of a layer, on average of those that were carried out."""
    rest: float
    """Beside the layers: head, sampling and records."""
    packed_number: float
    """Of each number of layers and head, once, with new weights: they are packed for the kernel."""


def pass_times(passes: Passes, seconds: Callable[[Work], float]) -> PassTimes:
    """By the rates of a device."""
    return PassTimes(
        layers_forward=seconds(passes.layers_forward),
        base_forward=seconds(passes.base_forward),
        base_backward=seconds(passes.base_backward),
        layers_backward=seconds(passes.layers_backward),
    )


def pass_fit(
    shape: Shape,
    form: PassForm,
    batches: tuple[PackedShape, PackedShape],
    seconds: Callable[[Work], float],
    num_threads: int,
) -> PassFit:
    """Updates of the first layer and the last one of each kind, beside the rates of a device.

    Args:
        shape: of the model.
        form: of the passes.
        batches: a micro-batch, and one of fewer tokens.
        seconds: of this processor, by its rates.
        num_threads: of the process.
    """
    (real, passes), (real_few, passes_few) = (
        _carried_out(shape, form, batch, num_threads) for batch in batches
    )
    planned, planned_few = pass_times(passes, seconds), pass_times(passes_few, seconds)
    ratios, fixed = {}, {}
    for name in vars(real):
        count = len(passes.kinds) if name in LAYERS else 1
        ratios[name], constant = _line(
            *(getattr(times, name) for times in (real, planned, real_few, planned_few))
        )
        fixed[name] = constant / count
    return PassFit(ratios=PassTimes(**ratios), fixed=PassTimes(**fixed))


def _line(real: float, planned: float, real_few: float, planned_few: float) -> tuple[float, float]:
    """Slope and constant, not below 0, of the line through the first point, and the second where one is."""
    more = planned - planned_few
    constant = real_few - planned_few * (real - real_few) / more if more > 0 else 0.0
    constant = min(max(0.0, constant), real)
    return (real - constant) / max(planned, 1e-9), constant


@lru_cache(maxsize=16)
def _carried_out(
    shape: Shape, form: PassForm, batch: PackedShape, num_threads: int
) -> tuple[PassTimes, Passes]:
    """The same in seconds, and as a trace has it."""
    model, kept = real_model(shape.config, form)
    runs = with_threads(num_threads, lambda: [_update(model, form, batch) for _ in range(REPEATS)])
    medians = {name: statistics.median(getattr(run, name) for run in runs) for name in vars(runs[0])}
    passes = dataclasses.replace(trace_passes(shape.config, form, batch), kinds=tuple(kept))
    return PassTimes(**medians), passes


def real_model(shape: PreTrainedConfig, form: PassForm) -> tuple[CausalLM, list[Hashable]]:
    """The layers that are traced, with random numbers; their kinds."""
    module, _, kept = truncated_module(shape, form)
    module.to_empty(device="cpu")
    module.tie_weights()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.fill_(0.01)  # frequencies
    if form.checkpointing:
        checkpoint_layers(module)
    use_packed_attention(module, None, by_formula=form.by_formula)
    use_cpu_layers(module)
    use_rotary_kernel(module)
    model = causal_lm(module, form)
    if form.is_sharded:
        module.to(form.compute_dtype)
        model.root = _Gathered()
    return model, kept


class _Gathered(nn.Module):
    """A model whose parameters are whole, in the form of one that is sharded."""

    def forward(self, function: Callable[[], T]) -> T:
        """As FSDP's root module."""
        return function()


def with_threads(num_threads: int, function: Callable[[], T]) -> T:
    """The function's result, with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return function()
    finally:
        torch.set_num_threads(before)


def _update(model: CausalLM, form: PassForm, batch: PackedShape) -> PassTimes:
    """Seconds of its parts."""
    attention = PackedAttention(batch.segments, device=torch.device("cpu"))
    attention.prepare()
    ids = torch.arange(batch.num_tokens)[None] % model.vocab_size
    index = torch.arange(batch.num_predicted) % batch.num_tokens
    marks = [time.thread_time()]
    hidden = model.backbone(ids, torch.zeros_like(ids), attention)
    predicting = nn.functional.embedding(index, hidden)
    marks.append(time.thread_time())
    predicting.register_hook(lambda grad: marks.append(time.thread_time()))  # type: ignore[no-untyped-call]
    if form.has_value_head:
        loss = model.head.values(predicting).sum()
    else:
        log_probs, entropies = model.head.log_probs(predicting, torch.zeros_like(index), temperature=1.0)
        loss = log_probs.sum() + entropies.sum() if form.takes_entropy else log_probs.sum()
    marks.append(time.thread_time())
    loss.backward()  # type: ignore[no-untyped-call]
    marks.append(time.thread_time())
    return PassTimes(**dict(zip(vars(PassTimes()), map(operator.sub, marks[1:], marks), strict=True)))


@lru_cache(maxsize=16)
def decode_times(
    shape: Shape, form: PassForm, running: int, prompt: int, num_threads: int, sampling: Sampling
) -> DecodeTimes:
    """Decode steps, through the layers of `pass_ratios`, and through one of them.

    Args:
        shape: of the model.
        form: of its passes.
        running: sequences.
        prompt: tokens that each of them has.
        num_threads: of the process.
        sampling: as in the run.
    """
    form = dataclasses.replace(form, checkpointing=False)
    whole, first = (real_model(shape.config, form)[0] for _ in range(2))
    layers = layer_list(whole.module)
    count = len(layers)
    numbers = sum(parameter.numel() for parameter in layers.parameters()) + whole.head_weight.numel()
    del layer_list(first.module)[1:]
    first.config.get_text_config().num_hidden_layers = 1

    def measure() -> tuple[list[float], list[float], list[float]]:
        batches = [_decoding(model, running, prompt, sampling) for model in (whole, first)]
        several, one = zip(*_pairs(*batches), strict=True)
        renewed = []
        for _ in range(REPEATS):
            whole.num_changes += 1
            renewed.append(_seconds(lambda: batches[0].step(0)))
        return list(several), list(one), renewed

    several, one, renewed = with_threads(num_threads, measure)
    layer = max(0.0, statistics.median(map(operator.sub, several, one))) / max(1, count - 1)
    packed = statistics.median(renewed) - statistics.median(several)
    return DecodeTimes(
        layer=layer,
        rest=max(0.0, statistics.median(one) - layer),
        packed_number=max(0.0, packed) / numbers,
    )


def _decoding(model: CausalLM, running: int, prompt: int, sampling: Sampling) -> DecodeBatch:
    """Sequences behind their prompts."""
    model.module.requires_grad_(False)
    batch = DecodeBatch(model, max_running=running)
    ids = tuple(number % model.vocab_size for number in range(prompt))
    sampling = dataclasses.replace(sampling, max_tokens=NUM_DECODED + 1)
    batch.waiting.extend(Request(str(number), ids, sampling) for number in range(running))
    for _ in range(2):  # prompt, and the comparison of compiled steps with the model's own
        batch.step(0)
    return batch


def _pairs(several: DecodeBatch, one: DecodeBatch) -> list[tuple[float, float]]:
    """Seconds of decode steps of the one and the other, in turn: what a machine has beside them changes both alike."""
    pairs: list[tuple[float, float]] = []
    while len(pairs) < LEAST_STEPS or (len(pairs) < MOST_STEPS and sum(map(sum, pairs)) < STEPS_S):
        pairs.append((_seconds(lambda: several.step(0)), _seconds(lambda: one.step(0))))
    return pairs


def _seconds(function: Callable[[], object]) -> float:
    start = time.thread_time()
    function()
    return time.thread_time() - start
