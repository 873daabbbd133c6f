"""The parameters of a model in this process, into which weights are received."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from strop.engines.checksum.host import digest_tensor
from strop.engines.weights import WeightsMetadata, named_weights, weights_metadata


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

    def weights_metadata(self) -> WeightsMetadata:
        """The parameters and persistent buffers."""
        return weights_metadata(self._module)

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy into the parameters, which stay the same objects."""
        live = named_weights(self._module)
        for name, value in tensors:
            live[name].copy_(value)

    def digests(self, names: Sequence[str]) -> dict[str, int]:
        """Digests of the parameters as they are now; a tied one is read once."""
        live = named_weights(self._module)
        digests: dict[int, int] = {}
        for name in names:
            tensor = live[name]
            if id(tensor) not in digests:
                digests[id(tensor)] = digest_tensor(tensor)
        return {name: digests[id(live[name])] for name in names}
