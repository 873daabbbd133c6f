"""Muon, and state in host memory, on a model whose layers, matrices or experts are divided over ranks: steps of one
process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_tensor_parallel_generation import Output, assert_equal, played

from references.engine_steps import (
    PAIRS,
    Result,
    Setting,
    check,
    compare,
    engine_of,
    one_process,
    run_engine_step,
)
from references.language_models import exact_norms
from references.rank_processes import Ranks, run_ranks
from strop.engines.parallel import offload
from strop.engines.parallel.ranks import alone

DIST, SLOW = pytest.mark.dist, pytest.mark.slow
Folder = Callable[[str], Path]
MUON: list[Any] = [
    ("qwen3", {"tp_size": 2}, 2),
    ("llama", {"pp_size": 2}, 2),
    pytest.param("llama_mqa", {"tp_size": 2}, 2, marks=SLOW),  # keys and values whole on both
    pytest.param("qwen3", {"tp_size": 2}, 4, marks=DIST),
    pytest.param("qwen3", {"tp_size": 2, "pp_size": 2}, 4, marks=DIST),
    pytest.param("qwen3_moe", {"tp_size": 2, "ep_size": 2, "pp_size": 2}, 4, marks=DIST),
]


@pytest.mark.parametrize(("kind", "axes", "num_ranks"), MUON, ids=str)
def test_muon_takes_the_step_of_one_process(
    tiny_folder: Folder, kind: str, axes: dict[str, Any], num_ranks: int
) -> None:
    setting = Setting(folder=str(tiny_folder(kind)), optimizer="muon")
    expected = one_process(setting)
    check(dataclasses.replace(setting, max_tokens=28, **axes), PAIRS, num_ranks, expected)


def moved(ranks: Ranks, setting: Setting) -> tuple[Result, list[Output], str]:
    """A step, samples and a digest, with memory that moves as that of a device does, and the role away in between."""
    on_device = offload._on_device
    offload._on_device = iter  # type: ignore[assignment]
    try:
        with exact_norms():
            engine = engine_of(ranks.join(**setting.axes), setting)
            engine.offload()
            step = run_engine_step(engine, PAIRS)
            engine.offload()
            sampled = played(engine, range(3))
            engine.offload()
            engine.offload()
            return step, sampled, engine.checksum()
    finally:
        offload._on_device = on_device


EXPERTS, MATRICES, STAGES = (
    ("qwen3_moe", {"ep_size": 2}, 2),
    ("qwen3", {"tp_size": 2}, 2),
    ("qwen3", {"pp_size": 2}, 2),
)
EVERY_AXIS = "qwen3_moe", {"tp_size": 2, "ep_size": 2, "pp_size": 2}, 4
OFFLOADED: list[Any] = [
    (*EXPERTS, "optimizer"),
    pytest.param(*MATRICES, "all", marks=SLOW),
    (*STAGES, "all"),
    pytest.param(*EXPERTS, "all", marks=SLOW),
    pytest.param(*MATRICES, "optimizer", marks=SLOW),
    pytest.param(*STAGES, "optimizer", marks=SLOW),
    pytest.param(*EVERY_AXIS, "optimizer", marks=DIST),
    pytest.param(*EVERY_AXIS, "all", marks=DIST),
]


@pytest.mark.parametrize(("kind", "axes", "num_ranks", "what"), OFFLOADED, ids=str)
def test_state_in_host_memory_changes_no_number(
    tiny_folder: Folder, what: str, kind: str, axes: dict[str, Any], num_ranks: int
) -> None:
    setting = Setting(folder=str(tiny_folder(kind)), offload=what)
    expected = one_process(dataclasses.replace(setting, offload="none"))
    cut = dataclasses.replace(setting, max_tokens=28, **axes)
    results = run_ranks(moved, num_ranks, cut)
    compare(cut, PAIRS, [step for step, _, _ in results], expected)
    assert len({digest for *_, digest in results}) == 1
    with exact_norms():
        whole = engine_of(alone("cpu"), Setting(folder=setting.folder))
        run_engine_step(whole, PAIRS)
    for _, sampled, _ in results:
        assert_equal(sampled, played(whole, range(3)))
