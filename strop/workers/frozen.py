"""A model that is never trained, on the ranks of its role: what the reference and the reward model share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strop.engines import fsdp
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig
from strop.engines.packing import Row
from strop.engines.parallel import Parallel
from strop.engines.tokens import TokenFunction, map_tokens


class FrozenModel:
    """Forward passes of a model whose weights stay as they are.

    Concurrency: on several ranks every method is a collective, each rank with its own rows, also with none.
    """

    def __init__(self, model: CausalLM, engine: EngineConfig, parallel: Parallel) -> None:
        """Shard the model over its ranks, if there are several.

        Args:
            model: just loaded, with `parallel`.
            engine: how passes are cut and distributed.
            parallel: the ranks that hold it.
        """
        self.model = model
        self._parallel = parallel
        self._max_tokens = engine.max_tokens_per_device
        self._on_host: fsdp.HostCopies | None = None
        model.module.requires_grad_(False)
        fsdp.shard(model, parallel, engine)

    def map_tokens(self, rows: Sequence[Row], function: TokenFunction) -> dict[str, Tensor]:
        """What a function says of all response tokens [N, ...] of these rows; see `strop.engines.tokens`."""
        if self._on_host is not None:
            self._on_host.restore()
            self._on_host = None
        return map_tokens(self.model, rows, function, max_tokens=self._max_tokens, parallel=self._parallel)

    def offload(self) -> None:
        """Leave the device, if it is not a CPU, until the next forward pass."""
        if self._on_host is None:
            self._on_host = fsdp.offload(self.model)
