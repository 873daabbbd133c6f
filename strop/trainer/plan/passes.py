"""Memory and work of the passes of a model over a micro-batch, from its configuration alone.

A model of few layers (meta_model.py) is traced (tracing.py) on a micro-batch, and all the others follow from them.
Nothing of the size of a weight or an activation is allocated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedConfig

from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM, use_packed_attention
from strop.engines.cpu_products import HalfProducts, is_half_faster
from strop.engines.half_weights import weights_of_products
from strop.engines.head import chunk_rows
from strop.engines.model import checkpoint_layers
from strop.engines.segments import Segment
from strop.trainer.plan.accelerator import (
    DeviceHead,
    FlashAttention,
    fused_gate,
    fused_norm,
    fused_norm_before_products,
    use_traced_gates,
    use_traced_norms,
)
from strop.trainer.plan.cpu_layers import CpuAttention, use_traced_cpu_layers
from strop.trainer.plan.heap_replay import HeapTrace, gap_bytes, share_in_heap
from strop.trainer.plan.meta_model import PassForm, causal_lm, layer_list, truncated_module
from strop.trainer.plan.tracing import Mark, Recorder, Work, recording
from strop.utils.glibc import largest_in_heap

HEAD_CHUNKS = 2
"""Chunks of the head that are traced; the others are like them."""


@dataclass(frozen=True, kw_only=True)
class PackedShape:
    """Sizes of a micro-batch."""

    segments: tuple[Segment, ...]
    num_predicted: int
    """M."""

    @property
    def num_tokens(self) -> int:
        """N."""
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True, kw_only=True)
class LayerPass:
    """A layer of a kind in a pass with a gradient."""

    saved_bytes: int
    """Kept from its forward to its backward pass."""
    forward: Work
    backward: Work


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Passes with a gradient over one micro-batch, beside weights, gradients and optimizer state."""

    kinds: tuple[Hashable, ...]
    """Kind of each layer of the whole model."""
    layers: dict[Hashable, LayerPass]
    saved_base_bytes: int
    """Kept beside the layers: hidden states that are predicted from, embeddings."""
    top_bytes: int
    """Most bytes beside what is kept, in the head and in the backward pass of a layer."""
    heap: HeapTrace | None
    """Of a CPU."""
    heap_share: float
    """Of the bytes that are kept, those in the heap of a CPU, where freed memory stays with the process."""
    tail_bytes: int
    """Most bytes when the layers are through: gradients of the embedding on their way."""
    base_forward: Work
    """Of embedding, final norm and head."""
    base_backward: Work

    def saved_bytes(self, kinds: Sequence[Hashable] | None = None) -> int:
        """Kept between the passes by these layers (None: all), and beside them."""
        kinds = self.kinds if kinds is None else kinds
        return self.saved_base_bytes + sum(self.layers[kind].saved_bytes for kind in kinds)

    def gap_bytes(self, kinds: Sequence[Hashable]) -> int:
        """Of the holes in the heap of a CPU in a pass through these layers."""
        return 0 if self.heap is None else gap_bytes(self.heap, tuple(kinds))

    @property
    def layers_forward(self) -> Work:
        """Work of the layers, forward."""
        return sum((self.layers[kind].forward for kind in self.kinds), Work())

    @property
    def layers_backward(self) -> Work:
        """Work of the layers, backward."""
        return sum((self.layers[kind].backward for kind in self.kinds), Work())

    @property
    def forward(self) -> Work:
        """Work of a pass without a gradient."""
        return self.layers_forward + self.base_forward

    @property
    def backward(self) -> Work:
        """Work of a backward pass."""
        return self.layers_backward + self.base_backward


def trace_passes(shape: PreTrainedConfig, form: PassForm, batch: PackedShape) -> Passes:
    """Trace an update.

    Args:
        shape: configuration of the model.
        form: of the passes.
        batch: the micro-batch.

    Raises:
        ValueError: a layer of the model computes with the values of tensors, so that shapes alone do not tell.
    """
    with _traced_model(shape, form, batch) as (run, kinds), torch.enable_grad():
        return run.with_gradient(kinds)


def trace_forward_bytes(shape: PreTrainedConfig, form: PassForm, batch: PackedShape) -> int:
    """Most bytes of a pass without a gradient; arguments and errors as of `trace_passes`."""
    with _traced_model(shape, form, batch) as (run, _):
        return run.without_gradient()


@contextlib.contextmanager
def _traced_model(
    shape: PreTrainedConfig, form: PassForm, batch: PackedShape
) -> Iterator[tuple[_Run, tuple[Hashable, ...]]]:
    """A truncated model of shapes, whose passes are counted inside; the kinds of all of its layers."""
    module, kinds, kept = truncated_module(shape, form)
    try:
        yield from _prepared(module, kinds, kept, form, batch)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"a pass of {type(module).__name__} cannot be followed without numbers ({reason}): the "
            f"plan needs layers whose shapes do not depend on values"
        ) from error


def _prepared(
    module: Any, kinds: tuple[Hashable, ...], kept: list[Hashable], form: PassForm, batch: PackedShape
) -> Iterator[tuple[_Run, tuple[Hashable, ...]]]:
    if form.checkpointing:
        checkpoint_layers(module)
    use_packed_attention(module, None, by_formula=form.by_formula)
    recorder = Recorder()
    if form.is_accelerator:
        use_traced_norms(module, fused_norm, before_products=fused_norm_before_products)
        use_traced_gates(module, fused_gate)
    else:
        is_plain = not form.checkpointing and not form.is_sharded
        use_traced_cpu_layers(module, form.compute_dtype, recorder, has_layer_products=is_plain)
    model = causal_lm(module, form)
    if model.recurrence is not None:
        raise ValueError(
            f"{type(module).__name__} has layers of linear attention, which carry a state from token to token: a plan "
            f"does not follow them"
        )
    attention: Any = PackedAttention(batch.segments, device=torch.device("cpu"))
    _ = attention.buckets  # index tensors need numbers: they are made before the trace
    if form.is_accelerator:
        attention = FlashAttention(attention, form.compute_dtype, recorder)
    else:
        attention = CpuAttention(attention, recorder)
    trained = [parameter.requires_grad for parameter in module.parameters()]
    if form.is_sharded:  # parameters are gathered in this precision, and not cast again
        module.to(form.compute_dtype)
        model.root = module
    elif form.holds_half:
        for weight in weights_of_products(module, torch.device("cuda" if form.is_accelerator else "cpu")):
            if not (form.lora.enabled and weight.requires_grad):
                weight.data = weight.data.to(form.compute_dtype)
    if form.compute_dtype == torch.bfloat16 and not form.is_accelerator:
        is_half_faster()  # by a measurement, which needs numbers
    with recording(recorder):
        module.to_empty(device="cpu")
        model.device = torch.device("cpu")
        module.tie_weights()
        for parameter, is_trained in zip(module.parameters(), trained, strict=True):
            parameter.requires_grad_(is_trained)
            parameter.grad = torch.zeros_like(parameter) if is_trained else None
        yield _Run(model, form, batch, attention, recorder, kept), kinds


def _products(form: PassForm) -> contextlib.AbstractContextManager[object]:
    """Products of layers as CausalLM.precision has them on a CPU, of weights without numbers."""
    if form.is_accelerator or form.checkpointing or form.compute_dtype != torch.bfloat16:
        return contextlib.nullcontext()
    return HalfProducts(FakeTensor)


class _Run:
    """A truncated model of shapes, and the points of its passes."""

    def __init__(
        self,
        model: CausalLM,
        form: PassForm,
        batch: PackedShape,
        attention: Any,
        recorder: Recorder,
        kept: list[Hashable],
    ) -> None:
        self._model, self._form, self._batch = model, form, batch
        self._attention, self._recorder, self._kept = attention, recorder, kept
        self._layers = list(layer_list(model.module))
        self._input_bytes: dict[int, int] = {}
        self._before: dict[int, Mark] = {}
        self._behind: dict[int, Mark] = {}
        self._grad_of_output: dict[int, Mark] = {}
        self._grad_of_input: dict[int, Mark] = {}
        self._behind_head: Mark | None = None
        self._chunks_left = 0.0
        """Work of the head that is not traced, as a multiple of what is."""
        self._head_peak = self._layer_peak = 0
        self._is_watching = False
        self._base = recorder.live

    def without_gradient(self) -> int:
        """Most bytes of a pass without gradient."""
        self._recorder.reset_peak()
        with torch.no_grad():
            self._losses()
        return self._recorder.peak - self._base

    def with_gradient(self, kinds: tuple[Hashable, ...]) -> Passes:
        """A forward and a backward pass."""
        recorder, self._is_watching = self._recorder, True
        handles = [
            handle
            for number, layer in enumerate(self._layers)
            for handle in (
                layer.register_forward_pre_hook(partial(self._enter, number), with_kwargs=True),
                layer.register_forward_hook(partial(self._leave, number)),
            )
        ]
        start = recorder.mark()
        recorder.reset_peak()
        loss, saved = self._losses()
        self._is_watching = False
        behind = recorder.mark()
        loss.backward()  # type: ignore[no-untyped-call]
        last = len(self._layers) - 1
        tail_peak = recorder.peak
        layer_peak = self._layer_peak if last in self._grad_of_input else recorder.peak
        for handle in handles:
            handle.remove()
        end = recorder.mark()
        layers = self._layer_passes(end)
        of_kept = [layers[kind] for kind in self._kept]
        kept_events = recorder.events[start.num_events : saved.num_events]
        heap = None if self._form.is_accelerator else self._heap_trace(start, end)
        base_saved = saved.live - self._base - sum(layer.saved_bytes for layer in of_kept)
        more = self._chunks_left  # of the head, alike
        rest = [behind.work - start.work, end.work - behind.work]
        rest[0] += (behind.work - saved.work) * more
        if (behind_head := self._behind_head) is not None:
            rest[1] += (behind_head.work - behind.work) * more
        for layer in of_kept:
            rest = [rest[0] - layer.forward, rest[1] - layer.backward]
        return Passes(
            kinds=kinds,
            layers=layers,
            saved_base_bytes=base_saved,
            top_bytes=max(self._head_peak, layer_peak) - saved.live,
            heap=heap,
            heap_share=0.0 if heap is None else share_in_heap(kept_events, heap.largest),
            tail_bytes=tail_peak - self._base,
            base_forward=rest[0],
            base_backward=rest[1],
        )

    def _layer_passes(self, end: Mark) -> dict[Hashable, LayerPass]:
        """The last layer of each kind."""
        layers: dict[Hashable, LayerPass] = {}
        for number, kind in enumerate(self._kept):
            before = self._before[number]
            behind = self._behind[number]
            grad_out = self._grad_of_output.get(number, end)
            grad_in = self._grad_of_input.get(number, end)
            layers[kind] = LayerPass(
                # Checkpoints keep the input; weights cast in the forward pass are gone behind it.
                saved_bytes=self._input_bytes[number]
                if self._form.checkpointing
                else behind.live - before.live,
                forward=behind.work - before.work,
                backward=grad_in.work - grad_out.work,
            )
        return layers

    def _heap_trace(self, start: Mark, end: Mark) -> HeapTrace:
        first, numbers = start.num_events, range(len(self._kept))

        def between(before: Mark, behind: Mark) -> range:
            return range(before.num_events - first, behind.num_events - first)

        return HeapTrace(
            events=tuple(self._recorder.events[first : end.num_events]),
            kinds=tuple(self._kept),
            forward=tuple(between(self._before[i], self._behind[i]) for i in numbers),
            backward=tuple(
                between(self._grad_of_output.get(i, end), self._grad_of_input.get(i, end)) for i in numbers
            ),
            largest=largest_in_heap(is_recomputed=self._form.checkpointing),
        )

    def _enter(self, number: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_watching:
            return
        self._before[number] = self._recorder.mark()
        hidden = args[0] if args else kwargs["hidden_states"]
        self._input_bytes[number] = hidden.untyped_storage().nbytes()
        if hidden.requires_grad:
            hidden.register_hook(partial(self._note, self._grad_of_input, number))

    def _leave(self, number: int, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not self._is_watching:
            return
        self._behind[number] = self._recorder.mark()
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(partial(self._note, self._grad_of_output, number))

    def _note(self, marks: dict[int, Mark], number: int, grad: Tensor) -> None:
        if number in marks:
            return
        marks[number] = self._recorder.mark()
        if number == len(self._layers) - 1:
            if marks is self._grad_of_output:
                self._head_peak = self._recorder.peak
            else:
                self._layer_peak = self._recorder.peak
            self._recorder.reset_peak()

    def _losses(self) -> tuple[Tensor, Mark]:
        """Loss of the pass, and the point behind the layers."""
        batch, model = self._batch, self._model
        ids = torch.zeros(1, batch.num_tokens, dtype=torch.int64)
        positions = torch.zeros(1, batch.num_tokens, dtype=torch.int64)
        with _products(self._form):
            hidden = model.backbone(ids, positions, self._attention)
        index = torch.zeros(batch.num_predicted, dtype=torch.int64)
        predicting = nn.functional.embedding(index, hidden)
        saved = self._recorder.mark()
        if predicting.requires_grad:
            predicting.register_hook(self._note_head)  # type: ignore[no-untyped-call]
        head = model.head
        if self._form.has_value_head:
            return head.values(predicting).sum(), saved
        if self._form.is_accelerator:
            log_probs = DeviceHead.apply(predicting, head.weight, self._recorder)  # type: ignore[no-untyped-call]
            return log_probs.sum(), saved
        count = min(batch.num_predicted, HEAD_CHUNKS * chunk_rows(head.weight.shape[0], hidden.device))
        self._chunks_left = batch.num_predicted / count - 1
        targets = torch.zeros(count, dtype=torch.int64)
        log_probs, entropies = head.log_probs(predicting[:count], targets, temperature=1.0)
        total = log_probs.sum()
        return total + entropies.sum() if self._form.takes_entropy else total, saved

    def _note_head(self, grad: Tensor) -> None:
        self._behind_head = self._recorder.mark()
