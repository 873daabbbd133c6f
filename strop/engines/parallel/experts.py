"""Expert parallelism: whole experts on different ranks, and tokens that travel to them.

Each of the R ranks of an expert-parallel group holds E / R whole experts of every layer, and computes its own tokens
everywhere else. A layer's router chooses on the rank of a token; then

    tokens, once per chosen expert  --all-to-all-->  experts of a rank  --all-to-all-->  back, weighted and added up

No token is dropped: a rank is told how many come from each of the others, and takes as many as there are. The group
is made of the ranks that rows and sequences are divided over, those that share a matrix included, since between its
regions each has tokens of its own: so it takes no further ranks. What is left of the experts is sharded with FSDP2 over
the ranks that hold the same ones.

Gradients: each exchange sends the gradient back the way its rows came, so an expert has the sum over the tokens of all
ranks of its group, and FSDP2 adds up over the groups.

Concurrency: three exchanges per layer (counts, tokens, results) and two in its backward pass, on every rank of the
group in the same order, also on one without a token or with experts that nobody chose. Recomputing a layer repeats its
exchanges on all ranks alike. The counts are waited for on the host.

Sources: Lepikhin et al. 2020, arXiv:2006.16668, section 3.2 (experts over devices, all-to-all); Gale et al. 2022,
arXiv:2211.15841 (without dropped tokens). Exercised on gloo with CPU tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from strop.engines.config import EngineConfig
from strop.engines.moe.layers import MoELayer, moe_layers, num_experts
from strop.engines.multimodal.inputs import language_model_class
from strop.engines.parallel.axes import without_adapted_experts
from strop.engines.parallel.ranks import exchanged
from strop.engines.parallel.ulysses import exchange_rows


def check_expert_parallel(
    config: Any, ep_size: int, *, section: str = "engine", module: nn.Module | None = None
) -> None:
    """Refuse a model whose experts cannot be divided over the ranks.

    Args:
        config: the model's configuration as transformers reads it.
        ep_size: engine.expert_parallel, ranks of a group.
        section: what the sentence calls the settings, such as critic.engine.
        module: the model, where it is loaded.

    Raises:
        ValueError: the model has no experts, not in the form that can be divided, or a number that does not divide.
    """
    if ep_size == 1:
        return
    key, text = f"{section}.expert_parallel", config.get_text_config()
    if not num_experts(config):
        raise ValueError(
            f"{key} is {ep_size}, but {text.model_type} is a dense model, without experts: use {key}=1"
        )
    layers = moe_layers(_without_weights(config) if module is None else module)
    if not layers:
        raise ValueError(
            f"{key} is {ep_size}, but the experts of {text.model_type} are not parameters of one matrix per expert "
            f"that are told which tokens are theirs, so they cannot be divided; use {key}=1"
        )
    counts = {layer.num_experts for layer in layers}
    for count in sorted(counts):
        if count % ep_size:
            sizes = [size for size in range(1, min(counts) + 1) if not any(n % size for n in counts)]
            raise ValueError(
                f"{key} is {ep_size}, but the {count} experts of a layer of the model do not divide over {ep_size} "
                f"ranks; use one of {', '.join(map(str, sizes))}"
            )


def check_adapted_experts(module: nn.Module, engine: EngineConfig, *, section: str = "engine") -> None:
    """Refuse adapters of experts where these are divided, or sharded apart from the layers that they are in.

    Args:
        module: the model, with its adapter.
        engine: of the role.
        section: as of `check_expert_parallel`.

    Raises:
        ValueError: there are such adapters.
    """
    adapted = [name for name, part in module.named_modules() if hasattr(part, "parameter_name")]  # PEFT's
    for key, (value, needed) in without_adapted_experts(engine).items():
        if value != needed and adapted:
            raise ValueError(
                f"{section}.{key} is {value}, but the adapter changes the experts {adapted[0]}, which do not go with "
                f"it: use layers other than experts, or {section}.{key}={needed}"
            )


def _without_weights(config: Any) -> nn.Module:
    """The language model of a configuration on the meta device; an empty one for a class that comes with its folder."""
    auto_class = language_model_class(config)
    if type(config) not in auto_class._model_mapping:
        return nn.Module()
    with torch.device("meta"):
        module: nn.Module = auto_class.from_config(config)
        return module


class ExpertParallel:
    """The experts of a model over the ranks of an expert-parallel group."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Cut the experts' parameters, and have tokens travel to them.

        Args:
            module: of transformers, whole, with its experts on every rank; with more than one rank of a group the
                parameters of the experts become DTensors over the group under the same names.
            mesh: [expert_shard, ep].
        """
        self.shard_mesh: DeviceMesh = mesh["expert_shard"]
        """The ranks that hold the same experts."""
        self._mesh: DeviceMesh = mesh["ep"]
        self._group: dist.ProcessGroup = self._mesh.get_group()
        self._size, self._rank = self._mesh.size(), self._mesh.get_local_rank()
        self._is_on, self._are_equal = True, False
        self.layers = [layer for layer in moe_layers(module) if not next(layer.experts.parameters()).is_meta]
        """The layers with experts of this rank's stage; none of a dense model."""
        self._num_experts = {id(layer.experts): layer.num_experts for layer in self.layers}
        if self._size > 1:
            for layer in self.layers:
                self._divide(layer)

    def placement(self, parameter: nn.Parameter) -> Shard:
        """Axis over which a parameter of experts is sharded between the ranks that hold the same ones: whole experts
        where there are enough of them."""
        num_ranks, here = self.shard_mesh.size(), parameter.shape[0] // self._size
        return Shard(1) if here % num_ranks and not parameter.shape[1] % num_ranks else Shard(0)

    @contextlib.contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Every expert on every rank, as plain tensors; forward passes inside talk to nobody."""
        own = [dict(layer.experts.named_parameters(recurse=False)) for layer in self.layers]
        for layer, parameters in zip(self.layers, own, strict=True):
            for name, parameter in parameters.items():
                if isinstance(parameter, DTensor):
                    whole = nn.Parameter(parameter.full_tensor(), requires_grad=False)
                    layer.experts._parameters[name] = whole
        self._switch(is_on=False)
        try:
            yield
        finally:
            self._switch(is_on=True)
            for layer, parameters in zip(self.layers, own, strict=True):
                layer.experts._parameters.update(parameters)

    @contextlib.contextmanager
    def with_equal_tokens(self, are_equal: bool) -> Iterator[None]:
        """Forward passes inside, without gradients, are of the same tokens on every rank of the group, if they are."""
        self._are_equal = are_equal
        try:
            yield
        finally:
            self._are_equal = False

    def _switch(self, *, is_on: bool) -> None:
        self._is_on = is_on
        for layer in self.layers:
            count = self._num_experts[id(layer.experts)]
            layer.experts.num_experts = count // self._size if is_on else count

    def _divide(self, layer: MoELayer) -> None:
        experts, here = layer.experts, layer.num_experts // self._size
        for name, parameter in list(experts.named_parameters(recurse=False)):
            whole = parameter.detach()
            tensor = DTensor.from_local(
                whole.narrow(0, self._rank * here, here).clone(),
                self._mesh,
                [Shard(0)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            experts.register_parameter(name, nn.Parameter(tensor, requires_grad=parameter.requires_grad))
        experts.num_experts = here
        experts.forward = partial(self._forward, experts, experts.forward)

    def _forward(
        self, experts: Any, compute: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """As of the experts: [N, D] of hidden states [N, D], for indices [N, k] among all experts and weights [N, k].

        Args:
            experts: with this rank's parameters.
            compute: their own forward pass.
            hidden, top_k_index, top_k_weights: of this rank's tokens.
        """
        if not self._is_on:
            result: Tensor = compute(hidden, top_k_index, top_k_weights)
            return result
        if self._are_equal:
            return self._added_up(experts, compute, hidden, top_k_index, top_k_weights)
        rows, k = hidden.reshape(-1, hidden.shape[-1]), top_k_index.shape[-1]
        chosen = top_k_index.reshape(-1)  # [N k]
        order = chosen.argsort(stable=True)
        here: int = experts.num_experts
        counts = torch.bincount(chosen, minlength=here * self._size).view(self._size, here)
        of_ranks = exchanged(counts, [1] * self._size, [1] * self._size, self._group)  # [R, E / R]
        send, receive = torch.stack([counts.sum(1), of_ranks.sum(1)]).tolist()
        arrived = exchange_rows(rows[order // k], send, receive, self._group)
        index = torch.arange(here, device=chosen.device).repeat(self._size)
        index = index.repeat_interleave(of_ranks.reshape(-1))
        with _local_parameters(experts):
            computed = _computed(compute, arrived, index)
        returned = exchange_rows(computed, receive, send, self._group)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        weights = top_k_weights.reshape(*hidden.shape[:-1], k, 1)
        weighted = returned[place].view(*weights.shape[:-1], -1) * weights
        return weighted.sum(-2).to(hidden.dtype)

    def _added_up(
        self, experts: Any, compute: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> Tensor:
        """As `_forward`, of tokens that every rank of the group has: each computes with its experts, and all add up."""
        rows, here = hidden.reshape(-1, hidden.shape[-1]), int(experts.num_experts)
        index = top_k_index.reshape(len(rows), -1) - self._rank * here
        token, choice = ((index >= 0) & (index < here)).nonzero(as_tuple=True)
        with _local_parameters(experts):
            computed = _computed(compute, rows[token], index[token, choice])
        weighted = computed * top_k_weights.reshape(len(rows), -1)[token, choice][:, None]
        added = weighted.new_zeros(rows.shape).index_add_(0, token, weighted)
        dist.all_reduce(added, group=self._group)
        return added.to(hidden.dtype).view(hidden.shape)


def _computed(compute: Any, rows: Tensor, index: Tensor) -> Tensor:
    """Output [n, D] of the expert with this index [n] for each row [n, D], also of none.

    A row of zeros goes along: the experts' parameters take part in the backward pass of every rank, which FSDP2 counts
    on.
    """
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    indices = torch.cat([index, index.new_zeros(1)])[:, None]
    output: Tensor = compute(padded, indices, padded.new_ones(len(padded), 1))
    return output[:-1]


@contextlib.contextmanager
def _local_parameters(experts: nn.Module) -> Iterator[None]:
    """Let the experts' own forward pass find this rank's parameters under their names."""
    for name, parameter in experts.named_parameters(recurse=False):
        experts.__dict__[name] = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    try:
        yield
    finally:
        for name, _ in experts.named_parameters(recurse=False):
            experts.__dict__.pop(name, None)
