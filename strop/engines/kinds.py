"""The engine of a role: what workers ask of one, and the two kinds of it (engine.kind).

torch is `strop.engines.training`, megatron is `strop.engines.megatron`. Methods are those of the torch engine, where
they are described; all of them are collectives of the ranks that hold the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.half_weights import hold_base_half, hold_half
from strop.engines.megatron.checks import check_installed
from strop.engines.moe.losses import RouterLoss
from strop.engines.optimizer import StepReport
from strop.engines.parallel.ranks import Parallel
from strop.engines.pass_counts import PassCounts
from strop.engines.token_budget import TokenBudget
from strop.engines.tokens import TokenFunction
from strop.engines.training import Engine, Loss, TrainEngine
from strop.protocol import DataProto
from strop.utils.glibc import keep_heap


class ModelEngine(Protocol):
    """A model over the ranks of a role, and its forward pass (`strop.engines.training.Engine`)."""

    model: CausalLM
    """The model under its Hugging Face names. Whether it has values outside of `full_parameters` is the engine's
    affair: they are read through `streamed_weights`."""
    parallel: Parallel
    counts: PassCounts
    budget: TokenBudget
    """Bound on the tokens of a micro-batch."""
    replays_routing: bool
    """Tokens go to the experts that rows name."""

    def map_tokens(
        self, data: DataProto, function: TokenFunction, *, rows: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Values of a function for all response tokens."""

    def streamed_weights(self) -> Iterator[tuple[str, Tensor]] | None:
        """Every weight in the order of the weight map, with an adapter added; None where those of `model` are as they
        are."""

    def offload(self) -> None:
        """Leave the device."""

    def load_to_device(self) -> None:
        """Come back."""

    def drop_gradients(self) -> None:
        """Forget what was accumulated since the last step."""


class TrainableEngine(ModelEngine, Protocol):
    """A model that learns (`strop.engines.training.TrainEngine`)."""

    def accumulate(
        self,
        data: DataProto,
        loss: Loss,
        *,
        rows: Sequence[int] | None = None,
        router_loss: RouterLoss | None = None,
    ) -> Tensor:
        """Add the gradient of a loss; its value, a scalar on the device."""

    def expert_counts(self, data: DataProto) -> Tensor:
        """Tokens that go to each expert."""

    def step(self) -> StepReport:
        """Take an optimizer step."""

    def make_optimizer_state(self) -> None:
        """Take the memory of the optimizer's state."""

    def full_parameters(self) -> contextlib.AbstractContextManager[None]:
        """The weights in `model` that generation on this rank computes with."""

    def save_model(self, folder: Path) -> None:
        """Write a Hugging Face folder."""

    def checksum(self) -> str:
        """Digest of the weights."""

    def save_state(self, folder: Path, *, in_background: bool = False) -> Future[None] | None:
        """Write this rank's part of a checkpoint."""

    def load_state(self, folder: Path, *, leaves_weights: bool = False) -> None:
        """Continue from a checkpoint, or with `leaves_weights` from its optimizer's state alone."""


def frozen_engine(model: CausalLM, config: EngineConfig, parallel: Parallel) -> ModelEngine:
    """The engine of a model that is not trained; arguments and errors as of `strop.engines.training.Engine`.

    Its weights are rounded to the precision of computation.
    """
    if config.kind == "torch":
        hold_half(model, device=parallel.device, is_sharded=parallel.mesh is not None)
        return Engine(model, config, parallel, is_frozen=True)
    check_installed()
    from strop.engines.megatron.engine import MegatronEngine

    return MegatronEngine(model, config, parallel)


def train_engine(
    model: CausalLM,
    config: EngineConfig,
    optim: OptimizerConfig,
    *,
    total_steps: int | None,
    parallel: Parallel,
) -> TrainableEngine:
    """The engine of a model that learns; arguments and errors as of `strop.engines.training.TrainEngine`.

    The frozen base of an adapter is held in the precision of computation where that loses nothing. On a CPU the process
    keeps the memory that a step has taken, for the next one.
    """
    if parallel.device.type == "cpu":
        keep_heap(is_recomputed=model.is_recomputed)
    if config.kind == "torch":
        hold_base_half(model, device=parallel.device)
        return TrainEngine(model, config, optim, total_steps=total_steps, parallel=parallel)
    check_installed()
    from strop.engines.megatron.engine import MegatronTrainEngine

    return MegatronTrainEngine(model, config, optim, total_steps=total_steps, parallel=parallel)
