"""The Megatron engine: a model of megatron-core behind the methods of `strop.engines.training`.

The model under its Hugging Face names, `engine.model`, has no values but while it generates (`full_parameters`); the
values are those of this rank's part of the layers (model.py).

Concurrency: as of `strop.engines.training`: every method is a collective, called by all ranks in the same order, each
with its own rows, also with none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor

from strop.engines.causal_lm import CausalLM
from strop.engines.checkpoint import Form, open_sharded, save_parts
from strop.engines.checkpoint_reader import Parts, SavedTensors
from strop.engines.checksum.models import combine_digests
from strop.engines.checksum.tensors import digest_tensor
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.finite_weights import check_finite
from strop.engines.lora.adapters import has_adapter
from strop.engines.megatron import passes
from strop.engines.megatron.checks import check_device, check_settings
from strop.engines.megatron.groups import join_groups
from strop.engines.megatron.model import MegatronModel
from strop.engines.megatron.optimizer import MOMENTS, WEIGHT, MegatronAdamW
from strop.engines.megatron.weight_map import Mapped
from strop.engines.megatron.whole_weights import filled, forms, parts_to_save, whole_weights
from strop.engines.micro_batch import pack
from strop.engines.moe.counts import expert_counts
from strop.engines.moe.losses import RouterLoss
from strop.engines.optimizer import StepReport
from strop.engines.packing import micro_batches
from strop.engines.parallel.offload import HostCopies
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.pass_counts import PassCounts
from strop.engines.role_tensors import MODEL, OPTIMIZER
from strop.engines.token_budget import TokenBudget
from strop.engines.tokens import TokenFunction, Tokens
from strop.engines.training import Loss
from strop.protocol import DataProto


class MegatronEngine:
    """One model that is not trained."""

    def __init__(self, model: CausalLM, config: EngineConfig, parallel: Parallel | None = None) -> None:
        """Divide the model over the ranks.

        Args:
            model: just loaded (for several ranks with `load_model(parallel=...)`).
            config: how passes are cut and distributed.
            parallel: the ranks that hold the model; None for this process alone.

        Raises:
            ValueError: a model or settings that megatron-core does not have here.
        """
        self._prepare(model, config, parallel)
        self._chunks: list[torch.nn.Module] = [stage.eval() for stage in self._parts.stages]
        for stage in self._parts.stages:
            stage.requires_grad_(False)
        self._take_weights()

    def _prepare(self, model: CausalLM, config: EngineConfig, parallel: Parallel | None) -> None:
        check_settings(config)
        self.parallel = alone(model.device) if parallel is None else parallel
        check_device(self.parallel.device.type)
        if has_adapter(model) or model.compute_dtype == torch.float16:
            raise ValueError(
                "engine.kind of this role is megatron, which has neither adapters nor float16: use torch, or bfloat16"
            )
        self.model = model
        self.replays_routing = False
        self._config = config
        join_groups(config, self.parallel)
        self.counts = PassCounts(model, self.parallel)
        self.budget = TokenBudget(config.max_tokens_per_device)
        """Bound on the tokens of a micro-batch."""
        self._parts = MegatronModel(model, config, self.parallel)
        self._model_copies = HostCopies()

    @torch.no_grad()
    def map_tokens(
        self, data: DataProto, function: TokenFunction, *, rows: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        """As `strop.engines.training.Engine.map_tokens`; the function gets tokens on the last pipeline stage, and on
        others none, once."""
        self.load_to_device()
        micro = self._micro_batches(data, rows)

        def finish(tokens: Tokens) -> tuple[None, dict[str, Tensor]]:
            return None, {name: values.cpu() for name, values in function(tokens).items()}

        outputs = passes.run(self._parts, self._chunks, micro, finish, trains=False)
        if not self._parts.has_head:
            function(self._of_no_tokens(micro))
        self._count(micro, trains=False)
        order = torch.cat([tokens.response_index for tokens in micro]).argsort()
        return {name: torch.cat([results[name] for results in outputs])[order] for name in outputs[0]}

    def offload(self) -> None:
        """As `strop.engines.training.Engine.offload`."""
        if not self._model_copies.num_bytes:
            self._model_copies.put(t for t in self._device_memory() if t.device.type != "cpu")
            if self._parts.device.type != "cpu":
                torch.accelerator.empty_cache()

    def load_to_device(self) -> None:
        """Bring back the model."""
        self._model_copies.restore()

    def drop_gradients(self) -> None:
        """Forget what was accumulated since the last step; nothing of a frozen model."""

    def streamed_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as the layers compute with it, whole on every rank, one after the other in the order of the
        weight map; all ranks use up the iterator."""
        self.load_to_device()
        return whole_weights(
            self._parts.metadata,
            self._parts.mapped,
            lambda entry: entry.parameter.detach(),
            self._parts.device,
        )

    def _device_memory(self) -> Iterator[Tensor]:
        for entry in self._parts.mapped:
            yield entry.parameter.detach()

    def _micro_batches(
        self, data: DataProto, rows: Sequence[int] | None, router_loss: RouterLoss | None = None
    ) -> list[Tokens]:
        """Packed micro-batches of this rank's rows, as many as schedules and other ranks want, some of them empty."""
        numbers = micro_batches(
            data,
            max_tokens=self.budget.value,
            max_row_tokens=self.budget.setting,
            parallel=self.parallel,
            rows=rows,
            max_positions=self.model.max_positions,
            replays=self.replays_routing,
        ) or [[]]
        is_interleaved = self._config.pipeline_chunks > 1
        if is_interleaved:  # each stage passes them in groups of as many as there are stages
            numbers = numbers + [[]] * (-len(numbers) % self._config.pipeline_parallel)
        shared = None if is_interleaved else self.parallel
        self.budget.begin_packing(max(map(len, numbers)))
        micro = [
            pack(
                data,
                self._parts,
                rows=part,
                parallel=shared,
                router_loss=router_loss,
                replays=self.replays_routing,
            )
            for part in numbers
        ]
        self.budget.begin_pass(max(tokens.num_tokens for tokens in micro), self.parallel)
        return passes.of_one_length(self._parts, micro) if is_interleaved else micro

    def _of_no_tokens(self, micro: Sequence[Tokens]) -> Tokens:
        """Nothing to predict, on a stage without the head; the choices of its routers are those in all passes."""
        first, *others = micro
        for tokens in others:
            if first.routing is not None and tokens.routing is not None:
                first.routing.add_counts(tokens.routing)
        return first.of_no_tokens(self._parts.config.hidden_size, self._parts.config.params_dtype)

    def _count(self, micro: Sequence[Tokens], *, trains: bool) -> None:
        for tokens in micro:
            self.counts.add(tokens, trains=trains)

    @torch.no_grad()
    def _take_weights(self) -> None:
        """Take over the values of the loaded model, which keeps none."""
        tensors = dict(self.model.module.named_parameters())
        for entry in self._parts.mapped:
            self._put(entry, filled(entry, lambda piece: tensors[piece.name][piece.box], self._dtype))
        for tensor in tensors.values():
            tensor.data = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._parts.device)
            tensor.untyped_storage().resize_(0)
        self.model.device = self._parts.device

    def _put(self, entry: Mapped, whole: Tensor) -> None:
        entry.parameter.detach().copy_(whole)

    @property
    def _dtype(self) -> torch.dtype:
        """Precision in which weights are kept."""
        return self._parts.metadata.weights[0].dtype


class MegatronTrainEngine(MegatronEngine):
    """One model with its optimizer."""

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        optim: OptimizerConfig,
        *,
        total_steps: int | None,
        parallel: Parallel | None = None,
    ) -> None:
        """Divide the model over the ranks, and make its optimizer.

        Args:
            model, config, parallel: as of `MegatronEngine`.
            optim: how steps are taken.
            total_steps: optimizer steps of the run, where the schedule needs to know.

        Raises:
            ValueError: as of `MegatronEngine`, or an optimizer that megatron-core does not have here.
        """
        check_settings(config, optim)
        self._prepare(model, config, parallel)
        is_distributed = config.megatron.distributed_optimizer
        if is_distributed and self._dtype == torch.float64:
            raise ValueError(
                "model.dtype is float64, which the distributed optimizer of megatron-core does not have: set "
                "engine.megatron.distributed_optimizer of this role to false"
            )
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=self._parts.config.bf16,
            use_distributed_optimizer=is_distributed,
            overlap_grad_reduce=False,
        )
        wrapped = [
            DistributedDataParallel(self._parts.config, settings, stage, disable_bucketing=number > 0)
            for number, stage in enumerate(self._parts.stages)
        ]
        self._chunks = [chunk.train() for chunk in wrapped]
        self._optimizer = MegatronAdamW(
            wrapped,
            self._parts.mapped,
            optim,
            total_steps=total_steps,
            is_distributed=is_distributed,
            names=[weight.name for weight in self._parts.metadata],
        )
        self._state_copies = HostCopies()
        self._take_weights()

    def expert_counts(self, data: DataProto) -> Tensor:
        """As `strop.engines.moe.counts.expert_counts`."""
        return expert_counts(self, data)

    def accumulate(
        self,
        data: DataProto,
        loss: Loss,
        *,
        rows: Sequence[int] | None = None,
        router_loss: RouterLoss | None = None,
    ) -> Tensor:
        """As `strop.engines.training.TrainEngine.accumulate`; the loss is that of the last pipeline stage, and is asked
        of no tokens on others."""
        self.load_to_device()
        micro = self._micro_batches(data, rows, router_loss)
        total = torch.zeros((), dtype=torch.float64, device=self._parts.device)

        def finish(tokens: Tokens) -> tuple[Tensor, dict[str, Tensor]]:
            value = loss(tokens)
            total.add_(value.detach())
            return value, {}

        passes.run(self._parts, self._chunks, micro, finish, trains=True)
        if not self._parts.has_head:
            loss(self._of_no_tokens(micro))
        self._count(micro, trains=True)
        return passes.from_last_stage([{"loss": total.cpu()}])[0]["loss"].to(self._parts.device)

    def step(self) -> StepReport:
        """One optimizer step on the accumulated gradient, which is cleared."""
        self.load_to_device()
        self._load_optimizer_to_device()
        report = self._optimizer.step()
        self.model.num_changes += 1
        if self._config.offload == "optimizer":
            self._offload_optimizer()
        return report

    def drop_gradients(self) -> None:
        """Forget what was accumulated since the last step."""
        self._optimizer.clear()

    def make_optimizer_state(self) -> None:
        """Nothing: megatron-core's optimizer has its state from the beginning."""

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Every weight in `model` on every rank; forward passes of it inside, without gradients, talk to nobody."""
        tensors = dict(self.model.module.named_parameters())
        for name, whole in self.streamed_weights():
            storage = tensors[name].untyped_storage()
            storage.resize_(whole.nbytes)
            tensors[name].detach().copy_(whole)
        try:
            yield
        finally:
            for tensor in tensors.values():
                tensor.untyped_storage().resize_(0)

    def offload(self) -> None:
        """As for a frozen model; gradients leave with the parameters, and the optimizer's state until a step needs
        it."""
        self._offload_optimizer()
        super().offload()

    def save_model(self, folder: Path) -> None:
        """Weights and configuration as an ordinary Hugging Face folder, written by rank 0, which keeps them in host
        memory; the other ranks do not wait for it."""
        self.load_to_device()
        self._load_optimizer_to_device()
        is_first = self.parallel.rank == 0
        state = {name: whole.cpu() for name, whole in self._kept_weights() if is_first}
        if is_first:
            for weight in self._parts.metadata:
                state |= dict.fromkeys(weight.aliases, state[weight.name])
            module: Any = self.model.module
            module.save_pretrained(folder, state_dict=state)
            self.model.finish_saved(folder)

    def checksum(self) -> str:
        """Digest of the weights; the same for any number of ranks and any engine, on each rank."""
        self.load_to_device()
        self._load_optimizer_to_device()
        digests = {name: digest_tensor(whole) for name, whole in self._kept_weights()}
        return combine_digests(self._parts.metadata, digests)

    def save_state(self, folder: Path, *, in_background: bool = False) -> Future[None] | None:
        """This rank's part of a checkpoint (role_checkpoint.py)."""
        self.load_to_device()
        self._load_optimizer_to_device()
        parts: Parts = {}
        for prefix, kind in self._kinds().items():
            parts |= parts_to_save(self._parts.mapped, self._optimizer.reading(kind), prefix)
        steps = torch.tensor(self._optimizer.adam_steps, dtype=torch.float32)
        if self.parallel.rank == 0:
            parts |= {
                f"{OPTIMIZER}step/{weight.name}": ((), steps.clone()) for weight in self._parts.metadata
            }
        numbers = {"num_steps": self._optimizer.num_steps}
        return save_parts(
            folder, parts, self._forms(), numbers, parallel=self.parallel, in_background=in_background
        )

    def load_state(self, folder: Path, *, leaves_weights: bool = False) -> None:
        """Continue from a checkpoint, whatever ranks and engine wrote it; with `leaves_weights` from its optimizer
        state alone, with the schedule from the beginning."""
        self.load_to_device()
        self._load_optimizer_to_device()
        names = {
            name: form
            for name, form in self._forms().items()
            if not (leaves_weights and name.startswith(MODEL))
        }
        saved = open_sharded(folder, names, leave=[MODEL] if leaves_weights else [])
        for prefix, kind in self._kinds().items():
            if not (leaves_weights and kind == WEIGHT):
                self._load_kind(saved, prefix, kind)
        first = self._parts.metadata.weights[0].name
        self._optimizer.set_adam_steps(float(saved.box(f"{OPTIMIZER}step/{first}", (), ())))
        if not leaves_weights:
            self._optimizer.num_steps = int(saved.numbers["num_steps"])

    def _load_kind(self, saved: SavedTensors, prefix: str, kind: str) -> None:
        for entry in self._parts.mapped:
            whole = filled(
                entry, lambda piece: saved.box(prefix + piece.name, piece.start, piece.shape), self._dtype
            )
            if kind == WEIGHT:
                check_finite([(entry.pieces[0].name, whole)], f"checkpoint {saved.folder}")
            self._optimizer.put(entry, kind, whole)

    def _kinds(self) -> Mapping[str, str]:
        """Beginnings of names of saved tensors, and the kinds of the optimizer that they are."""
        return {MODEL: WEIGHT} | {f"{OPTIMIZER}{kind}/": kind for kind in MOMENTS}

    def _forms(self) -> dict[str, Form]:
        return forms(self._parts.metadata, self._kinds()) | {
            f"{OPTIMIZER}step/{weight.name}": (torch.float32, ()) for weight in self._parts.metadata
        }

    def _kept_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every weight as the optimizer keeps it."""
        parts = self._parts
        return whole_weights(parts.metadata, parts.mapped, self._optimizer.reading(WEIGHT), parts.device)

    def _put(self, entry: Mapped, whole: Tensor) -> None:
        self._optimizer.put(entry, WEIGHT, whole)

    def _device_memory(self) -> Iterator[Tensor]:
        yield from super()._device_memory()
        for entry in self._parts.mapped:
            yield entry.parameter.main_grad  # type: ignore[attr-defined]

    def _offload_optimizer(self) -> None:
        self._state_copies.put(tensor for tensor in self._optimizer.memory() if tensor.device.type != "cpu")

    def _load_optimizer_to_device(self) -> None:
        self._state_copies.restore()
