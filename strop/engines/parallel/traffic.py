"""Traffic of a parallel plan: bytes that a rank sends in one optimizer step, by formulas.

Nothing is run, and torch is not needed: the basis of what is said about more devices than there are. What
the collectives really send is counted by sent_bytes.py; the benchmark of parallel plans compares the two.

Expert and pipeline parallelism are not in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]


def all_gather(part: float, ranks: int) -> float:
    """Bytes sent by each of the ranks, which all have a part of so many bytes and get those of all."""
    return (ranks - 1) * part


def reduce_scatter(part: float, ranks: int) -> float:
    """Bytes sent by each of the ranks, which get a part of so many bytes of the sum."""
    return (ranks - 1) * part


def all_reduce(size: float, ranks: int) -> float:
    """Bytes sent by each of the ranks for a sum of so many bytes on all of them."""
    return 2 * (ranks - 1) / ranks * size


def all_to_all(size: float, ranks: int) -> float:
    """Bytes sent by each of the ranks, which deal so many bytes out evenly."""
    return (ranks - 1) / ranks * size


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
    root_cut: tuple[Shape, ...]
    """As `layer_cut`, of embedding and head; tied ones once."""
    root_whole: tuple[Shape, ...]


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
    """N, packed; a shared prompt once."""
    num_predicted: int
    """M."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that a rank sends in one optimizer step."""

    parameters: float
    """Gathered parameters and summed gradients (FSDP2)."""
    tensor: float
    sequence: float
    context: float
    head: float
    """Hidden states of predicted tokens, and results of the shares of the head."""

    @property
    def total(self) -> float:
        """All together."""
        return self.parameters + self.tensor + self.sequence + self.context + self.head


def step_traffic(model: TrafficModel, plan: TrafficPlan, batches: Sequence[MicroBatchSize]) -> Traffic:
    """Bytes that a rank sends while it accumulates the gradient of a policy loss over micro-batches.

    Left out are a few numbers per step: the norm of the gradient, and how many micro-batches there are.
    """
    passes = [_pass_traffic(model, plan, batch) for batch in batches]
    return Traffic(
        parameters=_parameters(model, plan, len(batches)),
        tensor=sum(one.tensor for one in passes)
        + _num_sums(plan, len(batches)) * _whole_gradients(model, plan),
        sequence=sum(one.sequence for one in passes),
        context=sum(one.context for one in passes),
        head=sum(one.head for one in passes),
    )


def _parameters(model: TrafficModel, plan: TrafficPlan, num_passes: int) -> float:
    """A layer is gathered before its forward pass and again before its backward pass, the root's parameters once."""
    layer = model.layers * _shard_entries(model.layer_cut + model.layer_whole, plan.shards)
    root = _shard_entries(model.root_cut + model.root_whole, plan.shards)
    times_layer, times_root = (2 * num_passes, num_passes) if plan.reshard_after_forward else (1, 1)
    gathered = all_gather(times_layer * layer + times_root * root, plan.shards) * plan.activation_bytes
    sums = _num_sums(plan, num_passes) * (layer + root) * plan.gradient_bytes
    return gathered + reduce_scatter(sums, plan.shards) + all_reduce(sums, plan.copies)


def _num_sums(plan: TrafficPlan, num_passes: int) -> int:
    """Times that gradients are added up over ranks."""
    return num_passes if plan.each_pass else 1


def _shard_entries(shapes: Sequence[Shape], shards: int) -> int:
    """Entries of one rank's part of parameters, cut by rows and padded."""
    return sum(math.ceil(shape[0] / shards) * math.prod(shape[1:]) for shape in shapes)


def _whole_gradients(model: TrafficModel, plan: TrafficPlan) -> float:
    """Partial sums of the tensor-parallel ranks for parameters that each has whole."""
    entries = model.layers * _shard_entries(model.layer_whole, plan.shards)
    entries += _shard_entries(model.root_whole, plan.shards)
    return all_reduce(entries * plan.gradient_bytes, plan.tensor)


def _pass_traffic(model: TrafficModel, plan: TrafficPlan, batch: MicroBatchSize) -> Traffic:
    """Of the activations of one micro-batch, forward and backward."""
    again = model.layers if plan.checkpointing else 0  # layers that run a second time
    both = 2 * model.layers + again
    of_context = math.ceil(batch.num_tokens / plan.context)
    of_sequence = math.ceil(of_context / plan.sequence)
    of_tensor = math.ceil(of_context / plan.tensor)
    exchange = all_gather(of_tensor * model.hidden * plan.activation_bytes, plan.tensor)
    tokens = math.ceil(batch.num_predicted / (plan.context * plan.sequence))
    return Traffic(
        parameters=0.0,
        # A layer that runs again stops where nothing further is needed: before its last exchange.
        tensor=(4 * 2 * model.layers + 3 * again + 2 * 2) * exchange + _vocabulary(plan, tokens),
        sequence=both * _ulysses(model, plan, of_sequence),
        context=both * _keys(model, plan, of_context),
        head=_head(model, plan, tokens),
    )


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


def _head(model: TrafficModel, plan: TrafficPlan, tokens: int) -> float:
    """Hidden states to the rank whose share needs them and back, and the results of each token to all ranks.

    As if each rank needed as many of every rank.
    """
    ranks = plan.context * plan.sequence
    moved = all_to_all(tokens * model.hidden * plan.activation_bytes, ranks)
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
