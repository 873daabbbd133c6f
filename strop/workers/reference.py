"""The frozen model that KL terms compare with."""

from __future__ import annotations

import dataclasses

from strop.controller import Dispatch, register
from strop.engines.config import LoraConfig, ModelConfig
from strop.engines.kinds import frozen_engine
from strop.engines.model import load_model
from strop.protocol import DataProto
from strop.workers.config import ReferenceConfig
from strop.workers.models import ModelWorker
from strop.workers.rows import log_prob_column


class ReferenceWorker(ModelWorker):
    """Holds the reference model."""

    def __init__(self, model: ModelConfig, reference: ReferenceConfig, *, device: str) -> None:
        super().__init__()
        frozen = dataclasses.replace(
            model,
            path=reference.path or model.path,
            gradient_checkpointing=False,
            lora=LoraConfig(),  # whatever is trained, the comparison is with the model as it stands
            freeze_vision_tower=False,
        )
        parallel = self.join(reference.engine, device=device)
        loaded = load_model(
            frozen, parallel=parallel, policy=model, holds_half=reference.engine.kind == "torch"
        )
        self.engine = frozen_engine(loaded, reference.engine, parallel)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """Column ref_log_prob [B, R~] of the responses."""
        return self.token_columns(data, log_prob_column("ref_log_prob", data))
