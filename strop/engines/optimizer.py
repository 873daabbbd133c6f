"""One optimizer step: the learning rate, the global gradient norm, clipping, the refusal of poisoned gradients.

The optimizers that take it are in optimizers/.

Concurrency: with sharded parameters `step` is a collective of all ranks; they see the same norm, so they take,
clip or skip the step alike. The other methods talk to nobody.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strop.engines import gradients
from strop.engines.config import OptimizerConfig
from strop.engines.grad_scaler import LossScale
from strop.engines.optimizers.adamw import Part, adamw_parts
from strop.engines.optimizers.adamw_8bit import adamw_8bit_parts
from strop.engines.optimizers.muon import muon_parts


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Outcome of one optimizer step."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    lr: float
    """Learning rate of the step, also of one that was not taken."""
    skipped: str = ""
    """Reason why no step was taken; empty when it was."""


class Optimizer:
    """The optimizer of named parameters. State moves in and out as named tensors and numbers.

    A parameter without a gradient has the gradient 0. Rows whose gradient is 0 are left out of the backward pass
    to save time, and ranks may have no rows at all; the update must not depend on either. So a step without any
    gradient still decays weights and moves them by their momentum, as AdamW does on a gradient of 0.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        *,
        total_steps: int | None,
        embeddings: Collection[str] = (),
        loss_scale: LossScale | None = None,
        stages: gradients.Stages | None = None,
        matrix_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take the parameters that require a gradient and are on this rank, whole or as shards.

        Args:
            parameters: (name, parameter), in the same order on all ranks.
            config: which optimizer, and its numbers.
            total_steps: optimizer steps of the run, where the schedule needs to know.
            embeddings: names of parameters of embeddings and head (`CausalLM.embedding_names`), which Muon leaves to
                AdamW; unused otherwise.
            loss_scale: factor of the losses whose gradients come here, in float16; None: they are as they are.
            stages: ranks that have the other parameters of the model; None: all of them are here.
            matrix_group: ranks that hold the parts of a matrix where it is cut along two axes (`Parallel`).

        Raises:
            ValueError: Muon without `embeddings`, or a package that is not installed.
        """
        self.config = config
        self.total_steps = total_steps
        self.num_steps = 0
        """Steps that were taken. The schedule counts these: a skipped step does not move it."""
        self._loss_scale, self._stages = loss_scale, stages
        self._named = {name: p for name, p in parameters if p.requires_grad and not p.is_meta}
        self._parts = _make(self._named, config, embeddings, matrix_group)

    def step(self) -> StepReport:
        """Clip the gradients, take one step, clear them. A non-finite gradient is skipped and named."""
        lr = learning_rate(self.config, self.num_steps, self.total_steps)
        grads: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter.detach())
            grads[name] = parameter.grad
        if self._loss_scale is not None:
            gradients.scale(grads, 1 / self._loss_scale.value)
        grad_norm = gradients.total_norm(grads, self._stages)
        if self._loss_scale is not None:
            self._loss_scale.update(is_finite=math.isfinite(grad_norm))
        skipped = ""
        if math.isfinite(grad_norm):
            factor = self.config.max_grad_norm / (grad_norm + 1e-6)  # torch's clipping adds as much
            if factor < 1:
                gradients.scale(grads, factor)
            self._move(lr)
            self.num_steps += 1
        else:
            bad = gradients.non_finite(grads, self._stages) or ["the sum of squares"]
            where = bad[0] if len(bad) == 1 else f"{bad[0]} and {len(bad) - 1} more"
            skipped = f"gradient norm is {grad_norm} (non-finite in {where})"
            if self._loss_scale is not None:
                skipped += f"; losses in float16 are now scaled by {self._loss_scale.value:g}"
        for parameter in self._named.values():
            parameter.grad = None
        return StepReport(grad_norm=grad_norm, lr=lr, skipped=skipped)

    def materialize_state(self) -> None:
        """Create the state of a parameter that has none, as it is before the first step; parameters stay as they are.

        The state comes into being with the first step otherwise, and its memory with it.
        """
        for part in self._parts:
            part.materialize()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a continuation needs: tensors `kind/parameter`, sharded as their parameters, and numbers.

        The set of names depends on model and configuration alone, not on the number of steps. Tensors are the
        live ones, except 8-bit moments, which are given as float copies: continue through `load_state`.
        """
        self.materialize_state()
        tensors = {name: part.readable(value) for name, part, value in self._entries()}
        scale = {} if self._loss_scale is None else self._loss_scale.state()
        return tensors, {"num_steps": self.num_steps, **scale}

    def load_state(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Continue from `state()` of an optimizer over the same parameters; load_sharded compares and distributes them.

        Args:
            tensors: sharded as those of this one's `state()`.
            numbers: those of `state()`.
        """
        self.materialize_state()
        with torch.no_grad():
            for name, _, value in self._entries():
                value.copy_(tensors[name].detach())
        self.num_steps = int(numbers["num_steps"])
        if self._loss_scale is not None:
            self._loss_scale.load_state(numbers)

    def memory(self) -> Iterator[Tensor]:
        """This rank's plain tensors in which the state lies, as far as it exists: to move it off the device."""
        for _, part, value in self._entries():
            yield from part.storage(value)

    def _entries(self) -> Iterator[tuple[str, Part, Tensor]]:
        """Every tensor of the state, as far as it exists: `kind/parameter`, the part that has it, and the tensor."""
        for name, parameter in self._named.items():
            for part in self._parts:
                for kind, value in part.optimizer.state.get(parameter, {}).items():
                    yield f"{kind}/{name}", part, value

    def _move(self, lr: float) -> None:
        for part in self._parts:
            for group in part.optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(lr)  # torchao compiles its step around this tensor
                else:
                    group["lr"] = lr
            part.optimizer.step()


def _make(
    named: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    embeddings: Collection[str],
    matrix_group: dist.ProcessGroup | None,
) -> list[Part]:
    """The optimizers that share the parameters."""
    if config.name == "adamw":
        return adamw_parts(named.values(), config)
    if config.name == "muon":
        return muon_parts(named, config, embeddings, matrix_group)
    return adamw_8bit_parts(named, config, embeddings)


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (from 0) out of `total_steps`.

    Linear warm-up reaches the peak after `warmup_steps`, or round(warmup_share * total_steps). Then, with a share of
    the decay that is left, from 1 to 0 at the last step: lr * (min_lr_ratio + (1 - min_lr_ratio) * share). linear and
    cosine (half a period) decay over all steps after the warm-up, from the peak at the first; wsd stays at the peak
    and decays over the last round(decay_share * total_steps) steps, every one of which is below the peak. After the
    last step the rate stays where it is.

    Raises:
        ValueError: a decaying schedule, or a warm-up as a share, without a known number of steps.

    Source: cosine: Loshchilov and Hutter 2017, arXiv:1608.03983. wsd: Hu et al. 2024, arXiv:2404.06395, with
        the linear decay of Haegele et al. 2024, arXiv:2405.18392.
    """
    if total_steps is None and (config.schedule != "constant" or config.warmup_share):
        asked = f"schedule is {config.schedule}" if config.schedule != "constant" else "warmup_share is set"
        raise ValueError(
            f"optim.{asked} for this role, which needs to know the number of optimizer steps; set a number of steps or "
            f"epochs, or use optim.schedule=constant and optim.warmup_steps"
        )
    warmup = config.warmup_steps or round(config.warmup_share * (total_steps or 0))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.schedule == "constant" or total_steps is None:
        return config.lr
    if config.schedule == "wsd":
        remaining = _wsd_left(config.decay_share, step, total_steps, warmup)
    else:
        progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
        remaining = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


def _wsd_left(decay_share: float, step: int, total_steps: int, warmup: int) -> float:
    # The decay is at least one step, and the warm-up keeps its own.
    num_decaying = max(1, min(round(decay_share * total_steps), total_steps - warmup))
    num_decayed = step - (total_steps - num_decaying) + 1
    return 1 - min(1.0, max(0.0, num_decayed / num_decaying))
