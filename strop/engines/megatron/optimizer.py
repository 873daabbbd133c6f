"""megatron-core's AdamW over the parameters of this rank, as the optimizer of an engine.

megatron-core adds gradients up over data-parallel ranks, over the norms of sequence-parallel ones and over both copies
of a shared embedding, and keeps moments and, for half precision, float32 weights: on every data-parallel rank all of
them, or (`engine.megatron.distributed_optimizer`) its share of each. The norm, clipping, learning rate and the refusal
of poisoned gradients are those of `strop.engines.optimizer`.

Concurrency: every method but `learning_rate` is a collective of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from strop.engines import gradients
from strop.engines.config import OptimizerConfig
from strop.engines.megatron.weight_map import Mapped
from strop.engines.optimizer import StepReport, learning_rate

WEIGHT = "weight"
"""Kind of the parameters themselves, in the precision in which the optimizer keeps them."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Kinds of AdamW's state."""


@dataclass(frozen=True)
class _Held:
    """A parameter in this rank's optimizer."""

    main: Tensor | None
    """The tensor that the optimizer moves, flat or of the parameter's shape; None where other ranks have all of it."""
    start: int
    """Place of its first number in the parameter, end to end."""
    group: dist.ProcessGroup | None
    """Ranks that hold the other parts; None where this one has all."""
    optimizer: torch.optim.Optimizer


class MegatronAdamW:
    """AdamW of megatron-core, and how far it has come."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        mapped: Sequence[Mapped],
        config: OptimizerConfig,
        *,
        total_steps: int | None,
        is_distributed: bool,
        names: Sequence[str],
    ) -> None:
        """Take all parameters of the model.

        Args:
            chunks: stages of this rank.
            mapped: their parameters.
            config: numbers of AdamW.
            total_steps: optimizer steps of the run, where the schedule needs to know.
            is_distributed: data-parallel ranks share moments and float32 weights out.
            names: of all weights of the model, which a poisoned gradient is reported by.
        """
        self.config = config
        self.total_steps = total_steps
        self.num_steps = 0
        """Steps that were taken. The schedule counts these: a skipped step does not move it."""
        self.adam_steps = 0.0
        """Steps that the moments have seen, those of an earlier run included."""
        self._chunks, self._mapped, self._names = list(chunks), list(mapped), list(names)
        shape = chunks[0].config
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            bf16=shape.bf16,
            params_dtype=shape.params_dtype,
            use_distributed_optimizer=is_distributed,
            clip_grad=0.0,  # clipped here
        )
        self._inner: Any = get_megatron_optimizer(settings, self._chunks, use_gloo_process_groups=False)
        self._held = dict(self._find_held())
        for held in self._held.values():
            if held.main is not None:
                state = held.optimizer.state[held.main]
                for kind in MOMENTS:
                    state[kind] = torch.zeros_like(held.main.detach())
                if isinstance(held.optimizer, torch.optim.AdamW):
                    state["step"] = torch.zeros((), dtype=torch.float32)
        self.clear()

    def step(self) -> StepReport:
        """Add the gradients up, clip them, take one step, clear them. A non-finite gradient is skipped and named."""
        lr = learning_rate(self.config, self.num_steps, self.total_steps)
        finalize_model_grads(self._chunks)
        self._inner.prepare_grads()
        norm = self._norm()
        skipped = ""
        if math.isfinite(norm):
            factor = self.config.max_grad_norm / (norm + 1e-6)  # torch's clipping adds as much
            if factor < 1:
                for part in self._inner.chained_optimizers:
                    grads = [p.grad for p in part.get_parameters() if p.grad is not None]
                    if grads:
                        torch._foreach_mul_(grads, factor)
            self._move(lr)
        else:
            skipped = f"gradient norm is {norm} (non-finite in {self._poisoned()})"
        self.clear()
        return StepReport(grad_norm=norm, lr=lr, skipped=skipped)

    def clear(self) -> None:
        """Set gradients to 0."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._inner.zero_grad()

    def whole(self, entry: Mapped, kind: str) -> Tensor:
        """Weight or moment of a parameter of this rank in its shape, joined from the data-parallel ranks that share it.

        All ranks ask for the same kinds of their parameters in order.
        """
        held = self._held[id(entry.parameter)]
        parameter = entry.parameter.detach()
        if kind == WEIGHT and parameter.dtype == torch.float32:  # every rank has all of it
            return parameter
        if held.group is None:
            assert held.main is not None, "nobody else has it"
            return self._part(held, kind).view(parameter.shape)
        joined = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if held.main is not None:
            joined[held.start : held.start + held.main.numel()] = self._part(held, kind)
        dist.all_reduce(
            joined.view(torch.int32), group=held.group
        )  # bits: one rank's beside zeros of the others
        return joined.view(parameter.shape)

    def reading(self, kind: str) -> Callable[[Mapped], Tensor]:
        """`whole` of this kind."""
        return lambda entry: self.whole(entry, kind)

    def put(self, entry: Mapped, kind: str, whole: Tensor) -> None:
        """Take over a weight or moment of a parameter's shape, or this rank's share of it; no collective."""
        held = self._held[id(entry.parameter)]
        if kind == WEIGHT:
            entry.parameter.detach().copy_(whole)
        if held.main is not None:
            part = self._part(held, kind)
            part.copy_(whole.reshape(-1)[held.start : held.start + held.main.numel()].view_as(part))

    def set_adam_steps(self, steps: float) -> None:
        """Number of steps that the moments have seen, which their bias correction depends on."""
        self.adam_steps = steps
        for held in self._held.values():
            if held.main is None:
                continue
            if isinstance(held.optimizer, torch.optim.AdamW):
                held.optimizer.state[held.main]["step"].fill_(steps)
            else:  # of Transformer Engine and apex, which count in the group
                for group in held.optimizer.param_groups:
                    group["step"] = int(steps)

    def memory(self) -> Iterator[Tensor]:
        """This rank's tensors of the state, to move it off the device."""
        for held in self._held.values():
            if held.main is not None:
                yield from (self._part(held, kind) for kind in MOMENTS)

    @staticmethod
    def _part(held: _Held, kind: str) -> Tensor:
        assert held.main is not None, "this rank has a part"
        part: Tensor = held.main.detach() if kind == WEIGHT else held.optimizer.state[held.main][kind]
        return part

    def _find_held(self) -> Iterator[tuple[int, _Held]]:
        parameters = {id(entry.parameter): entry.parameter for entry in self._mapped}
        for part in self._inner.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                for parameter in (parameter for buffer in part.buffers for parameter in buffer.params):
                    yield id(parameter), _share(part, parameter)
                continue
            for group in part.param_groups:
                for main in group["params"]:
                    if id(main) in parameters:
                        yield id(main), _Held(main, 0, None, part.optimizer)
            for parameter in parameters.values():  # of half precision, with a float32 copy
                main = getattr(parameter, "main_param", None)
                if main is not None and any(main is p for p in part.get_parameters()):
                    yield id(parameter), _Held(main, 0, None, part.optimizer)

    def _norm(self) -> float:
        """L2 norm of the whole gradient, each number once, in float64."""
        total = 0.0
        for part in self._inner.chained_optimizers:
            grads = part.get_main_grads_for_grad_norm()
            squares = gradients.sum_of_squares(grads).to(self._mapped[0].parameter.device)
            dist.all_reduce(squares, group=part.get_grad_stats_parallel_group())
            total += float(squares)
        return math.sqrt(total)

    def _move(self, lr: float) -> None:
        for group in self._inner.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]
        self._inner.step_with_ready_grads()
        self.num_steps += 1
        self.adam_steps += 1

    def _poisoned(self) -> str:
        """Names of the weights with a non-finite gradient on any rank."""
        here = {
            piece.name
            for entry in self._mapped
            if not bool(torch.isfinite(entry.parameter.main_grad).all())  # type: ignore[attr-defined]
            for piece in entry.pieces
        }
        flags = torch.tensor([name in here for name in self._names], dtype=torch.int32)
        flags = flags.to(self._mapped[0].parameter.device)
        dist.all_reduce(flags)
        bad = [name for name, flag in zip(self._names, flags.tolist(), strict=True) if flag]
        bad = bad or ["the sum of squares"]
        return bad[0] if len(bad) == 1 else f"{bad[0]} and {len(bad) - 1} more"


def _share(part: Any, parameter: nn.Parameter) -> _Held:
    """This rank's share of a parameter in a distributed optimizer."""
    index = part.model_param_group_index_map.get(parameter)
    if index is None:
        return _Held(None, 0, part.data_parallel_group, part.optimizer)
    group, order = index
    main = part.optimizer.param_groups[group]["params"][order]
    start = part._get_model_param_range_map(parameter)["param"].start
    return _Held(main, start, part.data_parallel_group, part.optimizer)
