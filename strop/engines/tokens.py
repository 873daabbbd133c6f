"""One pass over packed rows: what a model says about their response tokens, micro-batch by micro-batch.

A caller's function is called once per micro-batch with its `Tokens` and asks them for what it wants: log-probs,
entropies, most likely tokens, values. However much it asks for, the model runs once. `Engine.map_tokens` collects what
it returns, without gradient; `TrainEngine.accumulate` takes a loss from it.

Concurrency: with several ranks all of them pass in step, each with its own rows, also with none. A rank that has none
left calls the function with no tokens (M = 0), so the function asks every rank for the same things in the same order,
whatever the rows. With sequence parallelism a rank runs its part of a micro-batch; what the function sees is all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.base.guests import needed
from strop.engines.attention import AttentionContext
from strop.engines.causal_lm import CausalLM
from strop.engines.head import ChosenTokens
from strop.engines.packing import Row, pack, split_rows
from strop.engines.parallel import Parallel

T = TypeVar("T")

_NOTHING = Row(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0, b"")
"""What a rank runs when it has no rows left and others have."""


def sequence_parallelism() -> Any:
    """The module that divides sequences over ranks: check_sequence_parallel() refuses models, shard_micro_batch() gives
    a rank's `SequenceShard`.

    Raises:
        ValueError: it is missing from this installation.
    """
    return needed("sequence parallelism", "engine.sequence_parallel is above 1")


class SequenceShard(Protocol):
    """One rank's part of a micro-batch that predicts M tokens."""

    input_ids: Tensor  # [1, n]
    position_ids: Tensor  # [1, n]
    attention: AttentionContext
    targets: Tensor
    """[m]: this rank's share of the predicted tokens; the last shares end in padding."""

    def predicting(self, hidden: Tensor) -> Tensor:
        """Hidden states [m, D] that predict this rank's share, from those of this rank's tokens [n, D]."""

    def share(self, values: Tensor) -> Tensor:
        """This rank's share [m, ...] of values [M, ...] of all predicted tokens; the last shares end in zeros."""

    def gather(self, share: Tensor) -> Tensor:
        """Results [M, ...] of all predicted tokens, on every rank, from those of this rank's share [m, ...]."""


class Tokens:
    """The M response tokens of a micro-batch, and what the model says in their places.

    To be asked while the function that was given it runs, not later.
    """

    def __init__(
        self,
        model: CausalLM,
        targets: Tensor,
        hidden: Tensor,
        index: Tensor,
        shard: SequenceShard | None,
    ) -> None:
        """`hidden` [M, D] are the states that predict the tokens `targets` [M]; with a shard, this rank's share."""
        self.index = index
        """[M] int64, in host memory: place of each token in the flat token axis of all rows (`Row.first_token`)."""
        self._head = model.head
        self._targets = targets
        self._shard = shard
        self._hidden = hidden

    def log_probs(self, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs [M] and entropies [M], differentiable, in natural units, in at least float32."""
        log_probs, entropies = self._head.log_probs(self._hidden, self._targets, temperature=temperature)
        return self._whole(log_probs), self._whole(entropies)

    def log_probs_at(self, chosen: Tensor, *, temperature: float) -> tuple[Tensor, Tensor, ChosenTokens]:
        """As `log_probs`, with what the policy says about further tokens [M, K] in the place of each."""
        chosen = chosen.to(self._targets)
        if self._shard is not None:
            chosen = self._shard.share(chosen)
        log_probs, entropies, at = self._head.log_probs_at(
            self._hidden, self._targets, chosen, temperature=temperature
        )
        is_likely = self._whole(at.is_likely.to(torch.uint8)).bool()
        at = ChosenTokens(log_probs=self._whole(at.log_probs), is_likely=is_likely)
        return self._whole(log_probs), self._whole(entropies), at

    def top_k(self, k: int, *, temperature: float, banned: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The k most likely tokens in the place of each: ids [M, k] and log-probs [M, k], without gradient.

        `banned` are ids that are passed over, beside those of the model itself.
        """
        passed_over = [ids for ids in (self._head.banned, banned) if ids is not None]
        head = dataclasses.replace(self._head, banned=torch.cat(passed_over) if passed_over else None)
        ids, log_probs = head.top_k(self._hidden, k, temperature=temperature)
        return self._whole(ids), self._whole(log_probs)

    def sum_pi_squared(self, *, temperature: float) -> Tensor:
        """Sum of squared probabilities [M] of the distributions that the tokens were drawn from, without gradient."""
        return self._whole(self._head.sum_pi_squared(self._hidden, temperature=temperature))

    def values(self) -> Tensor:
        """The value head's number [M] of the state before each token, differentiable, in at least float32."""
        return self._whole(self._head.values(self._hidden))

    def _whole(self, share: Tensor) -> Tensor:
        """Results of all M tokens, from those of this rank's share."""
        return share if self._shard is None else self._shard.gather(share)


TokenFunction = Callable[[Tokens], Mapping[str, Tensor]]
"""What is wanted of each token: tensors [M, ...] by name."""


def run_tokens(
    model: CausalLM, rows: Sequence[Row], function: Callable[[Tokens], T], parallel: Parallel
) -> T:
    """What a function makes of the tokens of these rows, as one micro-batch: a tensor, or a mapping or tuple of
    tensors. Without rows a micro-batch runs that predicts nothing.

    Raises:
        ValueError: a row has media, and ranks share each sequence.
    """
    micro_batch = pack(rows or [_NOTHING], device=model.device, inputs=model.media)
    if not rows:
        nothing = ("hidden_index", "targets", "token_index")
        micro_batch = dataclasses.replace(
            micro_batch, **{name: getattr(micro_batch, name)[:0] for name in nothing}
        )
    if micro_batch.media is not None and parallel.sp_group is not None:
        raise ValueError(
            "a sample has images, and engine.sequence_parallel divides sequences over ranks, which images cannot be: "
            "use engine.sequence_parallel=1"
        )
    shard: SequenceShard | None = None
    if parallel.sp_group is not None:
        shard = sequence_parallelism().shard_micro_batch(micro_batch, parallel.sp_group)

    def compute() -> T:
        if shard is None:
            part = micro_batch
            every = model.backbone(part.input_ids, part.position_ids, part.attention, part.media)
            hidden, targets = F.embedding(part.hidden_index, every), part.targets
        else:
            hidden = shard.predicting(model.backbone(shard.input_ids, shard.position_ids, shard.attention))
            targets = shard.targets
        return function(Tokens(model, targets, hidden, micro_batch.token_index, shard))

    return model.run(compute)


def micro_batches(rows: Sequence[Row], max_tokens: int, parallel: Parallel) -> list[list[Row]]:
    """These rows in micro-batches, as many on every rank; the last ones of a rank may have no rows."""
    parts = split_rows(rows, max_tokens=max_tokens, num_devices=parallel.sp_size)
    return parts + [[] for _ in range(parallel.max(len(parts)) - len(parts))]
