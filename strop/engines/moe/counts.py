"""Choices of experts over rows of all ranks."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.parallel.ranks import Parallel
from strop.engines.tokens import TokenFunction, Tokens
from strop.protocol import DataProto


class _Engine(Protocol):
    model: CausalLM
    parallel: Parallel

    def map_tokens(self, data: DataProto, function: TokenFunction) -> dict[str, Tensor]:
        """As `strop.engines.training.Engine.map_tokens`."""


def expert_counts(engine: _Engine, data: DataProto) -> Tensor:
    """Tokens [L, E] of all ranks' rows that go to each expert of each layer, in host memory, by a pass without
    gradient; each token counts once per row that it is part of.

    A collective of all ranks, each with its own rows.

    Raises:
        ValueError: as `map_tokens`; or the model has no experts, or routers that do not say what they choose.
    """
    counts: list[Tensor] = []

    def count(tokens: Tokens) -> dict[str, Tensor]:
        if (of_tokens := tokens.expert_counts()) is not None:
            counts.append(of_tokens)
        return {}

    engine.map_tokens(data, count)
    added = engine.parallel.sum(torch.stack(counts).sum(0).cpu()) if counts else torch.zeros(1)
    if not added.any():  # on all ranks alike
        raise ValueError(
            f"the choices of experts of {type(engine.model.module).__name__} are not known: it has none, or "
            f"routers of another form, or its layers are compiled"
        )
    return added
