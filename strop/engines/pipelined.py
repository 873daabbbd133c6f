"""Passes of packed micro-batches through the stages of a pipeline.

The last stage asks the tokens what they are asked for, as an engine of one stage does; on the others the caller's
function gets no tokens (M = 0), and with `map_tokens` the results of the last stage. A stage counts the choices of the
routers in its own layers, and adds the gradient of their losses where its backward pass begins, at the gradient of what
it handed on.

Concurrency: all ranks of a pipeline pack the same rows, and call the same methods in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.parallel.fsdp import reduce_gradients
from strop.engines.parallel.pipeline import Pipeline
from strop.engines.parallel.schedule import PassKind, StagePass, padded, schedule
from strop.engines.parallel.stage_links import StageLinks
from strop.engines.parallel.weight_gradients import WeightProduct
from strop.engines.tokens import TokenFunction, Tokens

Pack = Callable[[Sequence[int]], Tokens]
"""Rows of the batch, by number, as one micro-batch."""


@torch.no_grad()
def map_micro_batches(
    model: CausalLM, parts: Sequence[Sequence[int]], pack: Pack, function: TokenFunction
) -> tuple[list[Tensor], list[Mapping[str, Tensor]]]:
    """Values of a function for the response tokens of each micro-batch, on every rank of the pipeline.

    Returns:
        Of each micro-batch: places [M] of its tokens in the responses of the batch, and tensors [M, ...] by name.
    """
    pipeline = _pipeline(model)
    passes = _StagePasses(model, pipeline, parts, pack, trains=False)
    outputs: dict[int, Mapping[str, Tensor]] = {}

    def last(number: int, tokens: Tokens) -> None:
        outputs[number] = model.run(function, tokens)

    passes.run(last)
    indices = [passes.indices[number] for number in range(len(parts))]
    if pipeline.has_head:
        results = [outputs[number] for number in range(len(parts))]
    else:
        form = function(passes.of_no_tokens())
        results = [
            {name: value.new_empty((len(index), *value.shape[1:])) for name, value in form.items()}
            for index in indices
        ]
    for values in results:
        for value in values.values():
            dist.broadcast(value.contiguous(), pipeline.ranks[-1], group=pipeline.group)
    return indices, results


def accumulate_micro_batches(
    model: CausalLM,
    parts: Sequence[Sequence[int]],
    pack: Pack,
    loss: Callable[[Tokens], Tensor],
    *,
    factor: float,
    before_backward: Callable[[bool], None],
) -> Tensor:
    """Add the gradient of a loss; its value, a scalar in float64 that is the same on every rank of the pipeline.

    Args:
        model: divided into stages.
        parts, pack: rows of each micro-batch, and how they become one.
        loss: of the tokens of a micro-batch.
        factor: of the loss, and of that of the routers, whose gradient is taken.
        before_backward: called before each backward pass, with True before the last one of this rank.
    """
    pipeline = _pipeline(model)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    if not parts:  # on no rank
        return total
    passes = _StagePasses(model, pipeline, parts, pack, trains=True)

    def last(number: int, tokens: Tokens) -> _Results:
        value, of_routers = model.run(tokens.losses, loss)
        total.add_(value.detach())
        return value * factor, of_routers

    passes.run(last, before_backward, factor=factor)
    if not pipeline.has_head:
        loss(passes.of_no_tokens())
    dist.broadcast(total, pipeline.ranks[-1], group=pipeline.group)
    return total


_Results = tuple[Tensor, Tensor | None]
"""Of a stage's pass: hidden states or the loss, and the loss of the routers in its layers."""


def _pipeline(model: CausalLM) -> Pipeline:
    assert model.pipeline is not None, "the engine has divided the model"
    return model.pipeline


class _StagePasses:
    """The passes of this rank's stages."""

    def __init__(
        self,
        model: CausalLM,
        pipeline: Pipeline,
        parts: Sequence[Sequence[int]],
        pack: Pack,
        *,
        trains: bool,
    ) -> None:
        self._model, self._pipeline, self._pack, self._trains = model, pipeline, pack, trains
        count = padded(len(parts), pipeline.num_ranks, pipeline.num_chunks)
        self._parts = [*parts, *[[]] * (count - len(parts))]
        self._packed: dict[int, Tokens] = {}
        self._any: Tokens | None = None
        self.indices: dict[int, Tensor] = {}
        """Places [M] of the response tokens of each micro-batch that was packed."""
        self._schedule = schedule(
            pipeline.num_ranks,
            pipeline.num_chunks,
            count,
            trains=trains,
            zero_bubble=pipeline.weight_gradients is not None,
        )
        self._links = StageLinks(pipeline, self._schedule, self._buffer)
        self._open: dict[tuple[int, int], tuple[Tensor | None, _Results]] = {}
        """Hidden states that came in and results of each forward pass whose backward pass is to come."""
        if pipeline.weight_gradients is not None:
            pipeline.weight_gradients.clear()
        self._products: dict[int, list[WeightProduct]] = {}
        """Of each micro-batch whose gradients of weights are to come."""

    def tokens(self, number: int) -> Tokens:
        """A micro-batch, packed when it is first needed and kept until its last pass."""
        if number not in self._packed:
            self._packed[number] = self._pack(self._parts[number])
            self.indices[number] = self._packed[number].response_index
            self._any = self._any or self._packed[number]
        return self._packed[number]

    def of_no_tokens(self) -> Tokens:
        """Nothing to predict, for a function of tokens on a stage without the head: no parameter of it is asked for.

        The choices of its routers are those in all passes.
        """
        assert self._any is not None, "a micro-batch was passed"
        return self._any.of_no_tokens(self._model.hidden_size, self._model.compute_dtype)

    def run(
        self,
        last: Callable[[int, Tokens], _Results | None],
        before_backward: Callable[[bool], None] = lambda is_last: None,
        *,
        factor: float = 1.0,
    ) -> None:
        """All passes of this rank.

        Args:
            last: what the last stage makes of a micro-batch by its number; with backward passes the value whose
                gradient is taken, and the loss of the routers.
            before_backward: as of `accumulate_micro_batches`.
            factor: of the losses of the routers whose gradient is taken.
        """
        passes = self._schedule.passes[self._pipeline.rank]
        last_kind = PassKind.BACKWARD if self._trains else PassKind.FORWARD
        last_chunk = 0 if self._trains else self._pipeline.num_chunks - 1
        for place, stage_pass in enumerate(passes):
            if stage_pass.kind is PassKind.FORWARD:
                self._forward(stage_pass, last)
            elif stage_pass.kind is PassKind.BACKWARD:
                before_backward(place == len(passes) - 1)
                self._backward(stage_pass, factor)
            else:
                self._add_weight_gradients(stage_pass)
            if (stage_pass.kind, stage_pass.chunk) == (last_kind, last_chunk):
                self._drop(stage_pass.micro_batch)
        if passes[-1].kind is PassKind.WEIGHTS:  # behind the last backward pass
            before_backward(True)
            reduce_gradients(self._model)
        self._links.close()

    def _drop(self, number: int) -> None:
        """Free a micro-batch, whose plan may be large; what its routers chose is kept with the first one's."""
        tokens, kept = self._packed.pop(number), self._any
        if (
            kept is not None
            and kept is not tokens
            and kept.routing is not None
            and tokens.routing is not None
        ):
            kept.routing.add_counts(tokens.routing)

    def _forward(self, stage_pass: StagePass, last: Callable[[int, Tokens], _Results | None]) -> None:
        number, rank = stage_pass.micro_batch, self._pipeline.rank
        message = self._schedule.needed(rank, stage_pass)
        received = None if message is None else self._links.receive(message)
        if received is not None and self._trains:
            received.requires_grad_(True)
        tokens = dataclasses.replace(self.tokens(number), received=received)
        if tokens.routing is not None:
            tokens = dataclasses.replace(tokens, routing=tokens.routing.of_stage())
        given = self._schedule.given(rank, stage_pass)
        with self._pipeline.chunk(stage_pass.chunk):
            results = last(number, tokens) if given is None else self._model.run(tokens.passed_on)
        if given is not None:
            assert results is not None, "a stage hands hidden states on"
            self._links.send(*given, results[0])
        if self._trains:
            assert results is not None, "a loss has a value"
            self._open[stage_pass.chunk, number] = received, results

    def _backward(self, stage_pass: StagePass, factor: float) -> None:
        number, rank = stage_pass.micro_batch, self._pipeline.rank
        received, (result, of_routers) = self._open.pop((stage_pass.chunk, number))
        message = self._schedule.needed(rank, stage_pass)
        roots, grads = [result], [None if message is None else self._links.receive(message)]
        if of_routers is not None:
            roots.append(of_routers)
            grads.append(torch.full_like(of_routers, factor))
        if result.requires_grad:  # else nothing before and in this stage is trained
            with self._pipeline.chunk(stage_pass.chunk):  # layers may be computed again
                torch.autograd.backward(roots, grads)
        if self._pipeline.weight_gradients is not None:
            self._products[number] = self._pipeline.weight_gradients.take()
        given = self._schedule.given(rank, stage_pass)
        if given is not None:
            assert received is not None, "only the first stage begins at the tokens"
            assert received.grad is not None, "what comes in has a gradient"
            self._links.send(*given, received.grad)

    def _add_weight_gradients(self, stage_pass: StagePass) -> None:
        products = self._products.pop(stage_pass.micro_batch)
        while products:  # each is freed at once
            products.pop().add()

    def _buffer(self, number: int) -> Tensor:
        model = self._model
        shape = (self.tokens(number).num_local, model.hidden_size)
        return torch.empty(shape, dtype=model.compute_dtype, device=model.device)
