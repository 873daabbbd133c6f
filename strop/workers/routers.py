"""Losses of a model's routers over an optimizer batch, and metrics of the loads of its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from strop.engines.config import MoEConfig
from strop.engines.kinds import TrainableEngine
from strop.engines.moe.layers import num_experts
from strop.engines.moe.losses import RouterLoss
from strop.engines.parallel.ranks import Parallel
from strop.engines.tokens import Tokens
from strop.protocol import DataProto, columns
from strop.utils.metrics import Mean, Metric, Reduction

MAX_LOAD = Metric(
    "{actor,train}/moe/max_load",
    "1",
    "tokens of the expert that has most, over those of a mean one; of the layer where this is largest; with experts",
)
LOAD_ENTROPY = Metric(
    "{actor,train}/moe/load_entropy",
    "1",
    "entropy of the tokens over the experts, as a share of log E, 1: all alike; of the layer where this is least",
)
UNUSED_EXPERTS = Metric("{actor,train}/moe/unused_experts", "1", "share of the experts without a token")
Z_LOSS = Metric("{actor,train}/moe/z_loss", "1", "router z-loss before its factor, mean over layers")
BALANCE_LOSS = Metric(
    "{actor,train}/moe/balance_loss",
    "1",
    "load-balancing loss before its factor, mean over layers; 1: balanced",
)


def check_routers(config: Any, settings: MoEConfig, *, section: str) -> None:
    """Raise a ValueError for losses of the routers of a dense model.

    Args:
        config: the model's configuration as transformers reads it.
        settings: the losses.
        section: what the sentence calls the settings, such as actor.moe.
    """
    if settings.is_on and not num_experts(config):
        key = "balance_loss_coef" if settings.balance_loss_coef else "z_loss_coef"
        raise ValueError(
            f"{section}.{key} is {getattr(settings, key)}, but {config.get_text_config().model_type} is a dense model, "
            f"without routers: set it to 0"
        )


def router_loss(engine: TrainableEngine, settings: MoEConfig, data: DataProto) -> RouterLoss | None:
    """Loss of the routers in the optimizer batch of which these are the rank's rows; None where it has no factor.

    A collective of all ranks. With a balance loss all rows are passed through the model once, to count.
    """
    if not settings.is_on:
        return None
    tensors = data.tensors()
    lengths = columns.row_lengths(tensors["prompts"]) + columns.row_lengths(tensors["responses"]) - 1
    num_tokens = sum(int(share) for share in engine.parallel.gather(lengths.sum()[None]))
    shares = None
    if settings.balance_loss_coef:
        counts = engine.expert_counts(data)
        shares = counts / counts.sum(-1, keepdim=True)
    return RouterLoss(
        z_coef=settings.z_loss_coef,
        balance_coef=settings.balance_loss_coef,
        num_tokens=num_tokens,
        shares=shares,
    )


class ExpertLoads:
    """Counts of the choices in the passes of an optimizer batch, added up on the device."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None

    def add(self, tokens: Tokens) -> None:
        """Count these tokens; nothing for a dense model."""
        if (counts := tokens.expert_counts()) is not None:
            self._counts = counts if self._counts is None else self._counts + counts

    def metrics(self, role: str, parallel: Parallel, share: float) -> dict[str, Reduction]:
        """Of the tokens of all ranks, a collective; nothing for a dense model, or routers that do not say what they
        choose.

        Args:
            role: first part of the names.
            parallel: the ranks.
            share: weight of this rank in means.
        """
        if self._counts is None or not (counts := parallel.sum(self._counts)).any():
            return {}
        return {name.of(role): Mean(value * share, share) for name, value in load_numbers(counts).items()}


def load_numbers(counts: Tensor) -> Mapping[Metric, float]:
    """The metrics of loads [L, E]; as if all were alike where there are no tokens."""
    shares = counts.double() / counts.sum(-1, keepdim=True).clamp(min=1)
    shares = torch.where(counts.sum(-1, keepdim=True) > 0, shares, 1 / counts.shape[-1])  # [L, E]
    entropy = torch.special.entr(shares).sum(-1) / torch.tensor(counts.shape[-1]).double().log().clamp(
        min=1e-9
    )
    return {
        MAX_LOAD: float(shares.max()) * counts.shape[-1],
        LOAD_ENTROPY: float(entropy.min()),
        UNUSED_EXPERTS: float((shares == 0).double().mean()),
    }


def loss_parts(
    loss: RouterLoss | None, settings: MoEConfig, engine: TrainableEngine
) -> tuple[float, dict[Metric, float]]:
    """The routers' loss over all ranks with its factors, and its parts as means over layers; a collective."""
    if loss is None or engine.model.routers is None:
        return 0.0, {}
    z, balance = engine.parallel.sum(loss.values).tolist()
    num_layers = engine.model.routers.num_layers
    parts = {
        metric: value / num_layers
        for metric, value, coef in (
            (Z_LOSS, z, settings.z_loss_coef),
            (BALANCE_LOSS, balance, settings.balance_loss_coef),
        )
        if coef
    }
    return settings.z_loss_coef * z + settings.balance_loss_coef * balance, parts
