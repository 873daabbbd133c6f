"""Starts the in-process engine for the contract tests."""

from __future__ import annotations

from pathlib import Path

import torch
from rollout.engine_contract.case import Start, StartedEngine

from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.native.engine import NativeEngine
from strop.rollout.weight_sync.model_target import ModuleTarget


def native(dtype: str = "float32", engine: type[NativeEngine] = NativeEngine) -> Start:
    """Starts the native engine, or one that does something wrong."""

    async def start(folder: Path) -> StartedEngine:
        model = load_model(ModelConfig(path=str(folder), dtype=dtype), device="cpu")
        started = engine(model, max_running=64)

        def damage() -> None:
            def broken(*arguments: object, **named: object) -> torch.Tensor:
                raise RuntimeError("the device is lost, for example")

            model.hidden = broken  # type: ignore[method-assign]
            started._batch.prefill._fused = None  # compiled steps do not go through the model's own pass

        return StartedEngine(
            engine=started,
            target=ModuleTarget(model.module),
            dtype=model.compute_dtype,
            damage=damage,
            damage_text="the device is lost",
        )

    return start
