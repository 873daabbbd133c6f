"""Places of the parts of Hugging Face weights in the parameters of megatron-core on this rank.

megatron-core joins some matrices of a layer and cuts all of them over ranks:

    linear_qkv    per key head: the rows of its queries' projections, of its key's and of its value's; a rank has
                  neighbouring key heads
    linear_fc1    gate above up, of the hidden units of the rank; an expert is whole
    linear_proj, linear_fc2     columns of the rank
    word_embeddings, output_layer     rows of the rank, with zeros behind the last one of the vocabulary

So each part of a parameter is a box of one Hugging Face weight. Loading, export, checkpoints, weight sync and digests
all go through the boxes, for weights as for moments of the optimizer, and a checkpoint is the same whatever engine and
mesh wrote it. megatron-bridge maps these families too, but it wants transformers below 5 and packages that need CUDA
to be built (Transformer Engine, mamba-ssm, causal-conv1d), and does not know the stacked experts of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from strop.engines.megatron.layers import Stage

_BASE = "model."
"""Beginning of the names of all weights but those of the head."""
Cut = Callable[[Tensor], Tensor]
"""Takes a view of a part out of a tensor of a parameter's shape."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a parameter, and the box of a Hugging Face weight that it is."""

    name: str
    """Of the Hugging Face weight."""
    start: tuple[int, ...]
    """First corner of the box in it."""
    shape: tuple[int, ...]
    """Sizes of the box."""
    cut: Cut
    """The part of a tensor, with the numbers of the box in their order."""

    def read(self, tensor: Tensor) -> Tensor:
        """The box, from a tensor of the parameter's shape."""
        return self.cut(tensor).reshape(self.shape)

    def write(self, tensor: Tensor, box: Tensor) -> None:
        """Put the box into a tensor of the parameter's shape."""
        part = self.cut(tensor)
        part.copy_(box.reshape(part.shape))

    @property
    def box(self) -> tuple[slice, ...]:
        """Of the whole weight."""
        return tuple(slice(at, at + size) for at, size in zip(self.start, self.shape, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class Mapped:
    """A parameter of this rank with its pieces."""

    parameter: nn.Parameter
    pieces: tuple[Piece, ...]
    is_first: bool
    """Among the ranks of a tensor-parallel group, and the stages that share an embedding, one is the first to have this
    part."""


def mapped_parameters(stages: list[Stage], config: TransformerConfig, vocab_size: int) -> list[Mapped]:
    """Every parameter of this rank.

    Args:
        stages: of this rank.
        config: of the model.
        vocab_size: rows of the Hugging Face embedding.
    """
    return [mapped for stage in stages for mapped in _of_stage(stage, config, vocab_size)]


def check_complete(mapped: list[Mapped], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Numbers of each weight that this rank is the first to have.

    Raises:
        ValueError: a piece lies outside of its weight, or a weight does not exist.
    """
    counts = dict.fromkeys(shapes, 0)
    for entry in mapped:
        for piece in entry.pieces:
            shape = shapes.get(piece.name)
            if (
                shape is None
                or len(shape) != len(piece.start)
                or any(side.stop > size for side, size in zip(piece.box, shape, strict=True))
            ):
                raise ValueError(
                    f"the parameters of megatron-core hold {piece.name} from {list(piece.start)} in sizes "
                    f"{list(piece.shape)}, and that of the model is {shape}: use engine.kind=torch for this role"
                )
            if entry.is_first:
                counts[piece.name] += math.prod(piece.shape)
    return counts


def _of_stage(stage: Any, config: TransformerConfig, vocab_size: int) -> Iterator[Mapped]:
    if stage.pre_process:
        yield _vocabulary(f"{_BASE}embed_tokens.weight", stage.embedding.word_embeddings.weight, vocab_size)
    for layer in stage.decoder.layers:
        yield from _of_layer(layer, f"{_BASE}layers.{layer.layer_number - 1}.", config)
    if stage.post_process:
        yield _whole(f"{_BASE}norm.weight", stage.decoder.final_layernorm.weight)
        if stage.value_head is not None:
            yield _whole("score.weight", stage.value_head.weight)
            return
        weight = stage.output_layer.weight
        if weight is not None and stage.share_embeddings_and_output_weights:  # a copy on the last stage
            yield _vocabulary(f"{_BASE}embed_tokens.weight", weight, vocab_size, is_copy=True)
        elif weight is not None:
            yield _vocabulary("lm_head.weight", weight, vocab_size)


def _of_layer(layer: Any, name: str, config: TransformerConfig) -> Iterator[Mapped]:
    attention, mlp = layer.self_attention, layer.mlp
    yield _whole(f"{name}input_layernorm.weight", layer.input_layernorm.weight)
    yield _whole(f"{name}post_attention_layernorm.weight", layer.pre_mlp_layernorm.weight)
    yield _queries_keys_values(f"{name}self_attn.", "weight", attention.linear_qkv.weight, config)
    if config.add_qkv_bias:
        yield _queries_keys_values(f"{name}self_attn.", "bias", attention.linear_qkv.bias, config)
    if config.qk_layernorm:
        yield _whole(f"{name}self_attn.q_norm.weight", attention.q_layernorm.weight)
        yield _whole(f"{name}self_attn.k_norm.weight", attention.k_layernorm.weight)
    rank = parallel_state.get_tensor_model_parallel_rank()
    yield _columns(f"{name}self_attn.o_proj.weight", attention.linear_proj.weight, rank)
    if not hasattr(mlp, "experts"):
        yield _gate_and_up(f"{name}mlp.", mlp.linear_fc1.weight, rank)
        yield _columns(f"{name}mlp.down_proj.weight", mlp.linear_fc2.weight, rank)
        return
    yield _whole(f"{name}mlp.gate.weight", mlp.router.weight)
    for number, expert in zip(mlp.local_expert_indices, mlp.experts.local_experts, strict=True):
        yield from _of_expert(expert, number, f"{name}mlp.experts.")


def _of_expert(expert: Any, number: int, name: str) -> Iterator[Mapped]:
    """An expert's part of the stacked matrices [E, ., .]."""
    for matrix, part in ((expert.linear_fc1, "gate_up_proj"), (expert.linear_fc2, "down_proj")):
        shape = (1, *matrix.weight.shape)
        piece = Piece(name=f"{name}{part}", start=(number, 0, 0), shape=shape, cut=_all)
        yield Mapped(parameter=matrix.weight, pieces=(piece,), is_first=True)


def _vocabulary(name: str, parameter: nn.Parameter, vocab_size: int, *, is_copy: bool = False) -> Mapped:
    rows, hidden = parameter.shape
    first = min(parallel_state.get_tensor_model_parallel_rank() * rows, vocab_size)
    size = min(rows, vocab_size - first)
    piece = Piece(name=name, start=(first, 0), shape=(size, hidden), cut=_rows(0, size))
    return Mapped(parameter=parameter, pieces=(piece,), is_first=not is_copy)


def _whole(name: str, parameter: nn.Parameter) -> Mapped:
    piece = Piece(name=name, start=(0,) * parameter.dim(), shape=tuple(parameter.shape), cut=_all)
    is_first = param_is_not_tensor_parallel_duplicate(parameter)
    return Mapped(parameter=parameter, pieces=(piece,), is_first=is_first)


def _columns(name: str, parameter: nn.Parameter, rank: int) -> Mapped:
    rows, columns = parameter.shape
    piece = Piece(name=name, start=(0, rank * columns), shape=(rows, columns), cut=_all)
    return Mapped(parameter=parameter, pieces=(piece,), is_first=True)


def _gate_and_up(name: str, parameter: nn.Parameter, rank: int) -> Mapped:
    size, hidden = parameter.shape[0] // 2, parameter.shape[1]
    pieces = tuple(
        Piece(
            name=f"{name}{part}_proj.weight",
            start=(rank * size, 0),
            shape=(size, hidden),
            cut=_rows(half * size, size),
        )
        for half, part in enumerate(("gate", "up"))
    )
    return Mapped(parameter=parameter, pieces=pieces, is_first=True)


def _queries_keys_values(name: str, kind: str, parameter: nn.Parameter, config: TransformerConfig) -> Mapped:
    dim, key_heads = config.kv_channels, config.num_query_groups
    queries = config.num_attention_heads // key_heads  # heads of each key head
    groups = parameter.shape[0] // ((queries + 2) * dim)
    first = parallel_state.get_tensor_model_parallel_rank() * groups
    others = tuple(parameter.shape[1:])
    pieces, at = [], 0
    for part, heads in (("q", queries), ("k", 1), ("v", 1)):
        pieces.append(
            Piece(
                name=f"{name}{part}_proj.{kind}",
                start=(first * heads * dim, *(0 for _ in others)),
                shape=(groups * heads * dim, *others),
                cut=_rows_of_groups(groups, at * dim, heads * dim),
            )
        )
        at += heads
    return Mapped(parameter=parameter, pieces=tuple(pieces), is_first=True)


def _all(tensor: Tensor) -> Tensor:
    return tensor


def _rows(first: int, size: int) -> Cut:
    return lambda tensor: tensor[first : first + size]


def _rows_of_groups(groups: int, first: int, size: int) -> Cut:
    return lambda tensor: tensor.view(groups, -1, *tensor.shape[1:])[:, first : first + size]
