"""TrainEngine: log-probs or values of packed rows, the gradient of a loss over them, and one optimizer step.

The engine knows no algorithm: a loss is a function of the response tokens' log-probs and entropies (or values),
and returns a sum of weighted per-token terms. Sums add up over micro-batches and over ranks, so any cut of the
rows gives the same gradient.

Concurrency: with several ranks every method is a collective, called by all of them in the same order, each with
its own rows, also with none. Ranks with fewer micro-batches than others run empty ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strop.engines import fsdp, gradients
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.forward import (
    concentrations,
    token_outputs,
    token_outputs_at,
    top_k_outputs,
    value_outputs,
)
from strop.engines.head import ChosenTokens
from strop.engines.optimizer import Optimizer, StepReport
from strop.engines.packing import MicroBatch, Row, pack, split_rows
from strop.engines.parallel import Parallel, alone
from strop.engines.weights import digest_weights
from strop.trajectory import Media

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(log_probs [M], entropies [M], token_index [M]) -> scalar: the sum of these tokens' weighted terms.
token_index [M] is each token's place in the flat token axis of all rows of the call."""

ChosenLoss = Callable[[Tensor, Tensor, Tensor, ChosenTokens], Tensor]
"""As `Loss`, of chosen tokens [M, K] too."""

ValueLoss = Callable[[Tensor, Tensor], Tensor]
"""(values [M], token_index [M]) -> scalar: the sum of these tokens' weighted terms."""


def make_rows(
    prompts: Sequence[Tensor], responses: Sequence[Tensor], media: Sequence[tuple[Media, ...]] | None = None
) -> list[Row]:
    """Rows of one batch, in order; equal prompts will be computed once.

    Args:
        prompts, responses: token ids of each row.
        media: images and videos of each prompt and response; None where no row has any.

    Raises:
        ValueError: an empty prompt or response.
    """
    rows, first = [], 0
    for index, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if len(prompt) == 0 or len(response) == 0:
            raise ValueError(
                f"row {index} has {len(prompt)} prompt and {len(response)} response tokens; each row needs both"
            )
        own = () if media is None else media[index]
        key: Hashable = prompt.numpy().tobytes()
        if shown := [one.key for one in own if one.start < len(prompt)]:
            key = (key, *shown)
        rows.append(Row(prompt, response, first, key, own))
        first += len(response)
    return rows


class TrainEngine:
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
            ValueError: as `fsdp.shard`, or engine.offload=all for a device without others.
        """
        self.model = model
        self.parallel = alone(model.device) if parallel is None else parallel
        if config.offload == "all" and self.parallel.mesh is None and model.device.type != "cpu":
            raise ValueError(
                "engine.offload is 'all', which needs a role of several ranks, and this one has one; use "
                "engine.offload=optimizer"
            )
        self._config = config
        if config.compile:
            model.compile_layers()
        fsdp.shard(model, self.parallel, config)
        self._optimizer = Optimizer(
            model.named_parameters(), optim, total_steps=total_steps, embeddings=model.embedding_names()
        )
        self._away: list[fsdp.HostCopies] = []
        self._state_away: list[fsdp.HostCopies] = []

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, with its state on the device."""
        self.onload()
        while self._state_away:
            fsdp.onload(self._state_away.pop())
        return self._optimizer

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of all response tokens, flat [N] in row order, without gradient."""
        self.onload()
        return forward_log_probs(
            self.model,
            rows,
            temperature=temperature,
            max_tokens=self._config.max_tokens_per_device,
            parallel=self.parallel,
        )

    def values(self, rows: Sequence[Row]) -> Tensor:
        """Values of the states before all response tokens, flat [N] in row order, without gradient."""
        self.onload()
        return forward_values(
            self.model, rows, max_tokens=self._config.max_tokens_per_device, parallel=self.parallel
        )

    def sum_pi_squared(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        """Sum of squared probabilities before all response tokens, flat [N] in row order, without gradient."""
        self.onload()

        def concentration(micro_batch: MicroBatch) -> Tensor:
            return concentrations(self.model, micro_batch, temperature=temperature, parallel=self.parallel)

        return _forward(self.model, rows, concentration, self._config.max_tokens_per_device, self.parallel)

    def accumulate(self, rows: Sequence[Row], loss: Loss, *, temperature: float) -> float:
        """Add the gradient of the loss over these rows; its value. `step` applies what was accumulated.

        With several ranks the gradients are added up over them, and the value is that of this rank's rows.
        """

        def terms(micro_batch: MicroBatch, token_index: Tensor | None) -> Tensor:
            log_probs, entropies = token_outputs(
                self.model, micro_batch, temperature=temperature, parallel=self.parallel
            )
            if token_index is None:
                return 0.0 * (log_probs.sum() + entropies.sum())
            return loss(log_probs, entropies, token_index)

        return self._accumulate(rows, terms)

    def accumulate_chosen(
        self, rows: Sequence[Row], loss: ChosenLoss, chosen: Tensor, *, temperature: float
    ) -> float:
        """As `accumulate`, for a loss of further tokens in the place of each response token.

        Args:
            rows, loss, temperature: as there.
            chosen: [N, K] ids, in the flat token axis of all rows of the call.
        """

        def terms(micro_batch: MicroBatch, token_index: Tensor | None) -> Tensor:
            if token_index is None:  # K is the same on all ranks, with rows or without
                ids = chosen.new_zeros((len(micro_batch.targets), chosen.shape[1]))
            else:
                ids = chosen[token_index]
            log_probs, entropies, at = token_outputs_at(
                self.model,
                micro_batch,
                ids.to(micro_batch.targets),
                temperature=temperature,
                parallel=self.parallel,
            )
            if token_index is None:
                return 0.0 * (log_probs.sum() + entropies.sum() + at.log_probs.sum())
            return loss(log_probs, entropies, token_index, at)

        return self._accumulate(rows, terms)

    def accumulate_values(self, rows: Sequence[Row], loss: ValueLoss) -> float:
        """As `accumulate`, for a loss of values."""

        def terms(micro_batch: MicroBatch, token_index: Tensor | None) -> Tensor:
            values = value_outputs(self.model, micro_batch, parallel=self.parallel)
            return 0.0 * values.sum() if token_index is None else loss(values, token_index)

        return self._accumulate(rows, terms)

    def step(self) -> StepReport:
        """One optimizer step on the accumulated gradient, which is cleared."""
        report = self.optimizer.step()
        if self._config.offload == "optimizer":
            self._state_away.append(fsdp.offload_optimizer(self._optimizer))
        return report

    @contextlib.contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Every parameter gathered on every rank; forward passes inside, without gradients, talk to nobody."""
        self.onload()
        with fsdp.full_parameters(self.model):
            yield

    def offload(self) -> None:
        """The role's turn is over: parameters, gradients and optimizer state leave the device, if it is not a CPU.

        Every other method brings back what it needs.
        """
        self._state_away.append(fsdp.offload_optimizer(self._optimizer))
        self._away.append(fsdp.offload(self.model))

    def onload(self) -> None:
        """Bring back the model; the optimizer's state comes when a step needs it."""
        while self._away:
            fsdp.onload(self._away.pop())

    def save_model(self, folder: Path) -> None:
        """Weights and configuration as an ordinary Hugging Face folder, written by rank 0.

        Parameters are gathered one by one; rank 0 keeps them in host memory. All ranks return when it is written.
        """
        self.onload()
        if not self.model.is_sharded:
            self.model.save(folder)
            return
        module: Any = self.model.module
        state: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}  # tied parameters stay tied
        for name, tensor in module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen[id(tensor)] = self._on_rank_0(tensor.detach())
            state[name] = seen[id(tensor)]
        if self.parallel.rank == 0:
            module.save_pretrained(folder, state_dict=state)
            self.model.save_processor(folder)
        self.parallel.barrier(f"the model in {folder.name}")

    def checksum(self) -> str:
        """`digest_weights` of the model, an adapter included; the same for any number of ranks, on each of them."""
        self.onload()
        return digest_weights(self.model.module)

    def _on_rank_0(self, tensor: Tensor) -> Tensor:
        """The whole tensor in host memory; nothing on other ranks."""
        whole = gradients.full(tensor)
        return whole.cpu().contiguous() if self.parallel.rank == 0 else whole.new_empty(0)

    def _accumulate(self, rows: Sequence[Row], terms: Callable[[MicroBatch, Tensor | None], Tensor]) -> float:
        self.onload()
        parts = _equal_parts(rows, self._config.max_tokens_per_device, self.parallel)
        total = 0.0
        for number, part in enumerate(parts):
            fsdp.sync_gradients(
                self.model,
                is_last=number == len(parts) - 1,
                each=self._config.gradient_sync == "each",
                keep_parameters=not self._config.reshard_after_forward,
            )
            micro_batch = pack(part or [_NOTHING], device=self.model.device, vision=self.model.vision)
            with fsdp.activations_on_host(self.model, enabled=self._config.offload_activations):
                value = terms(micro_batch, micro_batch.token_index if part else None)
            value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
        return total


_NOTHING = Row(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 0, b"")
"""What a rank runs when it has no rows left and others have."""


def _equal_parts(rows: Sequence[Row], max_tokens: int, parallel: Parallel) -> list[list[Row]]:
    """Micro-batches of these rows, as many on every rank; the last ones of a rank may have no rows."""
    parts = split_rows(rows, max_tokens=max_tokens, num_devices=parallel.sp_size)
    return parts + [[] for _ in range(parallel.max(len(parts)) - len(parts))]


@torch.no_grad()
def forward_log_probs(
    model: CausalLM,
    rows: Sequence[Row],
    *,
    temperature: float,
    max_tokens: int,
    parallel: Parallel | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens, flat [N] in row order, on the CPU."""
    ranks = alone(model.device) if parallel is None else parallel
    log_probs, entropies = _per_token(model, rows), _per_token(model, rows)
    for part in _equal_parts(rows, max_tokens, ranks):
        micro_batch = pack(part or [_NOTHING], device=model.device, vision=model.vision)
        values, entropy = token_outputs(model, micro_batch, temperature=temperature, parallel=ranks)
        if part:
            log_probs[micro_batch.token_index] = values.cpu()
            entropies[micro_batch.token_index] = entropy.cpu()
    fsdp.reshard(model)
    return log_probs, entropies


@torch.no_grad()
def forward_top_k(
    model: CausalLM,
    rows: Sequence[Row],
    k: int,
    *,
    temperature: float,
    max_tokens: int,
    banned: Tensor | None = None,
    parallel: Parallel | None = None,
) -> tuple[Tensor, Tensor]:
    """The k most likely tokens in the place of each response token, on the CPU: ids and log-probs [N, k] in row order.

    `banned` are ids that are passed over, beside those of the model itself.
    """
    ranks = alone(model.device) if parallel is None else parallel
    log_probs = _per_token(model, rows)[:, None].repeat(1, k)
    ids = torch.zeros(log_probs.shape, dtype=torch.int64)
    for part in _equal_parts(rows, max_tokens, ranks):
        micro_batch = pack(part or [_NOTHING], device=model.device, vision=model.vision)
        best, values = top_k_outputs(
            model, micro_batch, k, temperature=temperature, banned=banned, parallel=ranks
        )
        if part:
            ids[micro_batch.token_index] = best.cpu()
            log_probs[micro_batch.token_index] = values.to(log_probs)
    fsdp.reshard(model)
    return ids, log_probs


@torch.no_grad()
def forward_values(
    model: CausalLM, rows: Sequence[Row], *, max_tokens: int, parallel: Parallel | None = None
) -> Tensor:
    """Values of the states before all response tokens, flat [N] in row order, on the CPU."""
    ranks = alone(model.device) if parallel is None else parallel
    return _forward(model, rows, lambda part: value_outputs(model, part, parallel=ranks), max_tokens, ranks)


@torch.no_grad()
def _forward(
    model: CausalLM,
    rows: Sequence[Row],
    outputs: Callable[[MicroBatch], Tensor],
    max_tokens: int,
    ranks: Parallel,
) -> Tensor:
    """One number per response token, flat [N] in row order, on the CPU."""
    values = _per_token(model, rows)
    for part in _equal_parts(rows, max_tokens, ranks):
        micro_batch = pack(part or [_NOTHING], device=model.device, vision=model.vision)
        here = outputs(micro_batch)
        if part:
            values[micro_batch.token_index] = here.cpu()
    fsdp.reshard(model)
    return values


def _per_token(model: CausalLM, rows: Sequence[Row]) -> Tensor:
    """Zeros [N], one per response token."""
    dtype = torch.float64 if model.compute_dtype == torch.float64 else torch.float32
    return torch.zeros(sum(len(row.response) for row in rows), dtype=dtype)
