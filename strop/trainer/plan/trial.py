"""Passes and decode steps of a model's first layers, done for real on this processor.

A pass through layers is Python, many small operators, and memory that the system has to find first: how long that takes
beside the products of a device is no constant. So the layers that are traced are carried out as well, with random
weights, on a micro-batch that takes about a second; and the stages of a step are as much longer than the rates of the
device say as these were.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import statistics
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
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
from strop.utils.glibc import keep_heap

T = TypeVar("T")

REPEATS = 3
LEAST_STEPS, MOST_STEPS, STEPS_S = 8, 64, 0.8
"""Pairs of decode steps of a measurement, and the seconds after which there are enough; medians count."""
BEFORE_STEPS = 2
"""Tokens behind a prompt before these: its own, and one by the model's own forward pass."""
NUM_DECODED = BEFORE_STEPS + MOST_STEPS + REPEATS
"""Tokens behind a prompt, with some by new weights."""


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds of the parts of a pass with a gradient, or their ratio to what the rates of a device say."""

    layers_forward: float = 1.0
    base_forward: float = 1.0
    """Beside the layers: embedding, final norm and head."""
    base_backward: float = 1.0
    layers_backward: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DecodeTimes:
    """Seconds of a decode step."""

    layer: float
    """Of a layer, on average of those that were carried out."""
    rest: float
    """Beside the layers: head, sampling and records."""
    packed_number: float
    """Of each number of layers and head, once, with new weights: they are packed for the kernel."""
    context: float = 0.0
    """Tokens of a sequence, on average of the steps that were carried out."""


def pass_times(passes: Passes, seconds: Callable[[Work], float]) -> PassTimes:
    """By the rates of a device."""
    return PassTimes(
        layers_forward=seconds(passes.layers_forward),
        base_forward=seconds(passes.base_forward),
        base_backward=seconds(passes.base_backward),
        layers_backward=seconds(passes.layers_backward),
    )


def pass_ratios(
    shape: Shape, form: PassForm, batch: PackedShape, seconds: Callable[[Work], float], num_threads: int
) -> PassTimes:
    """An update of the first layer and the last one of each kind, beside the rates of a device.

    Args:
        shape: of the model.
        form: of the passes.
        batch: the micro-batch.
        seconds: of this processor, by its rates.
        num_threads: of the process.
    """
    real, passes = _carried_out(shape, form, batch, num_threads)
    planned = pass_times(passes, seconds)
    return PassTimes(
        **{name: value / max(getattr(planned, name), 1e-9) for name, value in vars(real).items()}
    )


@lru_cache(maxsize=16)
def _carried_out(
    shape: Shape, form: PassForm, batch: PackedShape, num_threads: int
) -> tuple[PassTimes, Passes]:
    """The same in seconds, and as a trace has it."""
    model, kept = real_model(shape.config, form)
    keep_heap(
        is_recomputed=form.checkpointing
    )  # what the system gives again has a page fault for every 4 KiB
    runs = with_threads(num_threads, lambda: [_update(model, form, batch) for _ in range(REPEATS)])
    medians = {name: statistics.median(getattr(run, name) for run in runs) for name in vars(runs[0])}
    passes = dataclasses.replace(trace_passes(shape.config, form, batch), kinds=tuple(kept))
    return PassTimes(**medians), passes


def real_model(shape: PreTrainedConfig, form: PassForm) -> tuple[CausalLM, list[Hashable]]:
    """The layers that are traced, with random numbers; their kinds."""
    module, kept = _drawn(shape, form)
    return _as_it_runs(module, form), kept


def _drawn(shape: PreTrainedConfig, form: PassForm) -> tuple[Any, list[Hashable]]:
    """The module of these layers, and their kinds."""
    module, _, kept = truncated_module(shape, form)
    module.to_empty(device="cpu")
    module.tie_weights()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.fill_(0.01)  # frequencies
    return module, kept


def _first_layer(module: Any) -> Any:
    """A module of the same tensors, without the layers behind the first."""
    tensors = (*module.parameters(), *module.buffers())
    first = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    del layer_list(first)[1:]
    first.config.get_text_config().num_hidden_layers = 1
    return first


def _as_it_runs(module: Any, form: PassForm) -> CausalLM:
    """A module as an engine runs it."""
    if form.checkpointing:
        checkpoint_layers(module)
    use_packed_attention(module, None, by_formula=form.by_formula)
    use_cpu_layers(module)
    use_rotary_kernel(module)
    model = causal_lm(module, form)
    if form.is_sharded:
        module.to(form.compute_dtype)
        model.root = _Gathered()
    return model


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
    """Seconds of its parts, which are those of a trace."""
    attention = PackedAttention(batch.segments, device=torch.device("cpu"))
    attention.prepare()
    ids = torch.arange(batch.num_tokens)[None] % model.vocab_size
    index = torch.arange(batch.num_predicted) % batch.num_tokens
    start = time.thread_time()
    with _LayerMarks(model) as layers:
        hidden = model.backbone(ids, torch.zeros_like(ids), attention)
    predicting = nn.functional.embedding(index, hidden)
    if form.has_value_head:
        loss = model.head.values(predicting).sum()
    else:
        log_probs, entropies = model.head.log_probs(predicting, torch.zeros_like(index), temperature=1.0)
        loss = log_probs.sum() + entropies.sum() if form.takes_entropy else log_probs.sum()
    middle = time.thread_time()
    loss.backward()  # type: ignore[no-untyped-call]
    end = time.thread_time()
    forward = layers.end - layers.start
    backward = (layers.input_gradient or end) - layers.output_gradient
    return PassTimes(
        layers_forward=forward,
        base_forward=middle - start - forward,
        base_backward=end - middle - backward,
        layers_backward=backward,
    )


class _LayerMarks:
    """Times at which a pass comes to a model's layers and leaves them, forward inside and backward from then on."""

    def __init__(self, model: CausalLM) -> None:
        self.start = self.end = self.output_gradient = self.input_gradient = 0.0
        """The last stays 0 where the input needs no gradient."""
        layers = layer_list(model.module)
        self._handles = (
            layers[0].register_forward_pre_hook(self._enter, with_kwargs=True),
            layers[-1].register_forward_hook(self._leave),
        )

    def __enter__(self) -> _LayerMarks:
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:  # checkpointed layers run again
            handle.remove()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(partial(self._note, "input_gradient"))
        self.start = time.thread_time()

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.end = time.thread_time()
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(partial(self._note, "output_gradient"))

    def _note(self, name: str, grad: Tensor) -> None:
        setattr(self, name, time.thread_time())


@lru_cache(maxsize=16)
def decode_times(
    shape: Shape, form: PassForm, running: int, prompt: int, num_threads: int, sampling: Sampling
) -> DecodeTimes:
    """Decode steps, through the layers of `real_model`, and through one of them.

    Args:
        shape: of the model.
        form: of its passes.
        running: sequences.
        prompt: tokens that each of them has.
        num_threads: of the process.
        sampling: as in the run.
    """
    form = dataclasses.replace(form, checkpointing=False)
    module, _ = _drawn(shape.config, form)
    one_layer = _first_layer(module)
    whole, first = (_as_it_runs(each, form) for each in (module, one_layer))
    layers = layer_list(whole.module)
    count = len(layers)
    numbers = sum(parameter.numel() for parameter in layers.parameters()) + whole.head_weight.numel()

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
        context=prompt + BEFORE_STEPS + len(several) / 2,
    )


def _decoding(model: CausalLM, running: int, prompt: int, sampling: Sampling) -> DecodeBatch:
    """Sequences behind their prompts."""
    model.module.requires_grad_(False)
    batch = DecodeBatch(model, max_running=running)
    ids = tuple(number % model.vocab_size for number in range(prompt))
    sampling = dataclasses.replace(sampling, max_tokens=NUM_DECODED + 1)
    batch.waiting.extend(Request(str(number), ids, sampling) for number in range(running))
    for _ in range(BEFORE_STEPS):  # prompt, and the comparison of compiled steps with the model's own
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
