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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.engines.attention import PackedAttention
from strop.engines.attention_form import AttentionContext
from strop.engines.head import ChosenTokens, Head
from strop.engines.moe.routing import RoutedLayers, RouterPass, Routing
from strop.engines.multimodal.vl_model import Vision
from strop.engines.parallel.context import ContextTensorShard
from strop.engines.parallel.tensor import TensorShard
from strop.engines.parallel.ulysses import SequenceShard, whole_share
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
    def routers(self) -> RoutedLayers | None:
        """Its layers with experts, as far as their routers take part in a `Routing`."""

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
    """A micro-batch: N packed tokens, and what the model says in the places of the M response tokens of its rows, of
    which U differ in themselves or in what is before them.

    To be asked while the function that was given it runs, not later. The model runs once, when it is first asked.
    """

    model: PackedModel
    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]; [3, 1, N] (time, height, width) where a row has media
    attention: PackedAttention
    hidden_index: Tensor
    """[U]: packed position whose hidden state makes each prediction, in ascending order."""
    targets: Tensor
    """[U]: the token that is predicted; where one stands for media, a token of text."""
    prediction_index: Tensor
    """[M] int64, in host memory: the prediction of each response token. Rows that share a token and all before it share
    its prediction."""
    response_index: Tensor
    """[M] int64, in host memory: place of each token in the responses of the whole batch, end to end."""
    num_row_tokens: int
    """Tokens of the rows, each counted by itself: N and what they share."""
    media: Mapping[str, Tensor] | None = None
    """Media of prompts and responses, in the order of their tokens (see `multimodal.vl_model.Vision.arguments`)."""
    shard: Part | None = None
    """This rank's part, where ranks share each sequence."""
    received: Tensor | None = None
    """Hidden states [n, D] of this rank's tokens, of the stage before this one."""
    predicting: Tensor | None = None
    """Hidden states [U, D] of the predictions, where they are known; no pass is run."""
    routing: Routing | None = None
    """Of this rank's tokens, in a model with experts."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def num_local(self) -> int:
        """Tokens of this rank between layers, n."""
        return self.num_tokens if self.shard is None else self.shard.num_local

    def of_no_tokens(self, hidden_size: int, dtype: torch.dtype) -> Tokens:
        """Nothing to predict, for a function of tokens on a stage without the head: no parameter of it is asked for,
        and the choices of its routers are those of these tokens."""
        nothing = self.targets[:0]
        return dataclasses.replace(
            self, hidden_index=nothing, targets=nothing, prediction_index=self.prediction_index[:0],
            response_index=self.response_index[:0], shard=None,
            predicting=torch.zeros((0, hidden_size), dtype=dtype, device=self.model.device),
        )  # fmt: skip

    def passed_on(self) -> tuple[Tensor, Tensor | None]:
        """Hidden states [n, D] of this rank's tokens that a stage hands on, and the `router_loss` of its layers."""
        hidden = self._every_hidden().clone()  # sharding wants no view of another tensor
        return hidden, None if self.routing is None else self.routing.loss()

    def losses(self, loss: Callable[[Tokens], Tensor]) -> tuple[Tensor, Tensor | None]:
        """The value of a function of these tokens, and the `router_loss` of the layers that are here."""
        return loss(self), self.router_loss()

    def log_probs(self, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs [M] and entropies [M], differentiable, in natural units, in at least float32."""
        log_probs, entropies = self.model.head.log_probs(
            self._hidden, self._local_targets, temperature=temperature
        )
        return self._gather(log_probs), self._gather(entropies)

    def log_probs_at(self, chosen: Tensor, *, temperature: float) -> tuple[Tensor, Tensor, ChosenTokens]:
        """As `log_probs`, with what the policy says about further tokens [M, K] in the place of each."""
        # Rows that share a prediction have tokens of their own there: each is a row of the head by itself.
        share = (whole_share if self.shard is None else self.shard.token_share)(self.prediction_index)
        prediction, token = (sent(index, self.model.device) for index in (share.prediction, share.token))
        log_probs, entropies, at = self.model.head.log_probs_at(
            F.embedding(prediction, self._hidden),
            self._local_targets[prediction],
            F.pad(chosen.to(self.targets), (0, 0, 0, 1))[token],
            temperature=temperature,
            num_likely=chosen.shape[1],
        )
        is_likely = share.gather(at.is_likely.to(torch.uint8)).bool()
        at = ChosenTokens(log_probs=share.gather(at.log_probs), is_likely=is_likely)
        return share.gather(log_probs), share.gather(entropies), at

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
        values = function(hidden) if self.shard is None else self.shard.of_each(function, hidden)
        return self._of_each_row(values)

    def expert_counts(self) -> Tensor | None:
        """Tokens [L, E] of this rank that went to each expert of each layer, each once per row that it is part of; None
        of a model without experts, or with layers that are compiled. Zeros for layers of other stages, and for routers
        of another form."""
        if self.routing is None or self.model.routers is None:
            return None
        _ = self._hidden
        return self.routing.counts(self.model.routers.num_experts)

    def router_loss(self) -> Tensor | None:
        """Terms of the losses of the routers that these tokens have on this rank, a scalar with a gradient; None where
        there are none."""
        if self.routing is None:
            return None
        _ = self._hidden
        return self.routing.loss()

    @cached_property
    def _hidden(self) -> Tensor:
        """Hidden states [U, D] of the predictions; with a shard, this rank's share of them."""
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
        """The tokens [U] that they predict; with a shard, this rank's share of them."""
        return self.targets if self.shard is None else self.shard.targets

    def _gather(self, share: Tensor) -> Tensor:
        """Results of all M tokens, from those of this rank's share of the predictions."""
        return self._of_each_row(share if self.shard is None else self.shard.gather(share))

    def _of_each_row(self, results: Tensor) -> Tensor:
        """Results of all M tokens, from those of the predictions [U, ...]; a gradient is the sum over its tokens."""
        return results[self._prediction]

    @cached_property
    def _prediction(self) -> Tensor:
        """`prediction_index` on the device."""
        return sent(self.prediction_index, self.model.device)


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of rows that were passed."""

    of_rows: int = 0
    """Of all rows, each counted by itself."""
    computed: int = 0
    """Of these, those that a model ran on: what rows share in a micro-batch once."""

    def with_pass(self, tokens: Tokens) -> TokenCounts:
        """With a micro-batch more; one that predicts nothing does not count."""
        if not len(tokens.targets):
            return self
        return TokenCounts(self.of_rows + tokens.num_row_tokens, self.computed + tokens.num_tokens)

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(self.of_rows + other.of_rows, self.computed + other.computed)

    def since(self, before: TokenCounts) -> TokenCounts:
        """Without those that were counted before."""
        return TokenCounts(self.of_rows - before.of_rows, self.computed - before.computed)


TokenFunction = Callable[[Tokens], Mapping[str, Tensor]]
"""Function of each token: tensors [M, ...] by name."""
