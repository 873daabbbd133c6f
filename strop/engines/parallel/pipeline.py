"""Pipeline stages of a model: each rank holds some of its layers, and hands hidden states on to the next.

The first stage has the embedding, the last one the final norm and the head; a head that is the embedding is on both,
and its gradients are added up. Parameters of other stages stay in the module under their names, without memory (on the
meta device), so that names, shapes and order of the weights are the same on every rank. A forward pass of a stage runs
the model's own forward with the layers of this stage alone, from hidden states in place of embeddings.

Concurrency: `hidden`, `generating`, `whole`, `of_all_stages`, `of_layers` and `add_shared_gradients` are collectives of
the ranks that run the stages for the same rows, called by all of them in the same order.

Source: Huang et al. 2019, arXiv:1811.06965; the order of passes is in schedule.py. Exercised on gloo with CPU tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.engines.attention_form import AttentionContext, AttentionForm
from strop.engines.config import EngineConfig
from strop.engines.gradients import full, local
from strop.engines.parallel.ranks import Parallel, gather_json
from strop.engines.parallel.stages import stage_layers
from strop.engines.parallel.weight_gradients import WeightGradients
from strop.engines.weights import hugging_face_name

T = TypeVar("T")


class Pipeline:
    """A model's layers over the stages of a pipeline."""

    def __init__(self, module: nn.Module, parallel: Parallel, engine: EngineConfig) -> None:
        """Keep this rank's stages of a model; parameters of the others lose their memory.

        Args:
            module: of transformers, whole, with parameters in host memory.
            parallel: with a pipeline's group.
            engine: says how layers are divided.

        Raises:
            ValueError: the model has parameters outside of embedding, layers, norm and head, or computes something
                between them.
        """
        assert parallel.pp_groups is not None, "there are several stages"
        self.num_ranks, self.rank, self.num_chunks = (
            parallel.pp_size,
            parallel.pp_rank,
            engine.pipeline_chunks,
        )
        self._groups = parallel.pp_groups
        self.group = self._groups[0]
        self.ranks = dist.get_process_group_ranks(self.group)
        """Number of each rank of the pipeline among all."""
        self.device = parallel.device
        self._decoder = cast(Any, module.base_model)
        (self._embedding_name, self._layers_name, self._norm_name) = self._decoder.config.base_model_pp_plan
        self._layers: nn.ModuleList = self._decoder._modules[self._layers_name]
        self._norm: nn.Module = self._decoder._modules[self._norm_name]
        self._placeholders = nn.ModuleList(_Skip() for _ in self._layers)
        num_stages = self.num_ranks * self.num_chunks
        self._stages = stage_layers(len(self._layers), num_stages, engine.pipeline_layers)
        with self._swapped(self._placeholders, nn.Identity()):
            self._check_passes_on(module)
        self.owners: dict[str, int] = {}
        """Rank of the pipeline that speaks for each weight, by all of its names, with and without those of adapters."""
        self.shared: nn.Parameter | None = None
        """Embedding that is the head as well and is trained, of a rank that has one of them and not both; set by
        `find_shared`."""
        self._shared_name = ""
        self._has_every_head = self.is_whole = False
        self._drop_others(module)
        self.weight_gradients: WeightGradients | None = None
        """With engine.pipeline_schedule=zero_bubble: what the backward passes of this rank's layers leave out."""
        if engine.pipeline_schedule == "zero_bubble":
            self.weight_gradients = WeightGradients(self.own_layers(0))
        _PIPELINES[module] = self

    @property
    def has_head(self) -> bool:
        """The head is here: of the last stage, and on every rank inside `generating`."""
        return self._has_every_head or self.rank == self.num_ranks - 1

    @property
    def num_own_layers(self) -> int:
        """Layers of this rank, of all of its stages."""
        return sum(len(self.own_layers(chunk)) for chunk in range(self.num_chunks))

    @property
    def counted_elsewhere(self) -> tuple[str, ...]:
        """Parameters of this rank that another one counts."""
        return (self._shared_name,) if self._shared_name and self.rank else ()

    def link(self, sender: int, *, is_forward: bool) -> dist.ProcessGroup:
        """The group over which a rank hands hidden states on, or gradients back. A device takes the messages of a group
        between two ranks in their order, and one that waits in either direction would hold up the other's."""
        way = 0 if is_forward else 1
        return self._groups[way + 2 * sender if len(self._groups) == 4 else way]

    @contextlib.contextmanager
    def chunk(self, number: int) -> Iterator[None]:
        """Forward passes inside run one of this rank's stages."""
        stage = number * self.num_ranks + self.rank
        layers = [
            layer if index in self._stages[stage] else self._placeholders[index]
            for index, layer in enumerate(self._layers)
        ]
        is_last = stage == len(self._stages) - 1
        with self._swapped(nn.ModuleList(layers), self._norm if is_last else nn.Identity()):
            yield

    def own_layers(self, chunk: int) -> list[nn.Module]:
        """Layers of one of this rank's stages."""
        return [self._layers[index] for index in self._stages[chunk * self.num_ranks + self.rank]]

    def is_mine(self, name: str) -> bool:
        """This rank speaks for the weight of this name."""
        return self.owners[name] == self.rank

    def whole(self, name: str, value: Callable[[], Tensor], like: Tensor, dtype: torch.dtype) -> Tensor:
        """A weight, whole on every rank of the pipeline.

        Args:
            name: of the weight.
            value: gives it where it is, in this dtype; called on the ranks of its stage.
            like: of its shape.
            dtype: of the result.
        """
        if self.is_mine(name):
            tensor = value().contiguous()
        else:
            tensor = torch.empty(like.shape, dtype=dtype, device=self.device)
        dist.broadcast(tensor, self.ranks[self.owners[name]], group=self.group)
        return tensor

    def hidden(
        self,
        run: Callable[[Tensor | None, AttentionContext], Tensor],
        context: AttentionContext,
        *,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> Tensor:
        """Final hidden states [N, D] of tokens that all ranks of the pipeline pass together, on each; without gradient.

        Args:
            run: forward pass of one of this rank's stages, from hidden states [N, D] of the stage before; None: from
                the tokens.
            context: of all tokens; the keys and values that it sees are those of this rank's layers, counted from 0.
            shape, dtype: of hidden states.
        """
        own = _OwnLayers(
            context, [index for index, stage in self._numbered() if stage % self.num_ranks == self.rank]
        )
        hidden: Tensor | None = None
        last = len(self._stages) - 1
        for stage in range(last + 1):
            chunk, rank = divmod(stage, self.num_ranks)
            following = (rank + 1) % self.num_ranks
            if self.rank == rank:
                with self.chunk(chunk):
                    hidden = run(hidden, own).contiguous()
                if stage < last:
                    dist.send(hidden, self.ranks[following], group=self.group)
            elif self.rank == following or stage == last:
                hidden = torch.empty(shape, dtype=dtype, device=self.device)
                if stage < last:
                    dist.recv(hidden, self.ranks[rank], group=self.group)
        assert hidden is not None, "there are stages"
        dist.broadcast(hidden, self.ranks[self.num_ranks - 1], group=self.group)
        return hidden

    def _numbered(self) -> Iterator[tuple[int, int]]:
        """Each layer with its stage."""
        return ((layer, stage) for stage, layers in enumerate(self._stages) for layer in layers)

    @contextlib.contextmanager
    def generating(self, module: nn.Module, dtype: torch.dtype | None, *, is_whole: bool) -> Iterator[None]:
        """The head on every rank, beside this rank's layers; or the parameters of all stages, so that forward passes
        talk to nobody but the ranks that share matrices.

        Args:
            module: whose parameters are gathered over the data-parallel ranks of their stage; matrices that are cut
                stay cut.
            dtype: in which floating-point parameters travel; None: that of each.
            is_whole: the parameters of all stages.
        """
        head: Any = module.get_output_embeddings()  # type: ignore[operator]
        wanted = module if is_whole else head
        ids = {id(parameter) for parameter in wanted.parameters()}
        received: dict[int, nn.Parameter] = {}
        kept: list[tuple[nn.Module, str, nn.Parameter]] = []
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if id(parameter) not in ids:
                continue
            if id(parameter) not in received:
                received[id(parameter)] = self._received(name, parameter, dtype)
            path, _, last = name.rpartition(".")
            part = module.get_submodule(path)
            kept.append((part, last, parameter))
            part._parameters[last] = received[id(parameter)]
        self._has_every_head, self.is_whole = True, is_whole
        try:
            yield
        finally:
            self._has_every_head = self.is_whole = False
            for part, last, parameter in kept:
                part._parameters[last] = parameter

    def _received(self, name: str, parameter: nn.Parameter, dtype: torch.dtype | None) -> nn.Parameter:
        """A parameter, or this rank's part of it, from the stage that has it; the parameter itself where it is here."""
        to = parameter.dtype if dtype is None or not parameter.is_floating_point() else dtype
        own = local(parameter.detach())
        if parameter.is_meta or not self.is_mine(name):
            tensor = torch.empty(own.shape, dtype=to, device=self.device)
        else:
            tensor = own.to(to).contiguous()
        dist.broadcast(tensor, self.ranks[self.owners[name]], group=self.group)
        if not parameter.is_meta:
            return parameter
        if isinstance(parameter, DTensor):
            tensor = DTensor.from_local(
                tensor,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        return nn.Parameter(tensor, requires_grad=False)

    def of_all_stages(self, facts: Mapping[str, T]) -> dict[str, T]:
        """Facts about the weights that each rank speaks for, plain JSON, from all of them."""
        gathered: list[Mapping[str, T]] = gather_json(facts, self.group, self.device)
        return {name: fact for stage in gathered for name, fact in stage.items()}

    def of_layers(self, own: Mapping[int, Tensor], *, num_layers: int, num_tokens: int) -> Tensor:
        """Integers [L, n, k] of numbered layers, from tensors [n, k] of the layers of each rank, on every rank."""
        width = torch.tensor(max((part.shape[1] for part in own.values()), default=0), device=self.device)
        dist.all_reduce(width, op=dist.ReduceOp.MAX, group=self.group)  # not known to a rank without any
        every = torch.zeros(num_layers, num_tokens, int(width), dtype=torch.int32, device=self.device)
        for number, part in own.items():
            every[number] = part
        dist.all_reduce(every, group=self.group)
        return every

    def find_shared(self, module: nn.Module) -> None:
        """Note the parameter that the first and the last stage both have and train; after it was cut and sharded."""
        if self._shared_name and self.rank in (0, self.num_ranks - 1):
            shared = dict(module.named_parameters())[self._shared_name]
            self.shared = shared if shared.requires_grad else None

    def add_shared_gradients(self) -> None:
        """Add up the gradients of an embedding that is the head as well, of the first and the last stage."""
        if self.shared is None:
            return
        if self.shared.grad is None:
            self.shared.grad = torch.zeros_like(self.shared.detach())
        mine = local(self.shared.grad)
        theirs = torch.empty_like(mine)
        peer = self.ranks[self.num_ranks - 1 if self.rank == 0 else 0]
        both = [
            dist.P2POp(dist.isend, mine.contiguous(), peer, self.group),
            dist.P2POp(dist.irecv, theirs, peer, self.group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        mine.add_(theirs)  # of two numbers the sum is the same on both

    @contextlib.contextmanager
    def _swapped(self, layers: nn.Module, norm: nn.Module) -> Iterator[None]:
        parts = self._decoder._modules
        parts[self._layers_name], parts[self._norm_name] = layers, norm
        try:
            yield
        finally:
            parts[self._layers_name], parts[self._norm_name] = self._layers, self._norm

    @torch.no_grad()
    def _check_passes_on(self, module: nn.Module) -> None:
        """Without layers and norm, hidden states come out as they went in."""
        weight = next(module.parameters())
        size: int = 2 * self._decoder.config.hidden_size
        hidden = torch.linspace(-1, 1, size, dtype=weight.dtype, device=weight.device).view(1, 2, -1)
        positions = torch.arange(2, device=weight.device)[None]
        output = self._decoder(
            inputs_embeds=hidden, position_ids=positions, use_cache=False
        ).last_hidden_state
        if not torch.equal(output, hidden):
            raise ValueError(
                f"engine.pipeline_parallel of this role is {self.num_ranks}, but {type(module).__name__} changes "
                f"hidden states between its layers, where stages hand them on; set it to 1"
            )

    def _drop_others(self, module: nn.Module) -> None:
        """Free the parameters of other stages."""
        last = len(self._stages) - 1
        stages: dict[int, set[int]] = {}
        head: Any = module.get_output_embeddings()  # type: ignore[operator]
        places = [(self._decoder._modules[self._embedding_name], 0), (self._norm, last)]
        places += [(module.score if head is None else head, last)]
        for stage, layers in enumerate(self._stages):
            places += [(self._layers[index], stage) for index in layers]
        for part, stage in places:
            for tensor in (*part.parameters(), *part.buffers()):
                stages.setdefault(id(tensor), set()).add(stage)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._own(name, {stage % self.num_ranks for stage in stages.get(id(buffer), {0})})
        dropped: dict[int, nn.Parameter] = {}  # tied parameters stay tied
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if id(parameter) not in stages:
                raise ValueError(
                    f"engine.pipeline_parallel of this role is {self.num_ranks}, but {name} of "
                    f"{type(module).__name__} belongs to no layer; set it to 1"
                )
            holders = {stage % self.num_ranks for stage in stages[id(parameter)]}
            self._own(name, holders)
            if len(holders) > 1:
                self._shared_name = self._shared_name or name
            if self.rank in holders:
                continue
            if id(parameter) not in dropped:
                empty = torch.empty_like(parameter, device="meta")
                dropped[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            path, _, own_name = name.rpartition(".")
            module.get_submodule(path)._parameters[own_name] = dropped[id(parameter)]

    def _own(self, name: str, holders: set[int]) -> None:
        self.owners[name] = self.owners[hugging_face_name(name) or name] = min(holders)


_PIPELINES: WeakKeyDictionary[nn.Module, Pipeline] = WeakKeyDictionary()


def pipeline_of(module: nn.Module) -> Pipeline | None:
    """The pipeline that a module is divided over."""
    return _PIPELINES.get(module)


def whole_weight(module: nn.Module, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight of a module as a full tensor in this dtype, gathered from shards and stages.

    All ranks that hold the module call this; live memory where possible.
    """
    pipeline = pipeline_of(module)

    def value() -> Tensor:
        return full(tensor.detach().to(dtype))

    return value() if pipeline is None else pipeline.whole(name, value, tensor, dtype)


class _OwnLayers:
    """Attention of the layers of one rank, which keep their keys and values under numbers from 0."""

    def __init__(self, inner: AttentionContext, layers: Sequence[int]) -> None:
        self._inner = inner
        self._places = {layer: place for place, layer in enumerate(layers)}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Attention output [N, H, Dv], as of the context inside."""
        return self._inner.attend(self._places[layer], query, key, value, form)


class _Skip(nn.Module):
    """Stands for a layer of another stage."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states
