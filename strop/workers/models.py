"""Base classes of the roles with a model: its ranks, token columns, checkpoints, and offloading."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from strop.controller import Dispatch, Worker, register
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.flops import usage_of
from strop.engines.flops.usage import Usage
from strop.engines.kinds import ModelEngine, TrainableEngine, train_engine
from strop.engines.lora import adapters
from strop.engines.lora.adapters import adapter_values, has_adapter
from strop.engines.parallel.process_group import join_ranks
from strop.engines.parallel.ranks import Parallel
from strop.engines.role_checkpoint import load_optimizer, load_role, save_role
from strop.engines.token_budget import Halving, within_memory
from strop.engines.tokens import TokenCounts, TokenFunction, Tokens
from strop.protocol import DataProto
from strop.workers.rehearsal import Group, Rehearsal, rehearsed
from strop.workers.rows import response_columns


class ModelWorker(Worker):
    """A role with a model, or this rank's share of it.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order, each with its
    own rows, also with none.
    """

    engine: ModelEngine

    def join(self, engine: EngineConfig, *, device: str) -> Parallel:
        """The ranks of the role, as the engine sees them.

        Raises:
            ValueError: the axes of the group's mesh are not those of the engine.
        """
        placement, mesh = self.placement, self.placement.mesh
        sizes = {
            "tp": engine.tensor_parallel,
            "sp": engine.sequence_parallel,
            "cp": engine.context_parallel,
            "pp": engine.pipeline_parallel,
        }
        if (mesh.tp, mesh.sp, mesh.cp, mesh.pp) != tuple(sizes.values()):
            axes = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise ValueError(
                f"role {placement.role!r} has the mesh {mesh}, but the settings of its engine (tensor_parallel, "
                f"sequence_parallel, context_parallel, pipeline_parallel) say Mesh(dp=..., {axes})"
            )
        return join_ranks(
            rank=placement.rank,
            world_size=mesh.world_size,
            rendezvous=placement.rendezvous,
            device=device,
            engine=engine,
        )

    def token_columns(self, data: DataProto, function: TokenFunction) -> DataProto:
        """Columns [B, R~, ...] of what a function says of all response tokens of these rows, without gradient."""
        outputs = within_memory(self.engine, lambda: self.engine.map_tokens(data, function))
        return response_columns(data, outputs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def hold_budget(self, max_tokens: int) -> None:
        """Bound micro-batches by so many tokens, as before the run was continued."""
        self.engine.budget.value = max_tokens

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_halvings(self) -> tuple[Halving, ...]:
        """Halvings of the bound on micro-batches since the last call, for want of memory."""
        return self.engine.budget.take_halvings()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """The role is idle: it leaves the device until it is called again."""
        self.engine.offload()


@dataclass(frozen=True, kw_only=True)
class TrainingInit:
    """Start of a model that learns: device, length of the run, and the state that it continues from."""

    device: str
    """`auto` or a device name."""
    num_updates: int | None = None
    """Optimizer steps of the model in the whole run, where a schedule needs to know."""
    checkpoint: Path | None = None
    """Folder that `save_checkpoint` wrote, to continue from."""
    optimizer: Path | None = None
    """Folder of the same form, whose optimizer state a new run takes over."""


class TrainedWorker(ModelWorker):
    """A role with an engine that learns."""

    engine: TrainableEngine
    _in_updates, _seen = 0.0, 0.0
    _tokens_in_updates = TokenCounts()

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """The passes inside belong to an update."""
        counts = self.engine.counts
        before, tokens_before = counts.operations or 0.0, counts.tokens
        yield
        self._in_updates += (counts.operations or 0.0) - before
        self._tokens_in_updates += counts.tokens.since(tokens_before)

    def rehearsed_loss(self, tokens: Tokens) -> Tensor:
        """A loss that asks these tokens for what an update asks them for."""
        raise NotImplementedError

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make_optimizer_state(self) -> None:
        """Take the memory that the optimizer has from its first step on."""
        self.engine.make_optimizer_state()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rehearse(self, groups: Sequence[Group]) -> Rehearsal:
        """As `strop.workers.rehearsal.rehearsed`: passes over the longest rows, which leave nothing behind."""
        return rehearsed(self.engine, groups, self.rehearsed_loss)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def usage(self) -> Usage:
        """Work and memory of this rank since the previous call."""
        updates, tokens, total = self._in_updates, self._tokens_in_updates, self.engine.counts.operations
        operations = None if total is None else total - self._seen
        self._in_updates, self._tokens_in_updates, self._seen = 0.0, TokenCounts(), total or 0.0
        return usage_of(self.engine.model, done=operations, updates=updates, tokens=tokens)

    def _learn(
        self,
        load: Callable[..., CausalLM],
        model: ModelConfig,
        engine: EngineConfig,
        optim: OptimizerConfig,
        learning: TrainingInit,
        *,
        role: str,
        keeps_first: bool = False,
    ) -> Parallel:
        """Load this model for training, at the state of a checkpoint if there is one, else with the optimizer's state
        of another run; the ranks of the role. With `keeps_first` the adapter that is continued is kept as it was."""
        parallel = self.join(engine, device=learning.device)
        loaded = load(model, parallel=parallel)
        self.engine = train_engine(loaded, engine, optim, total_steps=learning.num_updates, parallel=parallel)
        self._first_adapter = adapter_values(loaded) if keeps_first and model.lora.path else None
        """Values of the adapter that is continued; None where it begins at zero, there is none, or nobody asks."""
        self._role = role
        self._pending: Future[None] | None = None
        if learning.checkpoint is not None:
            load_role(learning.checkpoint / role, self.engine)
        elif learning.optimizer is not None:
            load_optimizer(learning.optimizer / role, self.engine)
        return parallel

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, folder: Path, *, in_background: bool = False) -> None:
        """This rank's part of weights and optimizer state into the role's folder inside `folder`.

        Args:
            folder: of the checkpoint; all ranks see the same one.
            in_background: return when the state is copied to host memory; `finish_checkpoint` waits for the rest.
        """
        self.finish_checkpoint()
        self._pending = save_role(folder / self._role, self.engine, in_background=in_background)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def is_checkpoint_written(self) -> bool:
        """False while this rank still writes."""
        return self._pending is None or self._pending.done()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self) -> None:
        """Wait until this rank has written everything; raises what the disk refused."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_model(self, folder: Path) -> None:
        """The model as an ordinary Hugging Face folder, written by rank 0; an adapter is merged into it."""
        if has_adapter(self.engine.model):
            adapters.save_merged(self.engine.model, folder, write=self.rank == 0)
        else:
            self.engine.save_model(folder)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self) -> str:
        """Digest of all weights; the same on every rank and for any number of ranks."""
        return self.engine.checksum()
