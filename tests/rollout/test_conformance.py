"""The native engine keeps the contract, on several families of models; and the checks see who does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.rollout.conformance.suite import CHECKS
from strop.rollout.conformance.trial import Check, Conformance, Start, Subject
from strop.rollout.native.engine import NativeEngine
from strop.rollout.sync.target import ModuleTarget


def native(dtype: str = "float32") -> Start:
    """Starts the native engine."""

    async def start(folder: Path) -> Subject:
        model = load_model(ModelConfig(path=str(folder), dtype=dtype), device="cpu")

        def damage() -> None:
            def broken(*arguments: object) -> torch.Tensor:
                raise RuntimeError("the device is lost, for example")

            model.hidden = broken  # type: ignore[method-assign]

        return Subject(
            engine=NativeEngine(model, max_running=64),
            target=ModuleTarget(model.module),
            dtype=model.compute_dtype,
            damage=damage,
        )

    return start


FAMILIES = ("qwen3", "llama", "gpt2", "gemma3")
"""A tied head; a head of its own; learned positions and tied; layers with and without a window."""


@pytest.fixture(scope="module", params=FAMILIES)
def conformance(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Iterator[Conformance]:
    with Conformance(native(), tiny_folder(request.param)) as one:
        yield one


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_native_engine(conformance: Conformance, check: Check) -> None:
    finding = conformance.run(check)
    assert finding.outcome != "failed", finding.text
    if finding.outcome == "absent":
        pytest.skip(finding.text)
