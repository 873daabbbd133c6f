"""Forward pass of a model over packed rows (Engine), gradient of a loss over them, and optimizer step (TrainEngine).

The engine knows no algorithm: a loss is a function of the response tokens' log-probs and entropies (or values),
and returns a sum of weighted per-token terms. Sums add up over micro-batches and over ranks, so any cut of the
rows gives the same gradient.

Concurrency: with several ranks every method is a collective, called by all of them in the same order, each with
its own rows, also with none. Ranks with fewer micro-batches than others run empty ones (engines/micro_batch.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.checkpoint import forms_of, load_sharded, save_sharded, save_sharded_async
from strop.engines.checkpoint_reader import DTYPE_NAMES, DTYPES
from strop.engines.checksum.models import digest_weights
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.finite_weights import check_finite
from strop.engines.grad_scaler import LossScale
from strop.engines.lora.adapters import merged_weights
from strop.engines.micro_batch import pack
from strop.engines.moe.counts import expert_counts
from strop.engines.moe.losses import RouterLoss
from strop.engines.optimizer import Optimizer, StepReport
from strop.engines.packing import micro_batches
from strop.engines.parallel.fsdp import full_parameters, reshard, shard, sync_gradients
from strop.engines.parallel.host_activations import activations_on_host
from strop.engines.parallel.offload import HostCopies, offload, offload_optimizer
from strop.engines.parallel.pipeline import whole_weight
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.pass_counts import PassCounts
from strop.engines.pipelined import accumulate_micro_batches, map_micro_batches
from strop.engines.role_tensors import (
    MODEL,
    OPTIMIZER,
    of_choice_biases,
    of_other_stages,
    present,
    role_tensors,
    weight_of,
)
from strop.engines.token_budget import TokenBudget
from strop.engines.tokens import TokenFunction, Tokens
from strop.protocol import DataProto
from strop.utils import timeline
from strop.utils.host_copy import HostCopy

Loss = Callable[[Tokens], Tensor]
"""The sum of these tokens' weighted terms, a scalar; of no tokens, 0 that comes from what was asked of them."""


class Engine:
    """One model, whole or sharded over ranks."""

    def __init__(
        self, model: CausalLM, config: EngineConfig, parallel: Parallel | None = None, *, is_frozen: bool
    ) -> None:
        """Shard the model if there are several ranks.

        Args:
            model: just loaded (for several ranks with `load_model(parallel=...)`).
            config: how passes are cut and distributed.
            parallel: the ranks that hold the model; None for this process alone.
            is_frozen: no weight is ever trained.

        Raises:
            ValueError: as `strop.engines.parallel.fsdp.shard`.
        """
        self.model = model
        self.parallel = alone(model.device) if parallel is None else parallel
        self._config = config
        self.counts = PassCounts(model, self.parallel)
        self.budget = TokenBudget(config.max_tokens_per_device)
        """Bound on the tokens of a micro-batch."""
        self.replays_routing = False
        """Tokens go to the experts that a batch's column routed_experts names, where it has one."""
        self._model_copies = HostCopies()
        if is_frozen:
            model.module.requires_grad_(False)
        if self.parallel.mesh is not None:
            shard(model, self.parallel, config)

    @torch.no_grad()
    def map_tokens(
        self, data: DataProto, function: TokenFunction, *, rows: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """Values of a function for all response tokens [N, ...] of these rows, in their order, in host memory.

        Args:
            data: rows of this rank: columns prompts [B, P~] and responses [B, R~], and `media` where a row has any.
            rows: numbers of those that are wanted, in ascending order; None: all.
            function: called once per micro-batch; without any rows once, which says what there would be.

        Raises:
            ValueError: a row is too long, or has media that the model or these ranks cannot take.
        """
        self.load_to_device()
        parts = self._parts(data, rows) or [[]]
        indices: list[Tensor] = []
        outputs: list[HostCopy] = []

        def noted(tokens: Tokens) -> Mapping[str, Tensor]:
            indices.append(tokens.response_index)
            return function(tokens)

        def keep(results: Mapping[str, Tensor]) -> None:
            outputs.append(HostCopy(results))

        packed = self._packing(data, parts, trains=False)
        if self.model.pipeline is not None:
            indices, results = map_micro_batches(self.model, parts, packed, function)
            for part_results in results:
                keep(part_results)
        else:
            for part in parts:
                with timeline.span("forward", "compute", rows=len(part)):
                    keep(self.model.run(noted, packed(part)))
        if self.parallel.mesh is not None:
            reshard(self.model)
        order = torch.cat(indices).argsort()
        columns = [copies.wait() for copies in reversed(outputs)][
            ::-1
        ]  # the others are there before the last one
        return {name: torch.cat([results[name] for results in columns])[order] for name in columns[0]}

    def _parts(self, data: DataProto, rows: Sequence[int] | None) -> list[list[int]]:
        """Numbers of the rows of each micro-batch."""
        return micro_batches(
            data,
            max_tokens=self.budget.value,
            max_row_tokens=self.budget.setting,
            parallel=self.parallel,
            rows=rows,
            max_positions=self.model.max_positions,
            replays=self.replays_routing,
        )

    def _packing(
        self,
        data: DataProto,
        parts: Sequence[Sequence[int]],
        *,
        trains: bool,
        router_loss: RouterLoss | None = None,
    ) -> Callable[[Sequence[int]], Tokens]:
        """Function that makes a micro-batch of the rows of a part, whose pass is counted."""
        together = max(map(len, parts), default=0) if self.model.pipeline is not None else 0

        def packed(rows: Sequence[int]) -> Tokens:
            self.budget.begin_packing(max(together, len(rows)))
            tokens = pack(
                data,
                self.model,
                rows=rows,
                parallel=self.parallel,
                router_loss=router_loss,
                replays=self.replays_routing,
            )
            if rows or not together:  # the empty ones say nothing of others that are there with them
                self.budget.begin_pass(tokens.num_tokens, self.parallel)
            self.counts.add(tokens, trains=trains)
            return tokens

        return packed

    def expert_counts(self, data: DataProto) -> Tensor:
        """As `strop.engines.moe.counts.expert_counts`."""
        return expert_counts(self, data)

    def streamed_weights(self) -> Iterator[tuple[str, Tensor]] | None:
        """Every weight with its adapter added, in the order of the weight map; None where the model has none, and its
        own weights are as they are."""
        return merged_weights(self.model)

    def offload(self) -> None:
        """The model is idle: it leaves the device, if that is not a CPU. Every other method brings back what it
        needs."""
        if not self._model_copies.num_bytes:
            offload(self.model, self._model_copies)

    def load_to_device(self) -> None:
        """Bring back the model."""
        self._model_copies.restore()

    def drop_gradients(self) -> None:
        """Forget what was accumulated since the last step; nothing of a frozen model."""


class TrainEngine(Engine):
    """One model with its optimizer, whole or sharded over ranks."""

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        optim: OptimizerConfig,
        *,
        total_steps: int | None,
        parallel: Parallel | None = None,
    ) -> None:
        """Shard the model if there are several ranks, and make its optimizer.

        Args:
            model: just loaded (for several ranks with `load_model(parallel=...)`).
            config, optim: how passes are cut and distributed, and how steps are taken.
            total_steps: optimizer steps of the run, where the schedule needs to know.
            parallel: the ranks that hold the model; None for this process alone.

        Raises:
            ValueError: as `strop.engines.parallel.fsdp.shard`, or engine.offload=all for a device without others.
        """
        if (
            config.offload == "all"
            and (parallel is None or parallel.mesh is None)
            and model.device.type != "cpu"
        ):
            raise ValueError(
                "engine.offload is 'all', which needs a role of several ranks, and this one has one; use "
                "engine.offload=optimizer"
            )
        if config.compile:
            model.compile_layers()
        super().__init__(model, config, parallel, is_frozen=False)
        is_half = model.compute_dtype == torch.float16
        self._loss_scale = LossScale() if is_half else None
        self._optimizer = Optimizer(
            model.named_parameters(),
            optim,
            total_steps=total_steps,
            embeddings=model.embedding_names(),
            loss_scale=self._loss_scale,
            stages=model.pipeline,
            matrix_group=self.parallel.matrix_group,
        )
        self._state_copies = HostCopies()

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with its state on the device."""
        self.load_to_device()
        self._state_copies.restore()
        return self._optimizer

    def accumulate(
        self,
        data: DataProto,
        loss: Loss,
        *,
        rows: Sequence[int] | None = None,
        router_loss: RouterLoss | None = None,
    ) -> Tensor:
        """Add the gradient of a loss over rows of a batch; its value, a scalar in float64. `step` applies what was
        accumulated.

        With several ranks the gradients are added up over them, and the value is that of this rank's rows. The device
        is not waited for. Arguments and errors are those of `map_tokens`; the gradient of a `router_loss`
        is added, and its value noted in it.
        """
        self.load_to_device()
        parts = self._parts(data, rows)
        packed = self._packing(data, parts, trains=True, router_loss=router_loss)
        factor = 1.0 if self._loss_scale is None else self._loss_scale.value
        if self.model.pipeline is not None:
            total = accumulate_micro_batches(
                self.model, parts, packed, loss, factor=factor, before_backward=self._sync_gradients
            )
            reshard(self.model)  # a stage without anything trained had no backward pass
            return total
        total = torch.zeros((), dtype=torch.float64, device=self.model.device)
        for number, part in enumerate(parts):
            if self.parallel.mesh is not None:
                self._sync_gradients(number == len(parts) - 1)
            tokens = packed(part)
            with timeline.span("forward and backward", "compute", rows=len(part), tokens=tokens.num_tokens):
                stays = not self._config.offload_activations
                with contextlib.nullcontext() if stays else activations_on_host(self.model):
                    value, of_routers = self.model.run(tokens.losses, loss)
                whole = value if of_routers is None else value + of_routers
                scaled = whole if factor == 1.0 else whole * factor
                scaled.backward()  # type: ignore[no-untyped-call]
            total += value.detach()
        return total

    def _sync_gradients(self, is_last: bool) -> None:
        """Set whether ranks add up their gradients in the next backward pass, which may be the last one."""
        sync_gradients(
            self.model,
            is_last=is_last,
            every_pass=self._config.gradient_sync == "each",
            keep_parameters=not self._config.reshard_after_forward,
        )

    def step(self) -> StepReport:
        """One optimizer step on the accumulated gradient, which is cleared."""
        if self.model.pipeline is not None:
            self.model.pipeline.add_shared_gradients()
        with timeline.span("optimizer step", "compute"):
            report = self.optimizer.step()
        self.model.num_changes += 1
        if self._config.offload == "optimizer":
            offload_optimizer(self._optimizer, self._state_copies)
        return report

    def drop_gradients(self) -> None:
        """Forget what was accumulated since the last step."""
        for _, parameter in self.model.named_parameters():
            parameter.grad = None

    def make_optimizer_state(self) -> None:
        """Take the memory that the optimizer has from its first step on; its numbers are those before it."""
        self.optimizer.materialize_state()
        if self._config.offload == "optimizer":
            offload_optimizer(self._optimizer, self._state_copies)

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Every parameter gathered over the data-parallel ranks; forward passes inside, without gradients, talk to the
        ranks alone that hold the other parts of this copy of the model (stages, matrices, experts)."""
        self.load_to_device()
        is_whole = self.parallel.mesh is None
        with contextlib.nullcontext() if is_whole else full_parameters(self.model):
            yield

    def offload(self) -> None:
        """As for a frozen model; gradients leave with the parameters, and the optimizer's state until a step needs
        it."""
        offload_optimizer(self._optimizer, self._state_copies)
        super().offload()

    def save_model(self, folder: Path) -> None:
        """Weights and configuration as an ordinary Hugging Face folder, written by rank 0.

        Parameters are gathered one by one; rank 0 keeps them in host memory. The other ranks do not wait until it is
        written, which may take longer than a wait for other ranks may.
        """
        self.load_to_device()
        if not self.model.is_sharded:
            self.model.save(folder)
            return
        module: Any = self.model.module
        state: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}  # tied parameters stay tied
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                whole = whole_weight(module, name, tensor, tensor.dtype)
                is_kept = self.parallel.rank == 0
                seen[id(tensor)] = whole.cpu().contiguous() if is_kept else whole.new_empty(0)
            state[name] = seen[id(tensor)]
        if self.parallel.rank == 0:
            module.save_pretrained(folder, state_dict=state)
            self.model.save_media_settings(folder)
            self.model.finish_saved(folder)

    def checksum(self) -> str:
        """Digest of the weights, an adapter included; the same for any number of ranks, on each of them."""
        self.load_to_device()
        return digest_weights(self.model.module)

    def save_state(self, folder: Path, *, in_background: bool = False) -> Future[None] | None:
        """Write this rank's part of a checkpoint (role_checkpoint.py); what is being written, or None when it is."""
        moments, numbers = self.optimizer.state()
        tensors = role_tensors(self.model) | {OPTIMIZER + name: tensor for name, tensor in moments.items()}
        forms = None
        if (pipeline := self.model.pipeline) is not None:
            tensors = {name: tensor for name, tensor in tensors.items() if pipeline.is_mine(weight_of(name))}
            own = {name: (DTYPE_NAMES[dtype], shape) for name, (dtype, shape) in forms_of(tensors).items()}
            of_stages = pipeline.of_all_stages(own)
            forms = {name: (DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in of_stages.items()}
        if in_background:
            return save_sharded_async(folder, tensors, numbers, parallel=self.parallel, forms=forms)
        save_sharded(folder, tensors, numbers, parallel=self.parallel, forms=forms)
        return None

    def load_state(self, folder: Path, *, leaves_weights: bool = False) -> None:
        """Continue from a checkpoint; with `leaves_weights` from the moments of its optimizer alone, with the schedule
        from the beginning.

        Raises:
            ValueError: the checkpoint is of another model or optimizer, or damaged.
        """
        moments, numbers = self.optimizer.state()
        tensors = {OPTIMIZER + name: tensor for name, tensor in moments.items()}
        leave = of_other_stages(self.model, moments) + of_choice_biases(self.model, moments)
        if leaves_weights:
            load_sharded(folder, tensors, leave=[MODEL, *leave])
        else:
            weights = present(role_tensors(self.model))
            numbers = load_sharded(folder, weights | present(tensors), leave=leave)
            check_finite(weights.items(), f"checkpoint {folder}")
        try:
            self.optimizer.load_state(moments, numbers)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"checkpoint {folder} is damaged: its numbers are not those of the optimizer ({type(error).__name__}: "
                f"{error}); use an earlier checkpoint"
            ) from error
