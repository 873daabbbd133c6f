"""`strop doctor --engines`: what the rollout engines of this installation can do, found out by trying."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import torch

from strop.cli.output import plain, print_json, print_plain
from strop.data.tiny import make_tiny_model
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.conformance.suite import run_checks
from strop.rollout.conformance.trial import Finding, Start, Subject
from strop.rollout.native.engine import NativeEngine
from strop.rollout.sync.target import ModuleTarget

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


ENGINES: Mapping[str, Start] = {"native": start_native}
"""Those of this installation, by the name in rollout.engine."""


def check_engines(*, wants_json: bool) -> int:
    """Run every check on every engine, with a small model made for it; the exit code of the command."""
    found: dict[str, list[Finding]] = {}
    about = f"torch {torch.__version__}, transformers {version('transformers')}"
    with tempfile.TemporaryDirectory(prefix="strop-doctor-") as scratch:
        folder = Path(scratch)
        make_tiny_model(
            folder, seed=0, hidden_size=32, num_layers=2, head_dim=8, intermediate_size=48,
            max_position_embeddings=64,
        )  # fmt: skip
        for name, start in ENGINES.items():
            if not wants_json:
                print_plain(f"{name} ({about}):")
            tell = (lambda one: None) if wants_json else _show
            found[name] = run_checks(start, folder, limit_s=LIMIT_S, tell=tell)
    if wants_json:
        print_json({
            "versions": about,
            "engines": {name: [vars(one) for one in findings] for name, findings in found.items()},
        })  # fmt: skip
    return int(any(one.outcome == "failed" for findings in found.values() for one in findings))


def _show(one: Finding) -> None:
    text = f": {one.text}" if one.text else ""
    print_plain(plain(f"  {_MARKS[one.outcome]} {one.check}{text}", is_one_line=True))
