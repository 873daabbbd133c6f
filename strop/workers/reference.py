"""The frozen model that KL terms compare with."""

from __future__ import annotations

import dataclasses

from strop.controller import Dispatch, Worker, register
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.training import forward_log_probs, make_rows
from strop.protocol import DataProto, columns
from strop.workers.config import ReferenceConfig


class ReferenceWorker(Worker):
    """Holds the reference model; it is never trained."""

    def __init__(self, model: ModelConfig, reference: ReferenceConfig, *, device: str) -> None:
        super().__init__()
        frozen = dataclasses.replace(model, path=reference.path or model.path, gradient_checkpointing=False)
        self._model = load_model(frozen, device=device)
        self._model.module.requires_grad_(False)
        self._max_tokens = reference.engine.max_tokens_per_device

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Column ref_log_prob [B, R~] of the responses."""
        rows = make_rows(columns.rows(data.tensors()["prompts"]), columns.rows(data.tensors()["responses"]))
        log_probs, _ = forward_log_probs(
            self._model, rows, temperature=data.meta_info["temperature"], max_tokens=self._max_tokens
        )
        return DataProto.from_dict(
            {"ref_log_prob": columns.jagged_like(data.tensors()["responses"], log_probs)}
        )
