"""A role whose model is never trained: what the reference, the teacher and the reward model share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strop.controller import Dispatch, Worker, register
from strop.engines import fsdp
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig
from strop.engines.packing import Row
from strop.engines.parallel import Parallel
from strop.engines.tokens import TokenFunction, map_tokens


class FrozenWorker(Worker):
    """Holds a model, or this rank's share of it, whose weights stay as they are.

    Concurrency: on several ranks every method is a collective, called on all of them in the same order, each
    with its own rows, also with none.
    """

    def _hold(self, model: CausalLM, engine: EngineConfig, parallel: Parallel) -> None:
        """Take this model as the role's, sharded over its ranks, if there are several.

        Args:
            model: just loaded, with `parallel`.
            engine: how passes are cut and distributed.
            parallel: the ranks that hold it.
        """
        self._model, self._parallel = model, parallel
        self._max_tokens_per_device = engine.max_tokens_per_device
        self._on_host: fsdp.HostCopies | None = None
        model.module.requires_grad_(False)
        fsdp.shard(model, parallel, engine)

    def _map_tokens(self, rows: Sequence[Row], function: TokenFunction) -> dict[str, Tensor]:
        """What a function says of all response tokens [N, ...] of these rows; see `strop.engines.tokens`."""
        if self._on_host is not None:
            self._on_host.restore()
            self._on_host = None
        return map_tokens(
            self._model, rows, function, max_tokens=self._max_tokens_per_device, parallel=self._parallel
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def offload(self) -> None:
        """The role is idle: it leaves the device, if that is not a CPU, until it is called again."""
        if self._on_host is None:
            self._on_host = fsdp.offload(self._model)
