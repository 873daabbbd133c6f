"""The engine contract on engines in processes of their own, as `strop doctor --engines` starts them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollout.engine_contract.case import EngineCase, Rule
from rollout.engine_contract.rules import RULES
from rollout.engine_contract.server import start_server

from strop.data.tiny_model import make_tiny_model

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(
        path,
        seed=0,
        hidden_size=32,
        num_layers=2,
        head_dim=32,
        intermediate_size=48,
        max_position_embeddings=4096,
    )
    return path


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[EngineCase]:
    with EngineCase(start_server("vllm"), folder) as case:
        yield case


@pytest.fixture(scope="module")
def sglang(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineCase]:
    """The adapter over the server that speaks SGLang's protocol; the real engine has no build for a CPU."""
    path = tmp_path_factory.mktemp("sglang") / "python"
    root = f"{HERE / 'sglang_server'}:{HERE.parents[1]}"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{root}" exec {sys.executable} "$@"\n')
    path.chmod(0o755)
    before = os.environ.get("STROP_SGLANG")
    os.environ["STROP_SGLANG"] = str(path)
    try:
        with EngineCase(start_server("sglang"), folder) as case:
            yield case
    finally:
        del os.environ["STROP_SGLANG"]
        if before is not None:
            os.environ["STROP_SGLANG"] = before


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_vllm(vllm: EngineCase, rule: Rule) -> None:
    vllm.check(rule)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_sglang(sglang: EngineCase, rule: Rule) -> None:
    sglang.check(rule)
