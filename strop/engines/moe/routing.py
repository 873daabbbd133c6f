"""Routing of one micro-batch: how often each expert was chosen, the losses of the routers, and experts that are given.

A model's own routers choose and weigh. Around them, a `Routing` counts what they chose, adds up the terms of their
losses (losses.py), and may put experts of another pass in the place of their choice; the weights are then those that
the router itself gives these experts, from its own logits.

A checkpointed layer is computed again with the routing of its pass: its tokens go to the same experts, and count once.

Where layers are divided into stages, each stage has a `Routing` of its own for its pass, with the terms of its layers
alone; layers are counted under their number in the whole model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from strop.engines.moe.layers import MoELayer
from strop.engines.moe.losses import RouterLoss


class RoutedLayers(Protocol):
    """The layers of a model that have experts."""

    @property
    def num_layers(self) -> int:
        """L, those with experts."""

    @property
    def num_experts(self) -> int:
        """E of each."""


class RouterPass(Protocol):
    """A forward pass as its routers see it."""

    def route(self, number: int, num_experts: int, forward: Callable[[], Any]) -> Any:
        """Output of the router of layer `number`, which `forward` computes."""


class Routers:
    """The routers of a model, each calling on the routing of the pass that it is in."""

    def __init__(self, layers: list[MoELayer], decoder_layers: list[nn.Module]) -> None:
        """Have the routers take part in routings.

        Args:
            layers: with experts, all with a router and as many experts.
            decoder_layers: of the model, which hold them.
        """
        self.num_layers, self.num_experts = len(layers), layers[0].num_experts
        self._routing: RouterPass | None = None
        for number, layer in enumerate(layers):
            router: Any = layer.router
            router.forward = partial(self._forward, number, router.forward)
        for decoder_layer in decoder_layers:
            if (checkpoint := vars(decoder_layer).get("_gradient_checkpointing_func")) is not None:
                owner: Any = decoder_layer
                owner._gradient_checkpointing_func = partial(self._checkpointed, checkpoint)

    @contextlib.contextmanager
    def routed(self, routing: RouterPass) -> Iterator[None]:
        """The routers take part in this routing, in a forward pass of the model inside."""
        before, self._routing = self._routing, routing
        try:
            yield
        finally:
            self._routing = before

    def _checkpointed(self, checkpoint: Callable[..., Any], layer: Callable[..., Any], *args: Any) -> Any:
        """A checkpointed pass of a layer, whose tokens have the same routing when it is computed again."""
        if (routing := self._routing) is None:
            return checkpoint(layer, *args)

        def routed(*args: Any) -> Any:
            with self.routed(routing):
                return layer(*args)

        return checkpoint(routed, *args)

    def _forward(self, number: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._routing is None:
            return forward(*args, **kwargs)
        return self._routing.route(number, self.num_experts, partial(forward, *args, **kwargs))


def routers_of(layers: list[MoELayer], decoder_layers: list[nn.Module]) -> Routers | None:
    """The routers of a model; None for a dense one, and where layers have different numbers of experts or a router is
    not known by its name."""
    known = all(layer.router is not None for layer in layers)
    if not layers or not known or len({layer.num_experts for layer in layers}) > 1:
        return None
    return Routers(layers, decoder_layers)


class Routing:
    """Routing of the packed tokens [n] of a micro-batch on one rank."""

    def __init__(
        self,
        num_rows: Tensor,
        *,
        num_layers: int,
        experts: Tensor | None = None,
        loss: RouterLoss | None = None,
    ) -> None:
        """Args:
        num_rows: [n], rows of the batch that each token is part of: several share a beginning, none has padding.
        num_layers: L, with experts.
        experts: [n, L k], experts that tokens go to in each layer, one layer after another; -1 for those that the
            router chooses. None: it chooses all.
        loss: of the routers; None: without.
        """
        self._num_rows, self._num_layers = num_rows, num_layers
        self._experts, self._loss = experts, loss
        self._counts: dict[int, Tensor] = {}
        self._terms: list[Tensor] = []

    def of_rank(self, places: Tensor) -> Routing:
        """The same for a rank that has some of the tokens: those in these places [m] of the row, -1 for padding."""
        is_token, at = places >= 0, places.clamp(min=0)
        experts = self._experts
        if experts is not None:
            experts = experts[at].masked_fill(~is_token[:, None], -1)
        return Routing(
            self._num_rows[at] * is_token, num_layers=self._num_layers, experts=experts, loss=self._loss
        )

    def of_stage(self) -> Routing:
        """The same for the pass of one more stage of this rank: terms of its own, choices counted with those of the
        others."""
        stage = Routing(self._num_rows, num_layers=self._num_layers, experts=self._experts, loss=self._loss)
        stage._counts = self._counts
        return stage

    def add_counts(self, other: Routing) -> None:
        """Count the choices of another micro-batch with those of this one."""
        for number, counts in other._counts.items():
            self._counts[number] = self._counts[number] + counts if number in self._counts else counts

    def counts(self, num_experts: int) -> Tensor:
        """Tokens [L, E] that went to each expert, each once per row that it is part of; float64, after the pass. Zeros
        for layers of other ranks, and for routers that do not say what they choose."""
        of_none = torch.zeros(num_experts, dtype=torch.float64, device=self._num_rows.device)
        return torch.stack([self._counts.get(number, of_none) for number in range(self._num_layers)])

    def loss(self) -> Tensor | None:
        """Sum of the terms of the routers' loss that these tokens have, a scalar, if there is one; after the pass."""
        return torch.stack(self._terms).sum() if self._terms else None

    def route(self, number: int, num_experts: int, forward: Callable[[], Any]) -> Any:
        """Output of the router of layer `number`, in whose forward pass all this happens.

        Raises:
            ValueError: it does not give logits, weights and indices, or chooses in a way that cannot be replaced.
        """
        experts = self.experts_of(number)
        mode = _RouterMode(num_experts, experts)
        with mode:
            output = forward()
        index = _chosen(output)
        if index is None:
            if self._loss is None and experts is None:
                return output
            raise ValueError(
                "a router of this model does not give logits, weights and indices of experts, so that its losses are "
                "not known and its choice cannot be replaced: train the model without losses of routers and without "
                "router replay"
            )
        if experts is not None and (mode.num_replaced != 1 or index.shape != experts.shape):
            raise ValueError(
                f"the router of layer {number} with experts made {mode.num_replaced} choices of {experts.shape[1]} out "
                f"of {num_experts} experts, so that its choice cannot be replaced: train the model without router "
                f"replay"
            )
        logits = output[0] if mode.logits is None else mode.logits
        is_first = number not in self._counts
        term = self.note(number, index, logits, num_experts=num_experts, is_sigmoid=mode.is_sigmoid)
        if term is not None and is_first:
            self._terms.append(term)
        return output

    def experts_of(self, number: int) -> Tensor | None:
        """Experts [n, k] that are given to the tokens in a layer, -1 for those that the router chooses; None: it
        chooses all."""
        if self._experts is None:
            return None
        k = self._experts.shape[1] // self._num_layers
        return self._experts[:, number * k : (number + 1) * k].long()

    def note(
        self, number: int, index: Tensor, logits: Tensor, *, num_experts: int, is_sigmoid: bool
    ) -> Tensor | None:
        """Count what a router chose; the term of its loss, a scalar with a gradient, None without one.

        A layer that is computed again counts once, and has the same term again.

        Args:
            number: of the layer.
            index: [n, k], experts of each token.
            logits: [n, E].
            num_experts: E.
            is_sigmoid: how the router makes probabilities of the logits.
        """
        is_first = number not in self._counts
        if is_first:
            self._counts[number] = self._counted(index, num_experts)
        if self._loss is None:
            return None
        return self._loss.term(
            number, logits, is_sigmoid=is_sigmoid, num_rows=self._num_rows, is_new=is_first
        )

    def _counted(self, index: Tensor, num_experts: int) -> Tensor:
        counts = torch.zeros(num_experts, dtype=torch.float64, device=index.device)
        rows = self._num_rows.to(counts).repeat_interleave(index.shape[-1])
        return counts.index_add(0, index.reshape(-1), rows)


def with_experts(given: Tensor, chosen: Tensor) -> Tensor:
    """Experts [n, k] of tokens: those given, and where these are -1, those chosen."""
    return torch.where(given < 0, chosen, given)


class RoutingRecord:
    """Choices of the routers in a forward pass."""

    def __init__(self) -> None:
        self._chosen: dict[int, Tensor] = {}

    def route(self, number: int, num_experts: int, forward: Callable[[], Any]) -> Any:
        """As of RouterPass; ValueError where the router does not say what it chooses."""
        output = forward()
        index = _chosen(output)
        if index is None:
            raise ValueError(
                "a router of this model does not give the indices of the experts that it chooses, so that its routing "
                "cannot be recorded: generate without router replay"
            )
        self._chosen[number] = index
        return output

    def gather(self, function: Callable[[Tensor], Tensor], num_tokens: int) -> None:
        """After the pass: take the choices for the tokens of all ranks, of which `num_tokens` are no padding.

        Args:
            function: [R n, ...] of all ranks, in the order of their tokens, from a tensor [n, ...] of this one.
            num_tokens: N.
        """
        self._chosen = {number: function(index)[:num_tokens] for number, index in self._chosen.items()}

    def join(self, function: Callable[[dict[int, Tensor]], Tensor]) -> None:
        """After the pass: take the choices in the layers of all stages.

        Args:
            function: [L, n, k] of all layers, from tensors [n, k] of those that are here, by their numbers.
        """
        self._chosen = dict(enumerate(function(self._chosen)))

    def chosen(self) -> Tensor:
        """Experts [n, L, k] of the tokens, int16 in host memory."""
        return torch.stack([self._chosen[number] for number in sorted(self._chosen)], dim=1).short().cpu()


def _chosen(output: Any) -> Tensor | None:
    """Indices [n, k] of a router's output; None where it has another form."""
    if not (isinstance(output, tuple) and len(output) == 3 and isinstance(output[2], Tensor)):
        return None
    index: Tensor = output[2]
    return None if index.is_floating_point() or index.dim() != 2 else index


class _RouterMode(TorchFunctionMode):
    """Looks at a router's forward pass: its logits, whether they go through a sigmoid, and its choice of k out of E
    experts, which it may replace."""

    def __init__(self, num_experts: int, experts: Tensor | None) -> None:
        super().__init__()
        self._num_experts, self._experts = num_experts, experts
        self.logits: Tensor | None = None
        """[n, E], what goes into the softmax or sigmoid over all experts; None where there is none."""
        self.is_sigmoid = False
        self.num_replaced = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SIGMOIDS or func in _SOFTMAXES:
            values = args[0] if args else kwargs["input"]
            if self.logits is None and values.shape[-1] == self._num_experts and values.dim() == 2:
                self.logits, self.is_sigmoid = values, func in _SIGMOIDS
        if func in _CHOICES and self._experts is not None:
            values = args[0] if args else kwargs["input"]
            k = args[1] if len(args) > 1 else kwargs["k"]
            if values.dim() == 2 and (values.shape[-1], k) == (self._num_experts, self._experts.shape[1]):
                self.num_replaced += 1
                chosen = func(*args, **kwargs).indices
                experts = with_experts(self._experts, chosen)
                return torch.return_types.topk((values.gather(-1, experts), experts))
        return func(*args, **kwargs)


_SIGMOIDS = (torch.sigmoid, Tensor.sigmoid, F.sigmoid)
_SOFTMAXES = (torch.softmax, Tensor.softmax, F.softmax)
_CHOICES = (torch.topk, Tensor.topk)
