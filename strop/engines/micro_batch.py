"""Micro-batches: rows of a batch packed end to end, and this rank's part of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from strop.engines.attention import PackedAttention
from strop.engines.moe.losses import RouterLoss
from strop.engines.moe.routing import Routing
from strop.engines.multimodal.vl_model import Vision
from strop.engines.packing import joined_positions, make_rows, token_rows
from strop.engines.parallel.context import ContextTensorShard, context_shard
from strop.engines.parallel.ranks import Parallel
from strop.engines.parallel.tensor import tensor_shard
from strop.engines.parallel.ulysses import shard_micro_batch, token_share
from strop.engines.prefix_tree import Node, Row, prefix_tree
from strop.engines.segments import Segment, Span
from strop.engines.tokens import PackedModel, Part, Tokens
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Media
from strop.utils.device import sent


def pack(
    data: DataProto,
    model: PackedModel,
    *,
    rows: Sequence[int] | None = None,
    parallel: Parallel | None = None,
    router_loss: RouterLoss | None = None,
    replays: bool = False,
) -> Tokens:
    """Rows of a batch end to end, as one micro-batch; rows that begin alike share these tokens wherever they stand.

    Without rows there is a token that predicts nothing: a rank that has none left passes in step with the others.

    Args:
        data: of this rank, as for `token_rows`; the same on all ranks that share each sequence.
        model: that will run.
        rows: numbers of the rows in it; None: all.
        parallel: says which ranks share each sequence; None: this one has all of it.
        router_loss: of the routers of a model with experts; None: without.
        replays: tokens go to the experts of column routed_experts [B, T~, L k], where the batch has it.

    Raises:
        ValueError: a row has media, and the model takes none, or ranks share each sequence.
    """
    device, inputs = model.device, model.media
    if is_empty := not len(data if rows is None else rows):
        data, rows = make_rows([torch.tensor([0])], [torch.tensor([0])]), None
    after = columns.row_lengths(data.tensors()["responses"]).cumsum(0)
    ends = after if rows is None else after[list(rows)]
    packing = _Packing(token_rows(data, rows, replays=replays), inputs)
    predicted = slice(0) if is_empty else slice(None)
    hidden_index, targets, prediction_index = (part[predicted] for part in packing.predictions())
    routing = None
    if model.routers is not None:
        num_rows = packing.num_rows()
        routing = Routing(
            sent(torch.zeros_like(num_rows) if is_empty else num_rows, device),
            num_layers=model.routers.num_layers,
            experts=sent(torch.cat(packing.experts), device) if packing.experts else None,
            loss=router_loss,
        )
    packed = Tokens(
        model=model,
        input_ids=sent(torch.from_numpy(np.concatenate(packing.ids))[None], device),
        position_ids=sent(packing.position_ids(), device),
        attention=PackedAttention(packing.segments, device=device),
        hidden_index=sent(hidden_index, device),
        targets=sent(targets, device),
        prediction_index=prediction_index,
        response_index=packing.response_index(ends)[predicted],
        num_row_tokens=packing.num_row_tokens,
        media=inputs.arguments(packing.media, device=device)
        if packing.media and inputs is not None
        else None,
        routing=routing,
    )
    if parallel is None or parallel.cp_size == 1:  # else each rank has a plan of its own
        packed.attention.prepare()
    return packed if parallel is None else _shared_out(packed, hidden_index, parallel)


class _Packing:
    """Rows put end to end as the runs of their tree; each list has an entry per run."""

    def __init__(self, rows: Sequence[Row], inputs: Vision | None) -> None:
        self._rows, self._inputs = rows, inputs
        self._tree = prefix_tree(rows)
        self._media_positions = {
            number: _positions(row, inputs) for number, row in enumerate(rows) if row.media
        }
        """Positions [T] or [3, T] of rows with media."""
        self.ids: list[NDArray[np.int64]] = []
        self.experts: list[Tensor] = []
        self.segments: list[Segment] = []
        self.media: list[Media] = []
        paths: list[tuple[Span, ...]] = []  # of each node, its run behind those that it continues
        places: list[NDArray[np.int64]] = []  # the places of these tokens
        start = 0
        for node in self._tree.nodes:
            end, before = start + len(node), () if node.parent is None else paths[node.parent]
            self._add(node, start, before)
            paths.append((*before, (start, end)))
            own = np.arange(start, end)
            places.append(own if node.parent is None else np.concatenate([places[node.parent], own]))
            start = end
        self._places = [places[node][: len(row)] for row, node in zip(rows, self._tree.last, strict=True)]
        """Of each row, places [T] of its tokens."""

    def _add(self, node: Node, start: int, before: tuple[Span, ...]) -> None:
        row = self._rows[node.row]
        ids = row.ids[node.start : node.end]
        media = [medium for medium in row.media if node.start <= medium.start < node.end]
        blocks = self._inputs.blocks(torch.from_numpy(ids)) if media and self._inputs is not None else ()
        self.ids.append(ids)
        self.segments.append(Segment(start=start, length=len(ids), prefix=before, blocks=blocks))
        self.media += media
        if row.experts is not None:
            self.experts.append(row.experts[node.start : node.end])

    def position_ids(self) -> Tensor:
        """Positions [1, N] of the tokens, or [3, 1, N] (see `joined_positions`)."""
        nodes = self._tree.nodes
        if not self._media_positions:
            return torch.from_numpy(np.concatenate([np.arange(node.start, node.end) for node in nodes]))[None]
        of_rows = self._media_positions
        return joined_positions(
            [
                of_rows[node.row][..., node.start : node.end]
                if node.row in of_rows
                else torch.arange(node.start, node.end)
                for node in nodes
            ]
        )

    @property
    def num_row_tokens(self) -> int:
        """Tokens of all rows, each counted by itself."""
        return sum(map(len, self._rows))

    def num_rows(self) -> Tensor:
        """[N] rows that each token is part of."""
        places = torch.from_numpy(np.concatenate(self._places))
        return torch.bincount(places, minlength=self._tree.num_tokens)

    def predictions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Predicted tokens, each one once for rows that share all before it.

        Returns:
            Places [U] of the hidden states, the tokens [U] that they predict, and of each response token [M] the
            number of its prediction.
        """
        # The prompt's last token predicts the first response token, each response token the next one.
        behind = [at[len(row.prompt) - 1 :] for row, at in zip(self._rows, self._places, strict=True)]
        places = torch.from_numpy(np.concatenate(behind))
        targets = torch.cat([_targets(row, self._inputs) for row in self._rows])
        width = int(targets.max()) + 1
        both, number = torch.unique(places * width + targets, return_inverse=True)
        return both // width, both % width, number

    def response_index(self, ends: Tensor) -> Tensor:
        """[M] place of each response token, of rows that end at these places [B]."""
        runs = [
            np.arange(end - len(row.response), end)
            for row, end in zip(self._rows, ends.tolist(), strict=True)
        ]
        return torch.from_numpy(np.concatenate(runs))


def _shared_out(tokens: Tokens, hidden_index: Tensor, parallel: Parallel) -> Tokens:
    """The micro-batch, with this rank's part of it; `hidden_index` [U] of the tokens, in host memory."""
    sizes = {
        "context_parallel": parallel.cp_size,
        "sequence_parallel": parallel.sp_size,
        "tensor_parallel": parallel.tp_size,
    }
    divided = [name for name, size in sizes.items() if size > 1]
    if divided and tokens.media is not None:
        raise ValueError(
            f"a sample has images, and engine.{divided[0]} of this role divides sequences over ranks, which images "
            f"cannot be: set it to 1"
        )
    if not divided:
        return tokens
    group = None if parallel.tp_mesh is None else parallel.tp_mesh.get_group()
    return with_shard(tokens, lambda whole: _part(whole, hidden_index, parallel), group)


def with_shard(tokens: Tokens, part_of: Callable[[Tokens], Part], group: dist.ProcessGroup | None) -> Tokens:
    """The micro-batch with this rank's part of it, and the routing of its tokens.

    Args:
        tokens: of all ranks that share it.
        part_of: makes the part; what it does with ids, whose further rows are treated alike, it does with the tokens.
        group: tensor-parallel ranks, whose part has the ids of all tokens, in order; None: without.
    """
    if tokens.routing is None:
        return dataclasses.replace(tokens, shard=part_of(tokens))
    # The place of each token goes the way of its id.
    n, device = tokens.num_tokens, tokens.input_ids.device
    numbered = torch.cat([tokens.input_ids, torch.arange(1, n + 1, device=device)[None]])
    part = part_of(dataclasses.replace(tokens, input_ids=numbered))
    places = part.input_ids[1] - 1  # -1: padding
    if group is not None:
        places = token_share(places, group, fill=-1)
    return dataclasses.replace(
        tokens, shard=_with_first_row_of_ids(part), routing=tokens.routing.of_rank(places)
    )


def _with_first_row_of_ids(part: Part) -> Part:
    if isinstance(part, ContextTensorShard):
        between = dataclasses.replace(part.between, input_ids=part.between.input_ids[:1])
        return dataclasses.replace(part, between=between)
    return dataclasses.replace(part, input_ids=part.input_ids[:1])


def _part(tokens: Tokens, hidden_index: Tensor, parallel: Parallel) -> Part:
    """This rank's part of a micro-batch that several ranks share; `hidden_index` as of `_shared_out`."""
    key_heads = tokens.model.key_heads
    whole: dict[str, Any] = {
        "input_ids": tokens.input_ids,
        "position_ids": tokens.position_ids,
        "attention": tokens.attention,
        "targets": tokens.targets,
    }
    if parallel.cp_group is not None:
        return context_shard(**whole, hidden_index=hidden_index, parallel=parallel, key_heads=key_heads)
    if parallel.tp_mesh is not None:
        group = parallel.tp_mesh.get_group()
        return tensor_shard(**whole, hidden_index=tokens.hidden_index, group=group, key_heads=key_heads)
    assert parallel.sp_group is not None, "several ranks share the row"
    return shard_micro_batch(**whole, hidden_index=hidden_index, group=parallel.sp_group)


def _positions(row: Row, inputs: Vision | None) -> Tensor:
    """Positions [T] of a row with media, which fit its tokens; [3, T] if the model counts along three axes."""
    if inputs is None:
        raise ValueError(
            "a sample has images, but the model takes text alone: use a vision-language model with its image processor"
        )
    inputs.check(row.ids.tolist(), row.media, "a sample")
    return inputs.positions(torch.from_numpy(row.ids), row.media)


def _targets(row: Row, inputs: Vision | None) -> Tensor:
    """Tokens [R] whose log-probs are computed: the response, with another token where one stands for media.

    Tokens of media have probability zero, and are given, so their log-probs say nothing. Those of other tokens stand in
    for them, because what an algorithm makes of them outside of its mask must not overflow: 0 times infinity is no
    number.
    """
    media = [medium for medium in row.media if medium.start >= len(row.prompt)]
    if not media or inputs is None:
        return row.response
    targets = row.response.clone()
    for medium in media:
        first, end = (index - len(row.prompt) for index in medium.span)
        targets[first:end] = inputs.text_id
    return targets
