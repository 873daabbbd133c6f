"""Memory and work of the passes of a model over a micro-batch, from its configuration alone.

A model of its first layer and the last one of each kind (attention, experts, windows) is traced (tracing.py) on a
micro-batch; layers of a kind are alike, so that all the others follow. Nothing of the size of a weight or an activation
is allocated.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from strop.engines.attention import PackedAttention
from strop.engines.causal_lm import CausalLM, use_packed_attention
from strop.engines.config import LoraConfig
from strop.engines.cpu_products import HalfProducts, is_half_faster
from strop.engines.half_weights import weights_of_products
from strop.engines.head import chunk_rows
from strop.engines.lora import adapters
from strop.engines.model import checkpoint_layers
from strop.engines.multimodal.inputs import language_model_class
from strop.engines.segments import Segment
from strop.trainer.plan.accelerator import DeviceHead, FlashAttention, use_traced_norms
from strop.trainer.plan.cpu_layers import CpuAttention, use_traced_cpu_layers
from strop.trainer.plan.tracing import Mark, Recorder, Work, recording

HEAD_CHUNKS = 2
"""Chunks of the head that are traced; the others are like them."""


@dataclass(frozen=True, kw_only=True)
class PassForm:
    """A model as a pass runs it."""

    compute_dtype: torch.dtype
    weights_dtype: torch.dtype = torch.float32
    is_sharded: bool = False
    """Parameters are gathered in the precision of computation (FSDP2), in place of being cast in each product."""
    is_accelerator: bool = False
    """Kernels of an accelerator: FlashAttention, norms in one kernel, large chunks of the head."""
    checkpointing: bool = False
    has_value_head: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    holds_half: bool = False
    """Weights that are not trained are held in the precision of computation (engines/half_weights.py)."""
    by_formula: bool = False
    """model.attn_implementation=eager."""


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
    tail_bytes: int
    """Most bytes when the layers are through: gradients of the embedding on their way."""
    base_forward: Work
    """Of embedding, final norm and head."""
    base_backward: Work

    def saved_bytes(self, kinds: Sequence[Hashable] | None = None) -> int:
        """Kept between the passes by these layers (None: all), and beside them."""
        kinds = self.kinds if kinds is None else kinds
        return self.saved_base_bytes + sum(self.layers[kind].saved_bytes for kind in kinds)

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


def meta_module(shape: PreTrainedConfig, form: PassForm) -> Any:
    """The model on the meta device."""
    auto: Any = AutoModelForSequenceClassification if form.has_value_head else language_model_class(shape)
    shape = copy.deepcopy(shape)
    if form.has_value_head:
        shape.num_labels = 1
    with torch.device("meta"):
        module = auto.from_config(shape, dtype=form.weights_dtype)
    module.tie_weights()
    module.eval()
    return module


def causal_lm(module: Any, form: PassForm) -> CausalLM:
    """The model as an engine has it, with its adapter; nothing of this has numbers."""
    model = CausalLM(module, compute_dtype=form.compute_dtype)
    if form.lora.enabled:
        with torch.device("meta"):  # adapters of experts are large
            adapters.add_lora(model, replace(form.lora, path=""))
    return model


def layer_kind(layer: nn.Module) -> Hashable:
    """Equal for layers that compute alike: class, shapes of parameters, window."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
    windows = tuple(
        getattr(part, "sliding_window", None) for part in layer.modules() if hasattr(part, "sliding_window")
    )
    return type(layer).__name__, shapes, windows


def layer_list(module: Any) -> nn.ModuleList:
    count = module.config.get_text_config().num_hidden_layers
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            return part
    raise ValueError(f"{type(module).__name__} has no list of its {count} layers")


def truncate(module: Any, kinds: Sequence[Hashable]) -> list[Hashable]:
    """Keep the first layer, whose input may need no gradient, and the last one of each kind, in order; the kinds of
    those that are left."""
    layers, config = layer_list(module), module.config.get_text_config()
    last = {kind: i for i, kind in enumerate(kinds)}
    chosen = sorted({0, *last.values()})
    kept = [layers[i] for i in chosen]
    del layers[:]
    layers.extend(kept)
    for number, layer in enumerate(kept):
        for part in layer.modules():
            if hasattr(part, "layer_idx"):
                part.layer_idx = number  # type: ignore[assignment]
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[i] for i in chosen]
    config.num_hidden_layers = len(kept)
    return [kinds[i] for i in chosen]


_TEMPLATES: dict[tuple[object, ...], tuple[Any, tuple[Hashable, ...], list[Hashable]]] = {}
"""Truncated modules: hundreds of layers take seconds to make."""


def truncated_module(
    shape: PreTrainedConfig, form: PassForm
) -> tuple[Any, tuple[Hashable, ...], list[Hashable]]:
    """The model on the meta device with few layers (`truncate`); kinds of all layers, and of those that are left."""
    experts = getattr(shape, "_experts_implementation", None)
    key = (type(shape), shape.to_json_string(), experts, form.has_value_head, form.weights_dtype)
    if key not in _TEMPLATES:
        module = meta_module(shape, form)
        kinds = tuple(layer_kind(layer) for layer in layer_list(module))
        _TEMPLATES[key] = module, kinds, truncate(module, kinds)
    module, kinds, kept = _TEMPLATES[key]
    return copy.deepcopy(module), kinds, kept


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
        use_traced_norms(module)
    else:
        is_plain = not form.checkpointing and not form.is_sharded
        use_traced_cpu_layers(module, form.compute_dtype, recorder, has_layer_products=is_plain)
    model = causal_lm(module, form)
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
        self._top_peak = 0
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
        top_peak = self._top_peak if last in self._grad_of_input else recorder.peak
        for handle in handles:
            handle.remove()
        end = recorder.mark()
        layers = self._layer_passes(end)
        of_kept = [layers[kind] for kind in self._kept]
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
            top_bytes=top_peak - saved.live,
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
        if marks is self._grad_of_input and number == len(self._layers) - 1:
            self._top_peak = self._recorder.peak
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
        log_probs, _ = head.log_probs(predicting[:count], targets, temperature=1.0)
        return log_probs.sum(), saved

    def _note_head(self, grad: Tensor) -> None:
        self._behind_head = self._recorder.mark()
