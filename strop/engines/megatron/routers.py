"""Routers of megatron-core that take part in a `Routing`: their choices are counted and may be replaced, and the
losses are those of `strop.engines.moe.losses`, which do not depend on how a batch is cut. megatron-core's own ones are
means over a micro-batch, and its `RouterReplay` keeps one routing for the whole process, while with stages passes of
several micro-batches are under way; the place where a router asks it for experts is what is used of it.

A layer that is computed again in the backward pass has the routing of its pass, which comes with the packed row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from strop.engines.moe.routing import Routing, with_experts


@dataclass(frozen=True, kw_only=True)
class ExpertLayers:
    """Layers with experts of a model."""

    num_layers: int
    """L."""
    num_experts: int
    """E of each."""


def expert_layers(config: TransformerConfig) -> ExpertLayers | None:
    """Layers with experts of a whole model; None of a dense one."""
    if config.num_moe_experts is None:
        return None
    return ExpertLayers(num_layers=sum(config.moe_layer_freq), num_experts=config.num_moe_experts)


class Router(TopKRouter):  # type: ignore[misc]
    """The router of one layer, with the routing of the pass that it is in."""

    router_replay: Any
    """Set while the router chooses; megatron-core takes one of its `RouterReplay` here."""
    _of_pass: Routing | None = None

    @contextlib.contextmanager
    def routed(self, routing: Routing | None) -> Iterator[None]:
        """Take part in this routing, in passes of the layer inside."""
        before, self._of_pass = self._of_pass, routing
        try:
            yield
        finally:
            self._of_pass = before

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [n, E] of the experts of each token and which these are, [n, E] bool, by logits [n, 1, E]."""
        if (of_pass := self._of_pass) is None:
            return super().routing(logits, padding_mask)  # type: ignore[no-any-return]
        number = sum(self.config.moe_layer_freq[: self.layer_number - 1])  # among the layers with experts
        self.router_replay = choice = _Choice(of_pass.experts_of(number))
        try:
            weights, is_chosen = super().routing(logits, padding_mask)
        finally:
            self.router_replay = None
        term = of_pass.note(
            number,
            choice.experts,
            logits.flatten(0, -2),
            num_experts=self.num_experts,
            is_sigmoid=self.score_function == "sigmoid",
        )
        if term is not None and torch.is_grad_enabled():
            weights = MoEAuxLossAutoScaler.apply(weights, term)  # its gradient goes with theirs
        return weights, is_chosen


class _Choice:
    """The experts of the tokens of one pass; megatron-core's router asks it for them as it asks its `RouterReplay`."""

    experts: Tensor
    """[n, k], once they are chosen."""

    def __init__(self, given: Tensor | None) -> None:
        self._given = given

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        """Scores [n, k] and indices [n, k] of the experts, of scores [n, E]."""
        values, experts = default_compute_topk(scores, topk, num_groups, group_topk)
        if self._given is not None:
            experts = with_experts(self._given, experts)
            values = scores.gather(-1, experts)
        self.experts = experts
        return values, experts
