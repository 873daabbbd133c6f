"""One pass over packed rows: what a model says about their response tokens, micro-batch by micro-batch.

A caller's function is called once per micro-batch with its `Tokens` and asks them for what it wants: log-probs,
entropies, most likely tokens, values. However much it asks for, the model runs once. `Engine.map_tokens` collects what
it returns, without gradient; `TrainEngine.accumulate` takes a loss from it.

Concurrency: with several ranks all of them pass in step, each with its own rows, also with none. A rank that has none
left calls the function with no tokens (M = 0), so the function asks every rank for the same things in the same order,
whatever the rows. Where ranks share each sequence, one runs its part of a micro-batch; what the function sees is all of
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engines.attention import AttentionContext, PackedAttention, Segment, Span
from strop.engines.head import ChosenTokens, Head
from strop.engines.moe.losses import RouterLoss
from strop.engines.moe.routing import RouterPass, Routers, Routing
from strop.engines.multimodal.vl_model import Vision
from strop.engines.packing import joined_positions, make_rows, next_position, prompt_key, token_rows
from strop.engines.parallel.context import ContextTensorShard, context_shard
from strop.engines.parallel.ranks import Parallel
from strop.engines.parallel.tensor import TensorShard, tensor_shard
from strop.engines.parallel.ulysses import SequenceShard, shard_micro_batch, token_share
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Media
from strop.utils.device import sent

Part = SequenceShard | TensorShard | ContextTensorShard
"""A rank's part of a micro-batch that several ranks share."""


class PackedModel(Protocol):
    """A model, or this rank's part of one, as packed tokens ask it."""

    device: torch.device
    media: Vision | None

    @property
    def key_heads(self) -> slice | None:
        """As of `strop.engines.parallel.tensor.TensorParallel`."""

    @property
    def routers(self) -> Routers | None:
        """The routers of its experts, as far as they take part in a `Routing`."""

    @property
    def head(self) -> Head:
        """The head, on this rank's part of the vocabulary."""

    def backbone(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
        media: Mapping[str, Tensor] | None = None,
        received: Tensor | None = None,
        routing: RouterPass | None = None,
    ) -> Tensor:
        """Final hidden states of packed tokens, as of `CausalLM.backbone`."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A micro-batch: N packed tokens, and what the model says in the places of the M response tokens among them.

    To be asked while the function that was given it runs, not later. The model runs once, when it is first asked.
    """

    model: PackedModel
    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]; [3, 1, N] (time, height, width) where a row has media
    attention: PackedAttention
    hidden_index: Tensor
    """[M]: packed position whose hidden state predicts each response token."""
    targets: Tensor
    """[M]: the response tokens; where one stands for media, a token of text."""
    response_index: Tensor
    """[M] int64, in host memory: place of each token in the responses of the whole batch, end to end."""
    media: Mapping[str, Tensor] | None = None
    """Media of prompts and responses, in the order of their tokens (see `multimodal.vl_model.Vision.arguments`)."""
    shard: Part | None = None
    """This rank's part, where ranks share each sequence."""
    received: Tensor | None = None
    """Hidden states [n, D] of this rank's tokens, of the stage before this one."""
    predicting: Tensor | None = None
    """Hidden states [M, D] that predict the tokens, where they are known; no pass is run."""
    routing: Routing | None = None
    """Of this rank's tokens, in a model with experts."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_local(self) -> int:
        """Tokens of this rank between layers, n."""
        return self.num_tokens if self.shard is None else self.shard.num_local

    def passed_on(self) -> Tensor:
        """Hidden states [n, D] of this rank's tokens that a stage hands on."""
        return self._every_hidden().clone()  # sharding wants no view of another tensor

    def log_probs(self, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs [M] and entropies [M], differentiable, in natural units, in at least float32."""
        log_probs, entropies = self.model.head.log_probs(
            self._hidden, self._local_targets, temperature=temperature
        )
        return self._gather(log_probs), self._gather(entropies)

    def log_probs_at(self, chosen: Tensor, *, temperature: float) -> tuple[Tensor, Tensor, ChosenTokens]:
        """As `log_probs`, with what the policy says about further tokens [M, K] in the place of each."""
        chosen = chosen.to(self.targets)
        if self.shard is not None:
            chosen = self.shard.share(chosen)
        log_probs, entropies, at = self.model.head.log_probs_at(
            self._hidden, self._local_targets, chosen, temperature=temperature
        )
        is_likely = self._gather(at.is_likely.to(torch.uint8)).bool()
        at = ChosenTokens(log_probs=self._gather(at.log_probs), is_likely=is_likely)
        return self._gather(log_probs), self._gather(entropies), at

    def top_k(self, k: int, *, temperature: float, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k most likely tokens in the place of each: ids [M, k] and log-probs [M, k], without gradient.

        `banned` are ids that are passed over, beside those of the model itself.
        """
        head = self.model.head
        passed_over = [ids for ids in (head.banned, banned) if ids is not None]
        head = dataclasses.replace(head, banned=torch.cat(passed_over) if passed_over else None)
        ids, log_probs = head.top_k(self._hidden, k, temperature=temperature)
        return self._gather(ids), self._gather(log_probs)

    def sum_pi_squared(self, *, temperature: float) -> Tensor:
        """Sum of squared probabilities [M] of the distributions that the tokens were drawn from, without gradient."""
        return self._gather(self.model.head.sum_pi_squared(self._hidden, temperature=temperature))

    def values(self) -> Tensor:
        """The value head's number [M] of the state before each token, differentiable, in at least float32."""
        function, hidden = self.model.head.values, self._hidden
        return function(hidden) if self.shard is None else self.shard.of_each(function, hidden)

    def expert_counts(self) -> Tensor | None:
        """Tokens [L, E] of this rank that went to each expert of each layer, each once per row that it is part of; None
        of a model without experts, or with layers that are compiled or routers of another form."""
        if self.routing is None:
            return None
        _ = self._hidden
        return self.routing.counts() if self.routing.is_known else None

    def router_loss(self) -> Tensor | None:
        """Terms of the losses of the routers that these tokens have on this rank, a scalar with a gradient; None where
        there are none."""
        if self.routing is None:
            return None
        _ = self._hidden
        return self.routing.loss()

    @cached_property
    def _hidden(self) -> Tensor:
        """Hidden states [M, D] that predict the tokens; with a shard, this rank's share of them."""
        if self.predicting is not None:
            return self.predicting
        every = self._every_hidden()
        return F.embedding(self.hidden_index, every) if self.shard is None else self.shard.predicting(every)

    def _every_hidden(self) -> Tensor:
        """Hidden states [n, D] of this rank's tokens behind the layers that are here."""
        backbone, shard = self.model.backbone, self.shard
        if shard is None:
            return backbone(
                self.input_ids, self.position_ids, self.attention, self.media, self.received, self.routing
            )
        return backbone(
            shard.input_ids, shard.position_ids, shard.attention, received=self.received, routing=self.routing
        )

    @property
    def _local_targets(self) -> Tensor:
        """The tokens [M] that they predict; with a shard, this rank's share of them."""
        return self.targets if self.shard is None else self.shard.targets

    def _gather(self, share: Tensor) -> Tensor:
        """Results of all M tokens, from those of this rank's share."""
        return share if self.shard is None else self.shard.gather(share)


_Row = tuple[Tensor, Tensor, tuple[Media, ...], int, Tensor | None]
"""Prompt, response, media, the end of the response among those of all rows, and experts [T, L k] of their tokens."""

TokenFunction = Callable[[Tokens], Mapping[str, Tensor]]
"""Function of each token: tensors [M, ...] by name."""


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
    ids, positions, hidden, targets, tokens = [], [], [], [], []
    segments: list[Segment] = []
    media: list[Media] = []
    num_rows: list[Tensor] = []  # that each token is part of
    experts: list[Tensor] = []
    at = 0
    for group in _by_prompt(data, rows, replays=replays):
        prompt, response, row_media, _, routed = group[0]
        prompt_start, length, alone = at, len(prompt), len(group) == 1
        prompt_media = tuple(medium for medium in row_media if medium.start < length)
        run, in_run = (torch.cat([prompt, response[:-1]]), row_media) if alone else (prompt, prompt_media)
        segments.append(Segment(start=at, length=len(run), blocks=_blocks(run, in_run, inputs)))
        ids.append(prompt)
        num_rows.append(torch.full((length,), len(group) * (not is_empty)))
        if routed is not None:
            experts.append(routed[:length])
        positions.append(placed := _positions(prompt, prompt_media, inputs, "a prompt"))
        media += prompt_media
        at += length
        for _, response, row_media, end, routed in group:
            suffix, answer_media = response[:-1], row_media[len(prompt_media) :]
            ids.append(suffix)
            num_rows.append(torch.ones(len(suffix), dtype=torch.int64))
            if routed is not None:
                experts.append(routed[length:])
            if answer_media:
                position_ids = _positions(torch.cat([prompt, suffix]), row_media, inputs, "a sample")
                positions.append(position_ids[..., length:])
            else:
                positions.append(next_position(placed) + torch.arange(len(suffix)))
            media += answer_media
            if not alone:
                segments.append(
                    Segment(
                        start=at,
                        length=len(suffix),
                        prefix_start=prompt_start,
                        prefix_length=length,
                        blocks=_blocks(suffix, answer_media, inputs),
                    )
                )
            # The prompt's last token predicts the first response token, each response token the next one.
            hidden += [torch.tensor([prompt_start + length - 1]), torch.arange(at, at + len(suffix))]
            targets.append(_targets(response, answer_media, inputs, start=length))
            tokens.append(torch.arange(end - len(response), end))
            at += len(suffix)
    predicting = slice(0) if is_empty else slice(None)
    packed = Tokens(
        model=model,
        input_ids=sent(torch.cat(ids)[None], device),
        position_ids=sent(joined_positions(positions), device),
        attention=PackedAttention(segments, device=device),
        hidden_index=sent(torch.cat(hidden)[predicting], device),
        targets=sent(torch.cat(targets)[predicting], device),
        response_index=torch.cat(tokens)[predicting],
        media=inputs.arguments(media, device=device) if media and inputs is not None else None,
        routing=None
        if model.routers is None
        else Routing(
            sent(torch.cat(num_rows), device),
            num_layers=model.routers.num_layers,
            experts=sent(torch.cat(experts), device) if experts else None,
            loss=router_loss,
        ),
    )
    if parallel is None or parallel.cp_size == 1:  # else each rank has a plan of its own
        packed.attention.prepare()
    return packed if parallel is None else _shared_out(packed, parallel)


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
    if tokens.routing is None:
        return dataclasses.replace(tokens, shard=_part(tokens, parallel))
    # The place of each token goes the way of its id.
    n, device = tokens.num_tokens, tokens.input_ids.device
    numbered = torch.cat([tokens.input_ids, torch.arange(1, n + 1, device=device)[None]])
    part = _part(dataclasses.replace(tokens, input_ids=numbered), parallel)
    places = part.input_ids[1] - 1  # -1: padding
    if parallel.tp_mesh is not None:  # has all tokens of its group
        places = token_share(places, parallel.tp_mesh.get_group(), fill=-1)
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
