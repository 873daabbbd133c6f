"""What tests ask of an engine or a model most often, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig
from strop.engines.kinds import ModelEngine
from strop.engines.tokens import TokenFunction, Tokens
from strop.engines.training import Engine
from strop.protocol import DataProto

TEXT_MODEL: Any = SimpleNamespace(device=torch.device("cpu"), media=None, routers=None)
"""What packing asks of a model."""


def log_probs_of(
    model: CausalLM | ModelEngine,
    data: DataProto,
    *,
    temperature: float,
    max_tokens: int = 10_000,
    rows: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [N] of all response tokens; an engine cuts micro-batches by its own budget."""

    def asked(tokens: Tokens) -> dict[str, Tensor]:
        log_probs, entropies = tokens.log_probs(temperature=temperature)
        return {"log_probs": log_probs, "entropies": entropies}

    made = _mapped(model, data, asked, max_tokens, rows)
    return made["log_probs"], made["entropies"]


def values_of(model: CausalLM | ModelEngine, data: DataProto, *, max_tokens: int = 10_000) -> Tensor:
    """Values [N] before all response tokens."""
    return _mapped(model, data, lambda tokens: {"values": tokens.values()}, max_tokens)["values"]


def of_log_probs(
    loss: Callable[[Tensor, Tensor, Tensor], Tensor], *, temperature: float
) -> Callable[[Tokens], Tensor]:
    """A loss of log-probs [M], entropies [M] and places [M], as an engine takes it."""
    return lambda tokens: loss(*tokens.log_probs(temperature=temperature), tokens.response_index)


def of_values(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tokens], Tensor]:
    """A loss of values [M] and places [M], as an engine takes it."""
    return lambda tokens: loss(tokens.values(), tokens.response_index)


def _mapped(
    model: CausalLM | ModelEngine,
    data: DataProto,
    asked: TokenFunction,
    max_tokens: int,
    rows: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    if not isinstance(model, CausalLM):
        return model.map_tokens(data, asked, rows=rows)
    engine = Engine(model, EngineConfig(max_tokens_per_device=max_tokens), is_frozen=False)
    return engine.map_tokens(data, asked, rows=rows)
