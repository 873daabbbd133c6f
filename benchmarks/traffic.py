"""Traffic of a parallel plan: bytes that a rank sends in one optimizer step, by formulas.

Nothing is run. What the collectives really send is counted by sent_bytes.py; parallel.py compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from strop.engines.parallel.traffic import all_gather, all_reduce, all_to_all, reduce_scatter, summed

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TrafficModel:
    """Sizes of a model whose layers are alike, on which traffic depends."""

    layers: int
    hidden: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    layer_cut: tuple[Shape, ...]
    """Shapes of a layer's parameters that tensor parallelism cuts: of a rank's part."""
    layer_whole: tuple[Shape, ...]
    """Shapes of those that each of its ranks has whole (norms; keys and values of fewer heads than ranks)."""
    embedding: tuple[Shape, ...]
    """As `layer_cut`, of the embedding."""
    head: tuple[Shape, ...]
    """The same of the head; none where it is the embedding."""
    norm: tuple[Shape, ...]
    """As `layer_whole`, of the norm before the head."""
    experts: tuple[Shape, ...] = ()
    """Of all experts of a layer, the first axis counting them; they are in none of the others."""
    experts_per_token: int = 0


@dataclass(frozen=True, kw_only=True)
class TrafficPlan:
    """Sizes of a plan on which traffic depends."""

    shards: int = 1
    """Ranks over which parameters are sharded."""
    copies: int = 1
    """Groups of them that hold the same (engine.shard_size)."""
    tensor: int = 1
    sequence: int = 1
    context: int = 1
    experts: int = 1
    """Ranks that experts are divided over."""
    stage_layers: tuple[int, ...] = ()
    """Layers of each pipeline stage, one on each rank; none without a pipeline."""
    stage: int = 0
    """Of these, the one of this rank."""
    reshard_after_forward: bool = True
    each_pass: bool = False
    """Gradients are added up after each micro-batch (engine.gradient_sync=each)."""
    checkpointing: bool = False
    activation_bytes: int = 2
    """Of an entry of activations and of gathered parameters: those of model.dtype."""
    gradient_bytes: int = 4
    """Of an entry of gradients that are added up."""
    result_bytes: int = 4
    """Of a log-prob, an entropy or a value."""
    is_value_model: bool = False
    """The head gives one number per token: no log-prob and entropy."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchSize:
    """A micro-batch as the ranks of one row have it."""

    num_tokens: int
    """N, packed; what rows share once."""
    num_predicted: int
    """U, predictions; what rows share once."""
    num_routed: float | None = None
    """N on average over the ranks that experts are divided over; None: as here."""
    num_moved: float | None = None
    """Hidden states of predictions that a rank of the row sends to others, on average with the gradients that it
    sends back; None: as if each rank needed as many of every rank."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in one optimizer step."""

    parameters: float
    """Gathered parameters and summed gradients (FSDP2)."""
    tensor: float
    sequence: float
    context: float
    experts: float
    """Tokens on their way to experts and back."""
    pipeline: float
    """Hidden states between stages, and gradients of an embedding that is the head as well."""
    head: float
    """Hidden states of predictions, and results of the shares of the head."""

    @property
    def total(self) -> float:
        """All together."""
        activations = self.tensor + self.sequence + self.context + self.experts + self.pipeline + self.head
        return self.parameters + activations


def step_traffic(model: TrafficModel, plan: TrafficPlan, batches: Sequence[MicroBatchSize]) -> Traffic:
    """Bytes that a rank sends while it accumulates the gradient of a policy loss over micro-batches.

    Left out are a few numbers per step: the norm of the gradient, and how many micro-batches there are.
    """
    part = _part(model, plan)
    passes = [_pass_traffic(model, plan, part, batch) for batch in batches]
    whole = _num_sums(plan, len(batches)) * _whole_gradients(model, plan, part)
    return Traffic(
        parameters=_parameters(model, plan, part, len(batches)),
        tensor=sum(one.tensor for one in passes) + whole,
        sequence=sum(one.sequence for one in passes),
        context=sum(one.context for one in passes),
        experts=sum(one.experts for one in passes),
        pipeline=sum(one.pipeline for one in passes) + _shared_gradients(model, plan, part),
        head=sum(one.head for one in passes),
    )


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Layers and root parameters of a rank."""

    layers: int
    is_first: bool
    is_last: bool
    root_cut: tuple[Shape, ...]
    root_whole: tuple[Shape, ...]


def _part(model: TrafficModel, plan: TrafficPlan) -> _Part:
    last = max(0, len(plan.stage_layers) - 1)
    is_first, is_last = plan.stage == 0, plan.stage == last
    head = () if plan.is_value_model else model.head or model.embedding
    cut = model.embedding if is_first else head if is_last else ()
    return _Part(
        layers=plan.stage_layers[plan.stage] if plan.stage_layers else model.layers,
        is_first=is_first,
        is_last=is_last,
        root_cut=cut + model.head if is_first and is_last else cut,
        root_whole=model.norm if is_last else (),
    )


def _parameters(model: TrafficModel, plan: TrafficPlan, part: _Part, num_passes: int) -> float:
    """A layer is gathered before its forward pass and again before its backward pass, the root's parameters once."""
    layer = part.layers * _shard_entries(model.layer_cut + model.layer_whole, plan.shards)
    root = _shard_entries(part.root_cut + part.root_whole, plan.shards)
    times_layer, times_root = (2 * num_passes, num_passes) if plan.reshard_after_forward else (1, 1)
    gathered = all_gather(times_layer * layer + times_root * root, plan.shards)
    num_sums = _num_sums(plan, num_passes)
    sums = num_sums * (layer + root) * plan.gradient_bytes
    bytes_of_rest = gathered * plan.activation_bytes
    bytes_of_rest += summed(sums, shards=plan.shards, copies=plan.copies)

    ranks = plan.shards * plan.copies * plan.tensor // plan.experts  # that hold the same experts
    experts = part.layers * sum(_expert_entries(shape, plan, ranks) for shape in model.experts)
    bytes_of_experts = all_gather(times_layer * experts, ranks) * plan.activation_bytes
    return bytes_of_rest + bytes_of_experts + reduce_scatter(num_sums * experts * plan.gradient_bytes, ranks)


def _expert_entries(shape: Shape, plan: TrafficPlan, ranks: int) -> int:
    """Entries of one rank's part of the experts' parameters: of whole experts where there are enough."""
    here = shape[0] // plan.experts
    if here % ranks and not shape[1] % ranks and plan.experts * plan.tensor > 1:
        return here * shape[1] // ranks * math.prod(shape[2:])
    return math.ceil(here / ranks) * math.prod(shape[1:])


def _num_sums(plan: TrafficPlan, num_passes: int) -> int:
    """Times that gradients are added up over ranks."""
    return num_passes if plan.each_pass else 1


def _shard_entries(shapes: Sequence[Shape], shards: int) -> int:
    """Entries of one rank's part of parameters, cut by rows and padded."""
    return sum(math.ceil(shape[0] / shards) * math.prod(shape[1:]) for shape in shapes)


def _whole_gradients(model: TrafficModel, plan: TrafficPlan, part: _Part) -> float:
    """Partial sums of the tensor-parallel ranks for parameters that each has whole."""
    entries = part.layers * _shard_entries(model.layer_whole, plan.shards)
    entries += _shard_entries(part.root_whole, plan.shards)
    return all_reduce(entries * plan.gradient_bytes, plan.tensor)


def _shared_gradients(model: TrafficModel, plan: TrafficPlan, part: _Part) -> float:
    """Of an embedding that is the head as well, between the first and the last stage."""
    if model.head or plan.is_value_model or part.is_first == part.is_last:
        return 0.0
    return float(_shard_entries(model.embedding, plan.shards) * plan.gradient_bytes)


def _pass_traffic(model: TrafficModel, plan: TrafficPlan, part: _Part, batch: MicroBatchSize) -> Traffic:
    """Of the activations of one micro-batch, forward and backward."""
    again = part.layers if plan.checkpointing else 0  # layers that run a second time
    both = 2 * part.layers + again
    of_context = math.ceil(batch.num_tokens / plan.context)
    of_sequence = math.ceil(of_context / plan.sequence)
    of_tensor = math.ceil(of_context / plan.tensor)
    between = (
        math.ceil(of_sequence / plan.tensor) * model.hidden * plan.activation_bytes
    )  # a rank's hidden states
    exchange = all_gather(of_tensor * model.hidden * plan.activation_bytes, plan.tensor)
    tokens = math.ceil(batch.num_predicted / (plan.context * plan.sequence))
    if model.experts:  # between regions
        exchanges = 2 * both
    else:  # A layer that runs again stops where nothing further is needed: before its last exchange.
        exchanges = 4 * both - again
    exchanges += 2 * part.is_first + 2 * part.is_last
    return Traffic(
        parameters=0.0,
        tensor=exchanges * exchange + part.is_last * _vocabulary(plan, tokens),
        sequence=both * _ulysses(model, plan, of_sequence),
        context=both * _keys(model, plan, of_context),
        experts=_routed(model, plan, both, part.layers + again, batch),
        pipeline=((not part.is_first) + (not part.is_last)) * between,
        head=part.is_last * _head(model, plan, tokens, batch.num_moved),
    )


def _routed(model: TrafficModel, plan: TrafficPlan, both: int, forward: int, batch: MicroBatchSize) -> float:
    """Tokens to the ranks of their experts and results back, as if each expert were chosen as often; and how many come
    from each rank, in int64."""
    if plan.experts == 1:
        return 0.0
    num_tokens = batch.num_tokens if batch.num_routed is None else batch.num_routed
    rows = num_tokens / (plan.context * plan.sequence * plan.tensor) * model.experts_per_token
    moved = all_to_all(rows * model.hidden * plan.activation_bytes, plan.experts)
    counts = all_to_all(model.experts[0][0] * 8, plan.experts)
    return both * 2 * moved + forward * counts


def _ulysses(model: TrafficModel, plan: TrafficPlan, tokens: int) -> float:
    """A layer's queries, keys and values to the ranks of their heads, and outputs back."""
    heads, key_heads = model.heads // plan.sequence, _key_heads(model, plan)
    entries = heads * (model.key_dim + model.value_dim) + key_heads * (model.key_dim + model.value_dim)
    return (plan.sequence - 1) * tokens * entries * plan.activation_bytes


def _keys(model: TrafficModel, plan: TrafficPlan, tokens: int) -> float:
    """A layer's keys and values to all ranks of the context."""
    entries = _key_heads(model, plan) * (model.key_dim + model.value_dim)
    return all_gather(tokens * entries * plan.activation_bytes, plan.context)


def _key_heads(model: TrafficModel, plan: TrafficPlan) -> int:
    """Key heads that a rank attends with: where there are too few of them, ranks have copies."""
    ranks = plan.sequence * plan.tensor
    run = model.heads // model.key_heads  # queries of a key head
    heads = model.heads // ranks
    copies = run // math.gcd(run, heads) if plan.sequence > 1 else max(1, ranks // model.key_heads)
    return model.key_heads * copies // ranks


def _head(model: TrafficModel, plan: TrafficPlan, tokens: int, num_moved: float | None) -> float:
    """Hidden states to the rank whose share needs them and back, and the results of each token to all ranks."""
    ranks = plan.context * plan.sequence
    entries = all_to_all(tokens, ranks) if num_moved is None else num_moved
    moved = entries * model.hidden * plan.activation_bytes
    results = 1 if plan.is_value_model else 2
    if plan.is_value_model and plan.tensor > 1:  # each rank gives values of its own tokens
        between = all_gather(math.ceil(tokens / plan.tensor) * plan.result_bytes, plan.tensor)
    else:
        between = 0.0
    return 2 * moved + all_gather(results * tokens * plan.result_bytes, ranks) + between


def _vocabulary(plan: TrafficPlan, tokens: int) -> float:
    """Normalizers and means of each rank's part of the vocabulary, and logits of the targets."""
    if plan.is_value_model:
        return 0.0
    gathered = all_gather(2 * tokens * plan.result_bytes, plan.tensor)
    return gathered + all_reduce(tokens * plan.result_bytes, plan.tensor)
