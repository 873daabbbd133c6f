"""AdamW, the learning-rate schedule, gradient clipping, and the refusal of poisoned gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from strop.engines.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int | None) -> float:
    """Learning rate of optimizer step `step` (from 0) out of `total_steps`.

    Linear warm-up reaches the peak after `warmup_steps`; then constant, linear or half-cosine decay to
    min_lr_ratio * lr at the last step.

    Raises:
        ValueError: a decaying schedule without a known number of steps.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    if total_steps is None:
        raise ValueError(
            f"optim.schedule is {config.schedule}, which needs to know the number of optimizer steps; "
            f"set a number of steps or epochs, or use schedule=constant"
        )
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    decay = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * decay)


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one optimizer step did."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    skipped: str = ""
    """Why no step was taken; empty when it was."""


class Optimizer:
    """AdamW over named parameters. State moves in and out as plain named tensors and numbers."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        *,
        total_steps: int | None,
    ) -> None:
        self.config = config
        self.total_steps = total_steps
        self.num_steps = 0
        self._named = {name: p for name, p in parameters if p.requires_grad}
        decayed = [p for p in self._named.values() if p.dim() >= 2]
        plain = [p for p in self._named.values() if p.dim() < 2]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )

    def step(self) -> StepReport:
        """Clip the gradients, take one step, clear them. A non-finite gradient is skipped and named."""
        lr = learning_rate(self.config, self.num_steps, self.total_steps)
        gradients = [p.grad for p in self._named.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        grad_norm = float(norm)
        skipped = ""
        if math.isfinite(grad_norm):
            torch.nn.utils.clip_grads_with_norm_(list(self._named.values()), self.config.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        else:
            bad = [
                name
                for name, p in self._named.items()
                if p.grad is not None and not bool(torch.isfinite(p.grad).all())
            ]
            where = (
                f"{bad[0]} and {len(bad) - 1} more"
                if len(bad) > 1
                else bad[0]
                if bad
                else "the sum of squares"
            )
            skipped = f"gradient norm is {grad_norm} (non-finite in {where})"
        self.num_steps += 1
        self._adamw.zero_grad(set_to_none=True)
        return StepReport(grad_norm=grad_norm, lr=lr, skipped=skipped)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything a continuation needs: tensors by name, and numbers. The tensors are the live ones."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._named.items():
            for key, value in self._adamw.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value.detach()
        return tensors, {"num_steps": self.num_steps}

    def load_state(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Continue from `state()` of an optimizer over the same parameters.

        Raises:
            ValueError: a tensor belongs to no parameter, or has another shape.
        """
        for key, value in tensors.items():
            kind, _, name = key.partition("/")
            parameter = self._named.get(name)
            if parameter is None or (value.dim() > 0 and value.shape != parameter.shape):
                raise ValueError(
                    f"optimizer state {key!r} of shape {tuple(value.shape)} fits no parameter of this model; "
                    f"the checkpoint belongs to another model"
                )
            # Also the step count: the fused update reads it on the parameter's device.
            self._adamw.state[parameter][kind] = value.to(parameter.device).clone()
        self.num_steps = int(numbers["num_steps"])
