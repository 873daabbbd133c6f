"""A model that is never trained, on the ranks of its role: what the reference and the reward model share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from strop.engines import fsdp
from strop.engines.causal_lm import CausalLM
from strop.engines.config import EngineConfig
from strop.engines.packing import Row
from strop.engines.parallel import Parallel
from strop.engines.training import forward_log_probs, forward_top_k, forward_values


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

    def log_probs(self, rows: Sequence[Row], *, temperature: float) -> Tensor:
        """Log-probs of all response tokens, flat [N] in row order."""
        self._onload()
        log_probs, _ = forward_log_probs(
            self.model, rows, temperature=temperature, max_tokens=self._max_tokens, parallel=self._parallel
        )
        return log_probs

    def top_k(
        self, rows: Sequence[Row], k: int, *, temperature: float, banned: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids and log-probs [N, k] of the most likely tokens in the place of each response token, in row order.

        `banned` are ids that are passed over.
        """
        self._onload()
        return forward_top_k(
            self.model,
            rows,
            k,
            temperature=temperature,
            max_tokens=self._max_tokens,
            banned=banned,
            parallel=self._parallel,
        )

    def values(self, rows: Sequence[Row]) -> Tensor:
        """The head's number before each response token, flat [N] in row order."""
        self._onload()
        return forward_values(self.model, rows, max_tokens=self._max_tokens, parallel=self._parallel)

    def offload(self) -> None:
        """Leave the device, if it is not a CPU, until the next forward pass."""
        if self._on_host is None:
            self._on_host = fsdp.offload(self.model)

    def _onload(self) -> None:
        if self._on_host is not None:
            fsdp.onload(self._on_host)
            self._on_host = None
