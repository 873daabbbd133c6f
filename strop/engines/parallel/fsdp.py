"""A model's parameters sharded over ranks with FSDP2, and gathered for generation.

Each decoder layer is a unit that is gathered before its forward pass and freed after it; embeddings, final norm
and head form the root's unit. While a layer computes the next one is gathered, in forward passes as soon as its own
parameters are there: a host that is only just ahead of the device does not keep the network idle. So two layers are
gathered at a time, as strop plan counts. Gradients are added up over ranks, never averaged: a loss is a sum of
weighted terms of tokens (algorithms/aggregation.py), so the sum over ranks is the gradient of the whole batch.

The experts of a layer are a unit inside of the layer's where they have ranks of their own (expert or tensor
parallelism, experts.py).

Concurrency: sharding, forward and backward passes and `full_parameters` are collectives: every rank calls them
in the same order. Inside `full_parameters` forward passes talk to the ranks of one copy of the model alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from strop.engines.causal_lm import HALF, CausalLM
from strop.engines.config import EngineConfig
from strop.engines.gradients import local
from strop.engines.parallel.experts import ExpertParallel
from strop.engines.parallel.model_axes import check_model_axes
from strop.engines.parallel.pipeline import Pipeline
from strop.engines.parallel.ranks import Parallel
from strop.engines.parallel.tensor import TensorParallel

T = TypeVar("T")


class _Root(nn.Module):
    """Runs a function as its forward pass."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], T]) -> T:
        return function()


def shard(model: CausalLM, parallel: Parallel, config: EngineConfig) -> None:
    """Shard the parameters over the mesh, layer by layer.

    A layer goes to the device, and all but this rank's share of it is freed, before the next one does.
    Parameters become DTensors under the same names.

    Raises:
        ValueError: the model is sharded already, its layers are in an unknown place, or it cannot be divided as the
            ranks are.
    """
    if model.is_sharded:
        raise ValueError("the model is sharded already; load it again for another engine")
    check_model_axes(model.config, config, parallel.world_size, module=model.module)
    if parallel.pp_groups is not None:
        model.pipeline = Pipeline(model.module, parallel, config)
    if parallel.expert_mesh is not None:
        model.expert_parallel = ExpertParallel(model.module, parallel.expert_mesh)
    if parallel.tp_mesh is not None:
        model.tensor_parallel = TensorParallel(model.module, parallel.tp_mesh)
    precision, placement = MixedPrecisionPolicy(), OffloadPolicy()
    if model.compute_dtype in HALF:
        precision = MixedPrecisionPolicy(param_dtype=model.compute_dtype, reduce_dtype=torch.float32)
    if config.offload == "all":
        placement = CPUOffloadPolicy(pin_memory=parallel.device.type != "cpu")
    if model.expert_parallel is not None:
        _shard_experts(model.expert_parallel, config, precision, placement)
    root = _Root(model.module)
    of_others = {parameter for _, parameter in model.named_parameters() if parameter.is_meta}
    for part, reshard_after_forward in [
        *((layer, config.reshard_after_forward) for layer in _own_layers(model)),
        (root, False),  # its backward pass comes first, so it would be gathered again at once
    ]:
        fully_shard(
            part,
            mesh=parallel.mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=precision,
            offload_policy=placement,
            ignored_params=of_others,
        )
    model.root = root
    if _is_divided_in_generation(model):
        model.copy_group = parallel.copy_group
    elif model.tensor_parallel is not None:
        model.copy_group = model.tensor_parallel.group
    if model.pipeline is not None:
        model.pipeline.find_shared(model.module)
    for unit in sharded_units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    _gather_ahead(model)
    model.device = parallel.device
    model.run(lambda: None)  # the first pass through the root tells the units which one it is
    reshard(model)


def _own_layers(model: CausalLM) -> list[nn.Module]:
    """Layers that this rank has, in order."""
    return [layer for stage in _own_stages(model) for layer in stage]


def _own_stages(model: CausalLM) -> list[list[nn.Module]]:
    """Runs of layers that this rank passes one after the other."""
    pipeline = model.pipeline
    if pipeline is None:
        return [model.layers]
    return [pipeline.own_layers(chunk) for chunk in range(pipeline.num_chunks)]


def _gather_ahead(model: CausalLM) -> None:
    """Let the forward pass of each layer of a run gather its experts and the next layer; backward, FSDP2 does so by
    itself.

    The root gathers none ahead: it also has passes in which no layer runs, and a layer that is gathered then would be
    there with its weights of now in a later step. Nor do experts: where the backward pass computes a layer again, the
    hooks of their unit may run once more, and the next layer is over by then.
    """
    for layers in _own_stages(model):
        units = [[part for part in layer.modules() if isinstance(part, FSDPModule)] for layer in layers]
        for (unit, *experts), following in zip(units, [*units[1:], []], strict=True):
            unit.set_modules_to_forward_prefetch([*experts, *following[:1]])


def _shard_experts(
    experts: ExpertParallel, config: EngineConfig, precision: MixedPrecisionPolicy, placement: OffloadPolicy
) -> None:
    """Shard the experts of each layer over the ranks that hold the same ones."""
    for layer in experts.layers:
        fully_shard(
            layer.experts,
            mesh=experts.shard_mesh,
            reshard_after_forward=config.reshard_after_forward,
            shard_placement_fn=experts.placement,
            # weights of experts stay exact
            mp_policy=dataclasses.replace(precision, cast_forward_inputs=False),
            offload_policy=placement,
        )


def sharded_units(model: CausalLM) -> list[FSDPModule]:
    """The units that are gathered together, root first."""
    assert model.root is not None, "the model is sharded"
    return [part for part in model.root.modules() if isinstance(part, FSDPModule)]


def reshard(model: CausalLM) -> None:
    """Free what a forward pass without a backward pass left gathered; `named_parameters` gives the shards again."""
    for unit in sharded_units(model):
        unit.reshard()


def sync_gradients(model: CausalLM, *, is_last: bool, every_pass: bool, keep_parameters: bool) -> None:
    """Set whether the next backward pass adds the gradients of all ranks up.

    Args:
        model: the model.
        is_last: the backward pass is the last one of this accumulation.
        every_pass: add up after every backward pass.
        keep_parameters: leave parameters gathered for the next forward pass where there is one.
    """
    root = sharded_units(model)[0]
    root.set_requires_gradient_sync(every_pass or is_last)
    root.set_reshard_after_backward(is_last or not keep_parameters)


def reduce_gradients(model: CausalLM) -> None:
    """Add up over the ranks what was accumulated since the last backward pass, as `sync_gradients` says.

    In a backward pass of nothing: FSDP2 does it at the end of one for all units that were not part of it.
    """
    nothing = torch.zeros((), device=model.device, requires_grad=True)
    model.run(lambda: nothing).backward()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def full_parameters(model: CausalLM) -> Iterator[None]:
    """Every parameter gathered over the data-parallel ranks, in the compute precision; for generation, without
    gradients.

    Inside, copies of the model run different numbers of forward passes: none of them communicates but between the
    ranks that hold the parts of one copy (stages, matrices, experts; `CausalLM.copy_group`), which stay divided. It
    costs the memory of one copy of what a rank computes with, in the compute precision, which is freed at the end;
    nothing where that is what it holds already. With stages every rank has the head as well.
    """
    units = sharded_units(model)
    for unit in [unit for unit in units if not _computes_with_what_it_holds(model, unit)]:
        unit.unshard()
    try:
        with _hooks_lifted(units), _experts(model), _stages(model):
            yield
    finally:
        reshard(model)


def _computes_with_what_it_holds(model: CausalLM, unit: FSDPModule) -> bool:
    """Each shard is this rank's whole part of a matrix that is cut over tensor-parallel ranks alone, or of experts that
    are divided over ranks alone, where it computes and in the precision of its products: gathering would copy it."""
    parameter = next(p for p in model.module.parameters() if not p.is_meta)
    is_elsewhere = local(parameter).device.type != model.device.type  # engine.offload=all
    if model.compute_dtype in HALF or is_elsewhere:
        return False
    experts = model.expert_parallel
    if experts is not None and any(unit is layer.experts for layer in experts.layers):
        return experts.shard_mesh.size() == 1 and _is_divided_in_generation(model)
    if model.tensor_parallel is None:
        return False
    assert isinstance(parameter, DTensor), "the model is sharded"
    mesh = parameter.device_mesh
    assert mesh.mesh_dim_names is not None, "meshes of ranks have names"
    return mesh.size(mesh.mesh_dim_names.index("shard")) == 1


def _stages(model: CausalLM) -> contextlib.AbstractContextManager[None]:
    """Stages that generate together, or the parameters of all of them; inside `full_parameters`."""
    if model.pipeline is None:
        return contextlib.nullcontext()
    dtype = model.compute_dtype if model.compute_dtype in HALF else None
    return model.pipeline.generating(model.module, dtype, is_whole=not _is_divided_in_generation(model))


def _experts(model: CausalLM) -> contextlib.AbstractContextManager[None]:
    """Experts whose ranks generate together, or those of all ranks; inside `full_parameters`."""
    if model.expert_parallel is None:
        return contextlib.nullcontext()
    if not _is_divided_in_generation(model):
        return model.expert_parallel.whole_parameters()
    return model.expert_parallel.with_equal_tokens(model.tensor_parallel is None)


def _is_divided_in_generation(model: CausalLM) -> bool:
    """Stages and experts stay where they are while the ranks of a copy generate. Images are known to one rank alone,
    and states of layers (linear attention) are not divided into stages."""
    return model.media is None and (model.pipeline is None or model.recurrence is None)


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
        for hooks, saved in lifted:
            hooks.update(saved)
