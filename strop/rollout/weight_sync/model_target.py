"""The parameters of a model in this process, into which weights are received."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.engines.checksum.host import copied, word_sum
from strop.engines.checksum.models import to_ints
from strop.engines.checksum.tensors import finish
from strop.engines.weights import WeightsMetadata, named_weights, weights_metadata
from strop.rollout.weight_sync.delta import Changes


class ModuleTarget:
    """The parameters of a model in this process, for example `CausalLM.module` of the native engine."""

    def __init__(self, module: nn.Module) -> None:
        """Raises ValueError for a sharded model, whose parameters are not in this process."""
        sharded = next((name for name, t in named_weights(module).items() if isinstance(t, DTensor)), None)
        if sharded is not None:
            raise ValueError(
                f"{sharded} is sharded over ranks; weights are received by a model that is whole in its process"
            )
        self._module = module
        self._live: dict[str, Tensor] = {}
        """Parameters by name, while a sync is under way: a large model has thousands of buckets."""
        self._sums: dict[int, tuple[Tensor, int]] = {}
        """Of parameters that were loaded: the word sum of what they held then, and its bytes."""

    def weights_metadata(self) -> WeightsMetadata:
        """The parameters and persistent buffers, as they are at the begin of a sync."""
        self._live = {}
        return weights_metadata(self._module)

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy into the parameters, which stay the same objects."""
        live = self._weights()
        for name, value in tensors:
            self._sums[id(live[name])] = copied(value, live[name].detach()), live[name].nbytes

    @torch.no_grad()
    def load_part(self, name: str, start: int, data: Tensor) -> None:
        """Copy into a part of a parameter."""
        parameter = self._weights()[name]
        before, stop = self._sums.pop(id(parameter), (None, 0)) if start else (None, 0)
        place = parameter.detach().view(-1).view(torch.uint8)[start : start + len(data)]
        total = copied(data, place, first_byte=start)
        if start == stop:
            self._sums[id(parameter)] = total if before is None else before + total, start + len(data)

    @torch.no_grad()
    def load_changes(self, changes: Sequence[tuple[str, Changes]]) -> None:
        """Write some elements of parameters."""
        live = self._weights()
        for name, changed in changes:
            self._sums.pop(id(live[name]), None)
            changed.apply(live[name])

    def digests(self, names: Sequence[str]) -> dict[str, int]:
        """Digests of the parameters; a tied one is read once. Those that were loaded since the last call were read back
        as they were written, while they lay near; all others are read now. A device is waited for once."""
        live, self._live = named_weights(self._module), {}
        totals: dict[int, Tensor] = {}
        for name in names:
            tensor = live[name]
            if id(tensor) not in totals:
                total, num_bytes = self._sums.get(id(tensor), (None, -1))
                if total is None or num_bytes != tensor.nbytes:
                    total = word_sum(tensor)
                totals[id(tensor)] = total
        self._sums.clear()
        numbers = dict(zip(totals, to_ints(list(totals.values())), strict=True))
        return {name: finish(numbers[id(live[name])], live[name].nbytes) for name in names}

    def _weights(self) -> dict[str, Tensor]:
        self._live = self._live or named_weights(self._module)
        return self._live
