"""Micro-batches: rows of a batch packed end to end, and this rank's part of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.engines.attention import PackedAttention, Segment, Span
from strop.engines.moe.losses import RouterLoss
from strop.engines.moe.routing import Routing
from strop.engines.multimodal.vl_model import Vision
from strop.engines.packing import joined_positions, make_rows, next_position, prompt_key, token_rows
from strop.engines.parallel.context import ContextTensorShard, context_shard
from strop.engines.parallel.ranks import Parallel
from strop.engines.parallel.tensor import tensor_shard
from strop.engines.parallel.ulysses import shard_micro_batch, token_share
from strop.engines.tokens import PackedModel, Part, Tokens
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Media
from strop.utils.device import sent

_Row = tuple[Tensor, Tensor, tuple[Media, ...], int, Tensor | None]
"""Prompt, response, media, the end of the response among those of all rows, and experts [T, L k] of their tokens."""


def pack(
    data: DataProto,
    model: PackedModel,
    *,
    rows: Sequence[int] | None = None,
    parallel: Parallel | None = None,
    router_loss: RouterLoss | None = None,
    replays: bool = False,
) -> Tokens:
    """Rows of a batch end to end, as one micro-batch; rows of one prompt share its tokens wherever they stand.

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
    packing = _Packing(inputs)
    for group in _by_prompt(data, rows, replays=replays):
        packing.add(group)
    routing = None
    if model.routers is not None:
        num_rows = torch.cat(packing.num_rows)
        routing = Routing(
            sent(torch.zeros_like(num_rows) if is_empty else num_rows, device),
            num_layers=model.routers.num_layers,
            experts=sent(torch.cat(packing.experts), device) if packing.experts else None,
            loss=router_loss,
        )
    predicting = slice(0) if is_empty else slice(None)
    packed = Tokens(
        model=model,
        input_ids=sent(torch.cat(packing.ids)[None], device),
        position_ids=sent(joined_positions(packing.positions), device),
        attention=PackedAttention(packing.segments, device=device),
        hidden_index=sent(torch.cat(packing.hidden)[predicting], device),
        targets=sent(torch.cat(packing.targets)[predicting], device),
        response_index=torch.cat(packing.response_index)[predicting],
        media=inputs.arguments(packing.media, device=device)
        if packing.media and inputs is not None
        else None,
        routing=routing,
    )
    if parallel is None or parallel.cp_size == 1:  # else each rank has a plan of its own
        packed.attention.prepare()
    return packed if parallel is None else _shared_out(packed, parallel)


class _Packing:
    """Rows put end to end, one prompt after the other; each list has a tensor per run of tokens."""

    def __init__(self, inputs: Vision | None) -> None:
        self._inputs = inputs
        self._length = 0
        self.ids: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.num_rows: list[Tensor] = []
        """That each token is part of."""
        self.experts: list[Tensor] = []
        self.segments: list[Segment] = []
        self.media: list[Media] = []
        self.hidden: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.response_index: list[Tensor] = []

    def add(self, group: Sequence[_Row]) -> None:
        """Rows of one prompt: its tokens once, and those of each response behind them."""
        prompt, response, row_media, _, routed = group[0]
        start, length, inputs = self._length, len(prompt), self._inputs
        media = tuple(medium for medium in row_media if medium.start < length)
        if is_alone := len(group) == 1:
            run = torch.cat([prompt, response[:-1]])
            segment = Segment(start=start, length=len(run), blocks=_blocks(run, row_media, inputs))
        else:
            segment = Segment(start=start, length=length, blocks=_blocks(prompt, media, inputs))
        self.segments.append(segment)
        positions = _positions(prompt, media, inputs, "a prompt")
        experts = None if routed is None else routed[:length]
        self._append(prompt, positions, media, experts, num_rows=len(group))
        for row in group:
            self._add_response(row, start, positions, num_media=len(media), is_alone=is_alone)

    def _add_response(
        self, row: _Row, prompt_start: int, prompt_positions: Tensor, *, num_media: int, is_alone: bool
    ) -> None:
        """The response of a row whose prompt, with so many media, is packed from this place on."""
        prompt, response, row_media, end, routed = row
        start, length, suffix, media = self._length, len(prompt), response[:-1], row_media[num_media:]
        if not is_alone:
            segment = Segment(
                start=start,
                length=len(suffix),
                prefix_start=prompt_start,
                prefix_length=length,
                blocks=_blocks(suffix, media, self._inputs),
            )
            self.segments.append(segment)
        if media:
            positions = _positions(torch.cat([prompt, suffix]), row_media, self._inputs, "a sample")[
                ..., length:
            ]
        else:
            positions = next_position(prompt_positions) + torch.arange(len(suffix))
        self._append(suffix, positions, media, None if routed is None else routed[length:], num_rows=1)
        # The prompt's last token predicts the first response token, each response token the next one.
        self.hidden += [torch.tensor([prompt_start + length - 1]), torch.arange(start, self._length)]
        self.targets.append(_targets(response, media, self._inputs, start=length))
        self.response_index.append(torch.arange(end - len(response), end))

    def _append(
        self, ids: Tensor, positions: Tensor, media: Sequence[Media], experts: Tensor | None, *, num_rows: int
    ) -> None:
        self.ids.append(ids)
        self.positions.append(positions)
        self.media += media
        self.num_rows.append(torch.full((len(ids),), num_rows))
        if experts is not None:
            self.experts.append(experts)
        self._length += len(ids)


def _by_prompt(data: DataProto, rows: Sequence[int] | None, *, replays: bool) -> Iterable[Sequence[_Row]]:
    """The rows of each prompt."""
    after = columns.row_lengths(data.tensors()["responses"]).cumsum(0)
    ends = (after if rows is None else after[list(rows)]).tolist()
    routed: Sequence[Tensor | None] = [None] * len(ends)
    if replays and "routed_experts" in data.tensors():
        routed = columns.rows(data.tensors()["routed_experts"], rows)
    groups: dict[Hashable, list[_Row]] = {}
    for (prompt, response, shown), end, experts in zip(token_rows(data, rows), ends, routed, strict=True):
        groups.setdefault(prompt_key(prompt, shown), []).append((prompt, response, shown, end, experts))
    return groups.values()


def _shared_out(tokens: Tokens, parallel: Parallel) -> Tokens:
    """The micro-batch, with this rank's part of it."""
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
    return with_shard(tokens, lambda whole: _part(whole, parallel), group)


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


def _part(tokens: Tokens, parallel: Parallel) -> Part:
    """This rank's part of a micro-batch that several ranks share."""
    key_heads = tokens.model.key_heads
    whole: dict[str, Any] = {
        "input_ids": tokens.input_ids,
        "position_ids": tokens.position_ids,
        "attention": tokens.attention,
        "hidden_index": tokens.hidden_index,
        "targets": tokens.targets,
    }
    if parallel.cp_group is not None:
        return context_shard(**whole, parallel=parallel, key_heads=key_heads)
    if parallel.tp_mesh is not None:
        return tensor_shard(**whole, group=parallel.tp_mesh.get_group(), key_heads=key_heads)
    assert parallel.sp_group is not None, "several ranks share the row"
    return shard_micro_batch(**whole, group=parallel.sp_group)


def _blocks(token_ids: Tensor, media: Sequence[Media], inputs: Vision | None) -> tuple[Span, ...]:
    """Runs of these tokens, which have these media, that see each other whatever their order."""
    return inputs.blocks(token_ids) if media and inputs is not None else ()


def _positions(token_ids: Tensor, media: Sequence[Media], inputs: Vision | None, where: str) -> Tensor:
    """Positions [n] of tokens [n] from the beginning of a sequence; [3, n] of tokens with media, if the model counts
    those along three axes."""
    if not media:
        return torch.arange(len(token_ids))
    if inputs is None:
        raise ValueError(
            f"{where} has images, but the model takes text alone: use a vision-language model with its image processor"
        )
    inputs.check(token_ids.tolist(), media, where)
    return inputs.positions(token_ids, media)


def _targets(response: Tensor, media: Sequence[Media], inputs: Vision | None, *, start: int) -> Tensor:
    """Tokens [R] whose log-probs are computed: the response, with another token where one stands for media.

    Tokens of media have probability zero, and are given, so their log-probs say nothing. Those of other tokens stand in
    for them, because what an algorithm makes of them outside of its mask must not overflow: 0 times infinity is no
    number. `start` is the place of the response in its sequence.
    """
    if not media or inputs is None:
        return response
    targets = response.clone()
    for medium in media:
        first, end = (index - start for index in medium.span)
        targets[first:end] = inputs.text_id
    return targets
