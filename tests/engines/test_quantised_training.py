"""Training from a folder with quantised weights, in one process and in two: as from a folder with their numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_cases import ALONE, Case, assert_same_run, expected_outcome, run_case, whole_weights
from numpy.typing import NDArray

from references.language_models import config, exact_norms, load_plain, save_model
from references.quantised_folders import numbers_of, write_fp8, write_mxfp4
from references.rank_processes import Ranks, run_ranks
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.training import TrainEngine


@pytest.fixture(scope="module")
def fp8(tiny_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in FP8."""
    return write_fp8(tiny_folder("qwen3"), tmp_path_factory.mktemp("quantised") / "fp8", block=(20, 24))


def check(folder: Path, *, values: bool = False, world_size: int) -> None:
    uneven = ((0, 3, 6, 7, 1), (4, 2, 5))
    engine = EngineConfig(max_tokens_per_device=20)
    case = Case(
        folder=str(folder), engine=engine, assignment=ALONE if world_size == 1 else uneven, values=values
    )
    with exact_norms():
        expected = expected_outcome(Case(folder=str(numbers_of(folder)), engine=engine, values=values))
    outcomes = run_ranks(run_case, world_size, case) if world_size > 1 else [run_case(Ranks(0, 1, 0), case)]
    assert_same_run(outcomes, case, expected, 1e-10)


def test_two_steps_in_one_process(fp8: Path) -> None:
    check(fp8, world_size=1)


@pytest.mark.dist
def test_two_steps_in_two_processes(fp8: Path) -> None:
    check(fp8, world_size=2)


def _sharded(ranks: Ranks, folder: str) -> dict[str, NDArray[Any]]:
    parallel = ranks.join()
    model = load_model(ModelConfig(path=folder), device="cpu", parallel=parallel)
    engine = TrainEngine(model, EngineConfig(), OptimizerConfig(), total_steps=None, parallel=parallel)
    return whole_weights(engine)


@pytest.mark.dist
def test_experts_in_four_bits_are_sharded_over_two_processes(tmp_path: Path) -> None:
    shape = config("gpt_oss")
    shape.intermediate_size = 64  # groups of 32
    save_model(shape, tmp_path / "plain")
    folder = write_mxfp4(tmp_path / "plain", tmp_path / "mxfp4")
    expected = load_plain(numbers_of(folder), dtype=torch.float32).state_dict()
    for weights in run_ranks(_sharded, 2, str(folder)):
        assert weights.keys() == expected.keys()
        assert all(np.array_equal(weights[name], expected[name].numpy()) for name in expected)


def test_a_critic_of_a_quantised_model(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    check(write_fp8(tiny_folder("qwen3_score"), tmp_path / "fp8", block=(20, 24)), values=True, world_size=1)
