"""Parameters of a model by their place (layers, embedding, head), and the share of a rank in a parallel plan."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from strop.engines.config import EngineConfig
from strop.engines.half_weights import is_multiplied
from strop.engines.moe.layers import has_standard_experts
from strop.engines.moe.layers import num_experts as experts_of
from strop.engines.optimizers.muon import NEWTON_SCHULZ_STEPS
from strop.engines.parallel.stages import stage_layers
from strop.trainer.plan.meta_model import PassForm, causal_lm, layer_list, truncated_module


@dataclass(frozen=True)
class Count:
    """Numbers of some parameters."""

    total: float = 0.0
    trained: float = 0.0
    matrices: float = 0.0
    """Trained, of hidden matrices, which Muon moves."""
    muon_flops: float = 0.0
    """Operations of a step of Muon on these."""

    @property
    def parts(self) -> tuple[float, ...]:
        """The numbers, in order."""
        return self.total, self.trained, self.matrices, self.muon_flops

    def __add__(self, other: Count) -> Count:
        return Count(*map(operator.add, self.parts, other.parts))

    def __sub__(self, other: Count) -> Count:
        return self + other * -1.0

    def __mul__(self, factor: float) -> Count:
        return Count(*(part * factor for part in self.parts))


@dataclass(frozen=True)
class Part:
    """Parameters of a layer, or of what is beside the layers, by what parallel ranks do with them."""

    cut: Count = Count()
    """Cut by tensor parallelism."""
    whole: Count = Count()
    """On each of its ranks."""
    experts: Count = Count()
    """Divided over all ranks of a stage."""

    @property
    def all(self) -> Count:
        """Together."""
        return self.cut + self.whole + self.experts

    def __add__(self, other: Part) -> Part:
        return Part(self.cut + other.cut, self.whole + other.whole, self.experts + other.experts)

    def __sub__(self, other: Part) -> Part:
        return Part(self.cut - other.cut, self.whole - other.whole, self.experts - other.experts)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """The parameters of a model."""

    layers: tuple[Part, ...]
    kinds: tuple[Hashable, ...]
    """Kind of each layer (`layer_kind`)."""
    embedding: Part
    head: Part
    """Empty where it is the embedding."""
    rest: Part
    """Final norm, and what else is beside the layers."""
    products: Count
    """Numbers of linear layers and experts, head excepted: passes round them, adapters included."""
    tensors: tuple[Part, ...]
    """Each parameter by itself."""
    head_numbers: float
    """Of the head, tied or not."""
    experts_per_token: float
    """Share of the experts that a token goes to; 1 of a dense model."""
    experts_chosen: float
    """Experts of a layer that a token goes to; 0 of a dense model."""
    key_heads: int
    """Of the layer with most."""
    key_dim: int
    """Numbers of a key or a value, of the larger."""
    latent_dim: int
    """Numbers that latent attention makes the keys and values of a token of; 0 of other attention."""
    windows: tuple[int | None, ...]
    """Tokens that a query of each layer sees; None: all before it."""
    num_heads: int
    hidden: int
    vocab: int

    @cached_property
    def _first(self) -> Sequence[Part]:
        """Parameters of the first layers, by their number: a search asks for those of many stages."""
        return list(itertools.accumulate(self.layers, initial=Part()))

    def layer_range(self, layers: range) -> Part:
        """Parameters of neighbouring layers."""
        return self._first[layers.stop] - self._first[layers.start]

    @cached_property
    def total(self) -> float:
        """All numbers."""
        return self.whole_model.all.total

    @cached_property
    def active(self) -> float:
        """Numbers that a token goes through in products: embedding excepted."""
        layers = self._first[-1]
        dense = layers.cut.total + layers.whole.total + self.head_numbers
        return dense + layers.experts.total * self.experts_per_token

    @property
    def experts_total(self) -> float:
        """Numbers of all experts."""
        return self._first[-1].experts.total

    @property
    def decoded(self) -> float:
        """Numbers of layers and head."""
        return self._first[-1].all.total + self.head_numbers

    @cached_property
    def in_trial(self) -> float:
        """Numbers of the head, the first layer, and the last one of each kind."""
        layers = {0: self.layers[0]} | dict(zip(self.kinds, self.layers, strict=True))
        return sum(part.all.total for part in layers.values()) + self.head_numbers

    def seen_tokens(self, context: float) -> float:
        """Tokens of so many that a query sees, in the mean of the layers."""
        return sum(min(context, window or context) for window in self.windows) / len(self.windows)

    @property
    def trained(self) -> float:
        """Numbers that are trained."""
        return self.whole_model.all.trained

    @property
    def whole_model(self) -> Part:
        """Every parameter."""
        return self._first[-1] + self.embedding + self.head + self.rest


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Ranks of a role along each axis."""

    world: int = 1
    tensor: int = 1
    sequence: int = 1
    context: int = 1
    pipeline: int = 1
    experts: int = 1
    shards: int = 1
    """Ranks over which what an axis leaves is sharded."""

    @classmethod
    def of(cls, engine: EngineConfig, world: int) -> Axes:
        """Axes by the settings of an engine."""
        in_stage = world // (engine.tensor_parallel * engine.pipeline_parallel)
        return cls(
            world=world,
            tensor=engine.tensor_parallel,
            sequence=engine.sequence_parallel,
            context=engine.context_parallel,
            pipeline=engine.pipeline_parallel,
            experts=engine.expert_parallel,
            shards=engine.shard_size or max(1, in_stage),
        )

    @property
    def data(self) -> int:
        """Ranks with rows of their own."""
        return max(1, self.world // (self.tensor * self.sequence * self.context * self.pipeline))

    @property
    def copies(self) -> int:
        """Groups of shards that hold the same (engine.shard_size)."""
        return max(1, self.in_stage // (self.tensor * self.shards))

    @property
    def in_stage(self) -> int:
        """Ranks of a stage."""
        return max(1, self.world // self.pipeline)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Numbers of a rank of one stage."""

    held: Count
    """Its shards."""
    gathered: Count
    """All that its stage computes with, on one rank: matrices cut, experts of its own."""
    largest_layer: Count
    """Of these, a layer's."""
    root: Count
    """Of these, beside the layers."""
    layers: range


def share_of(sizes: ModelSizes, axes: Axes, engine: EngineConfig, stage: int) -> Share:
    """The numbers of a rank of a stage."""
    stages = stage_layers(len(sizes.layers), axes.pipeline, engine.pipeline_layers)
    layers = stages[stage] if axes.pipeline > 1 else range(len(sizes.layers))
    root = Part()
    if stage == 0:
        root += sizes.embedding
    if stage == axes.pipeline - 1:
        root += sizes.rest + sizes.head
        if axes.pipeline > 1 and not sizes.head.all.total:
            root += sizes.embedding  # tied: the last stage has it as well
    of_layers = sizes.layer_range(layers)
    both = of_layers + root
    kinds = {id(part): part for part in sizes.layers[layers.start : layers.stop]}  # alike: one object
    return Share(
        held=held_count(both, axes, engine),
        gathered=computed_count(both, axes),
        largest_layer=max(
            (computed_count(part, axes) for part in kinds.values()),
            key=lambda count: count.total,
            default=Count(),
        ),
        root=computed_count(root, axes),
        layers=layers,
    )


def held_count(part: Part, axes: Axes, engine: EngineConfig) -> Count:
    """Numbers of some parameters in the shards of a rank."""
    of_experts = axes.in_stage if engine.shard_size == 0 else axes.shards * axes.tensor
    return (part.cut * (1 / axes.tensor) + part.whole) * (1 / axes.shards) + part.experts * (1 / of_experts)


def computed_count(part: Part, axes: Axes) -> Count:
    """Numbers of some parameters that a rank computes with."""
    return part.cut * (1 / axes.tensor) + part.whole + part.experts * (1 / (axes.experts * axes.tensor))


def model_sizes(shape: PreTrainedConfig, form: PassForm) -> ModelSizes:
    """Count the parameters of a model, an adapter included."""
    module, kinds, kept = truncated_module(shape, form)
    text = shape.get_text_config()
    causal_lm(module, form)
    layers = layer_list(module)
    output, inputs = module.get_output_embeddings(), module.get_input_embeddings()
    head_weight = None if output is None else output.weight
    tensors = {kind: _tensors(layer.modules()) for kind, layer in zip(kept, layers, strict=True)}
    of_kind = {kind: sum(parts, Part()) for kind, parts in tensors.items()}
    products = {kind: _of_products(layer) for kind, layer in zip(kept, layers, strict=True)}
    embedding = Part(cut=_count(inputs.weight, is_hidden=False))
    head = Part()
    if head_weight is not None and head_weight is not inputs.weight:
        head = Part(cut=_count(head_weight, is_hidden=False))
    known = {id(p) for layer in layers for p in layer.parameters()} | {id(inputs.weight), id(head_weight)}
    rest = [Part(whole=_count(p, is_hidden=False)) for p in module.parameters() if id(p) not in known]
    experts = experts_of(shape)
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "moe_topk", None) or experts
    key_heads, key_dim = key_sizes(text)
    latent = getattr(text, "kv_lora_rank", None)
    windows = {kind: _window(layer, text) for kind, layer in zip(kept, layers, strict=True)}
    return ModelSizes(
        layers=tuple(of_kind[kind] for kind in kinds),
        kinds=kinds,
        embedding=embedding,
        head=head,
        rest=sum(rest, Part()),
        products=sum((products[kind] for kind in kinds), Count()),
        tensors=(*(part for kind in kinds for part in tensors[kind]), embedding, head, *rest),
        head_numbers=float(head_weight.numel()) if head_weight is not None else float(text.hidden_size),
        experts_per_token=float(chosen) / experts if experts else 1.0,
        experts_chosen=float(chosen),
        key_heads=key_heads,
        key_dim=key_dim,
        latent_dim=int(latent) + int(text.qk_rope_head_dim) if latent else 0,
        windows=tuple(windows[kind] for kind in kinds),
        num_heads=int(text.num_attention_heads),
        hidden=int(text.hidden_size),
        vocab=int(inputs.weight.shape[0]),
    )


def key_sizes(text: Any) -> tuple[int, int]:
    """Heads of keys, and numbers of a key or a value of a head, as the cache holds them."""
    heads = int(text.num_attention_heads)
    if getattr(text, "kv_lora_rank", None):  # latent attention: keys and values are cached expanded
        keys = int(text.qk_nope_head_dim) + int(text.qk_rope_head_dim)
        return heads, max(keys, int(text.v_head_dim))
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return int(getattr(text, "num_key_value_heads", None) or heads), dim


def _window(layer: nn.Module, text: Any) -> int | None:
    """Tokens that a query of a layer sees; None: all before it. Layers that do not hold it ask the configuration."""
    held = [part.sliding_window for part in layer.modules() if hasattr(part, "sliding_window")]
    windows: list[Any] = held or [getattr(text, "sliding_window", None)]
    return next((int(window) for window in windows if isinstance(window, int) and window > 0), None)


def _of_products(layer: nn.Module) -> Count:
    multiplied = (part for part in layer.modules() if is_multiplied(part))
    counts = (_count(own, is_hidden=True) for part in multiplied for own in part.parameters(recurse=False))
    return sum(counts, Count())


def _tensors(modules: Iterable[nn.Module]) -> list[Part]:
    """Each parameter of these modules."""
    parts = []
    for module in modules:
        for parameter in module.parameters(recurse=False):
            if has_standard_experts(module):
                parts.append(Part(experts=_count(parameter, is_hidden=True)))
            elif parameter.dim() >= 2:
                parts.append(Part(cut=_count(parameter, is_hidden=True)))
            else:
                parts.append(Part(whole=_count(parameter, is_hidden=False)))
    return parts


def _count(parameter: torch.nn.Parameter, *, is_hidden: bool) -> Count:
    numbers = float(parameter.numel())
    if not parameter.requires_grad:
        return Count(numbers)
    if is_hidden and parameter.dim() == 2:
        return Count(numbers, numbers, numbers, _muon_flops(*parameter.shape))
    return Count(numbers, numbers)


def _muon_flops(rows: int, columns: int) -> float:
    """Of X X^T, its square, and their product with X, of a matrix in each iteration."""
    few, many = sorted((rows, columns))
    return float(NEWTON_SCHULZ_STEPS * (4 * few**2 * many + 2 * few**3))
