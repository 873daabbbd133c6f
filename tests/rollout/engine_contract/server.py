"""Starts engines in processes of their own for the contract tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Protocol, cast

import torch
from rollout.engine_contract.case import Start, StartedEngine

from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.config import RolloutConfig
from strop.rollout.engine_group import EngineContext
from strop.rollout.weight_sync.load_weights import loaded


class HasProcesses(Protocol):
    """An engine with processes of its own."""

    @property
    def pid(self) -> int:
        """Of the process that leads their group."""


def start_server(name: str) -> Start:
    """Starts `rollout.engine=name` with the weights of the folder written into it."""

    async def start(folder: Path) -> StartedEngine:
        model = ModelConfig(path=str(folder), dtype="float32")
        place = EngineContext(
            model=model,
            rollout=RolloutConfig(engine=name, max_running=64),
            device="auto",
            version=0,
            trained=None,
            max_tokens=load_model(model, device="cpu").max_positions or 0,
            logs=folder,
            rank=0,
        )
        generation = await loaded(place)
        assert generation.target is not None, "an engine in processes of its own has weights of its own"
        group = cast(HasProcesses, generation.engine).pid
        return StartedEngine(
            engine=generation.engine,
            target=generation.target,
            dtype=torch.float32,
            damage=lambda: os.killpg(group, signal.SIGKILL),
        )

    return start
