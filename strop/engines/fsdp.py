"""A model's parameters sharded over ranks with FSDP2, gathered for generation, and moved off the device.

Each decoder layer is a unit that is gathered before its forward pass and freed after it; embeddings, final norm
and head form the root's unit. Gradients are added up over ranks, never averaged: a loss is a sum of weighted
terms of tokens (algorithms/aggregation.py), so the sum over ranks is the gradient of the whole batch.

Concurrency: sharding, forward and backward passes and `full_parameters` are collectives: every rank calls them
in the same order. Inside `full_parameters` forward passes talk to nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from strop.engines.causal_lm import HALF, CausalLM
from strop.engines.config import EngineConfig
from strop.engines.gradients import local
from strop.engines.optimizer import Optimizer
from strop.engines.parallel import Parallel
from strop.engines.tokens import sequence_parallelism


def shard(model: CausalLM, parallel: Parallel, config: EngineConfig) -> None:
    """Shard the parameters over the mesh, layer by layer; nothing when alone.

    A layer goes to the device, and all but this rank's share of it is freed, before the next one does.
    Parameters become DTensors under the same names.

    Raises:
        ValueError: the model is sharded already, its layers are in an unknown place, or its sequences cannot be
            divided over parallel.sp_size ranks.
    """
    if parallel.mesh is None:
        return
    if model.is_sharded:
        raise ValueError("the model is sharded already; load it again for another engine")
    if parallel.sp_size > 1:
        sequence_parallelism().check_sequence_parallel(model.config, parallel.sp_size, parallel.world_size)
    precision, placement = MixedPrecisionPolicy(), OffloadPolicy()
    if model.compute_dtype in HALF:
        precision = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    if config.offload == "all":
        placement = CPUOffloadPolicy(pin_memory=parallel.device.type != "cpu")
    for part, reshard_after_forward in [
        *((layer, config.reshard_after_forward) for layer in model.layers),
        (model.root, False),  # its backward pass comes first, so it would be gathered again at once
    ]:
        fully_shard(
            part,
            mesh=parallel.mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=precision,
            offload_policy=placement,
        )
    for unit in sharded_units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    model.is_sharded = True
    model.device = parallel.device
    model.run(lambda: None)  # the first pass through the root tells the units which one it is
    reshard(model)


def sharded_units(model: CausalLM) -> list[FSDPModule]:
    """The units that are gathered together, root first; none of a model that is not sharded."""
    return [part for part in model.root.modules() if isinstance(part, FSDPModule)]


def reshard(model: CausalLM) -> None:
    """Free what a forward pass without a backward pass left gathered; `named_parameters` gives the shards again."""
    for unit in sharded_units(model):
        unit.reshard()


def sync_gradients(model: CausalLM, *, is_last: bool, each: bool, keep_parameters: bool) -> None:
    """Whether the next backward pass adds the gradients of all ranks up.

    Args:
        model: the model.
        is_last: the backward pass is the last one of this accumulation.
        each: add up after every backward pass.
        keep_parameters: leave parameters gathered for the next forward pass where there is one.
    """
    if model.is_sharded:
        root = model.root
        assert isinstance(root, FSDPModule), "a sharded model's root is a unit"
        root.set_requires_gradient_sync(each or is_last)
        root.set_reshard_after_backward(is_last or not keep_parameters)


@contextlib.contextmanager
def full_parameters(model: CausalLM) -> Iterator[None]:
    """Every parameter gathered on every rank, in the compute precision; for generation, without gradients.

    Inside, ranks run different numbers of forward passes: none of them communicates. It costs the memory of one
    copy in the compute precision, which is freed at the end. Nothing when the model is not sharded.
    """
    units = sharded_units(model)
    for unit in units:
        unit.unshard()
    try:
        with _hooks_lifted(units):
            yield
    finally:
        reshard(model)


@contextlib.contextmanager
def _hooks_lifted(units: list[FSDPModule]) -> Iterator[None]:
    """Forward passes of the units without the hooks that gather and free: their records grow with every pass."""
    lifted = []
    for unit in units:
        assert isinstance(unit, torch.nn.Module), "a unit is a module"
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
            lifted.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, held in lifted:
            hooks.update(held)


class HostCopies:
    """Tensors whose memory is on the host for a while; the tensor objects stay the same and must not be used."""

    def __init__(self) -> None:
        self._held: list[tuple[UntypedStorage, Tensor]] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are on the host."""
        return sum(host.numel() for _, host in self._held)

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Copy these tensors' memory to the host and free it where it was."""
        for tensor in tensors:
            storage = local(tensor).untyped_storage()
            if storage.nbytes() > 0:  # else empty, or another tensor's memory too
                pinned = storage.device.type != "cpu"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                host.copy_(_bytes_of(storage))
                self._held.append((storage, host))
                storage.resize_(0)

    def restore(self) -> None:
        """Put everything back where it was."""
        for storage, host in self._held:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host)
        self._held.clear()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def offload(model: CausalLM) -> HostCopies:
    """Move a model's parameters and gradients to host memory; `restore` brings them back.

    On a CPU nothing moves: it is host memory already.
    """
    parameters = [parameter for _, parameter in model.named_parameters()]
    copies = HostCopies()
    copies.put(_on_device(p.detach() for p in parameters))
    copies.put(_on_device(p.grad for p in parameters if p.grad is not None))
    if model.device.type != "cpu":
        torch.accelerator.empty_cache()  # another process may use the memory
    return copies


def offload_optimizer(optimizer: Optimizer) -> HostCopies:
    """Move the optimizer state alone to host memory; nothing on a CPU."""
    copies = HostCopies()
    copies.put(_on_device(optimizer.memory()))
    return copies


def _on_device(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those that are not in host memory."""
    return (tensor for tensor in tensors if tensor.device.type != "cpu")


@contextlib.contextmanager
def activations_on_host(model: CausalLM, *, enabled: bool) -> Iterator[None]:
    """What the forward pass keeps for the backward pass lies in host memory; parameters stay where they are."""
    if not enabled:
        yield
        return
    pinned = model.device.type != "cpu"

    def pack(tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
        base = tensor if tensor._base is None else tensor._base
        # Sharding frees and gathers parameters itself; a copy would keep them.
        if isinstance(base, torch.nn.Parameter) or tensor.device.type != model.device.type:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        host.copy_(tensor, non_blocking=pinned)
        return tensor.device, host

    def unpack(packed: tuple[torch.device, Tensor] | Tensor) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host = packed
        return host.to(device, non_blocking=pinned)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
