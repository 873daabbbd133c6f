"""Training from a folder with quantised weights, in one process and in two: as from a folder with their numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fsdp_cases import ALONE, Case, assert_same_run, expected_outcome, run_case

from references.language_models import exact_norms
from references.quantised_folders import numbers_of, write_fp8
from references.rank_processes import Ranks, run_ranks
from strop.engines.config import EngineConfig


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


def test_a_critic_of_a_quantised_model(tiny_folder: Callable[[str], Path], tmp_path: Path) -> None:
    check(write_fp8(tiny_folder("qwen3_score"), tmp_path / "fp8", block=(20, 24)), values=True, world_size=1)
