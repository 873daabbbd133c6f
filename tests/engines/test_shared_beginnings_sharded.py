"""Rows that begin alike over several ranks: the step of one process, which test_shared_beginnings.py compares with each
row alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from references.engine_steps import Pair, Setting, check, ids, one_process
from strop.engines.config import LoraConfig

Folder = Callable[[str], Path]

_ROOT, _LEFT, _RIGHT, _TURNS = ids(9, 1), ids(7, 2), ids(5, 3), ids(30, 4)
# A tree of three levels; the turns of an episode, each behind those before, and a fork of it; a row twice; a lone row.
TREES: tuple[Pair, ...] = (
    (_ROOT, (*_LEFT, *ids(6, 11))),
    (_ROOT, (*_LEFT, *ids(3, 12))),
    (_TURNS[:8], _TURNS[8:12]),
    (_ROOT, (*_RIGHT, *ids(4, 13))),
    (_TURNS[:15], _TURNS[15:21]),
    (_ROOT, (*_RIGHT, *ids(8, 14))),
    (_TURNS[:24], _TURNS[24:]),
    (ids(3, 15), ids(2, 16)),
    (_TURNS[:15], (*_TURNS[15:18], *ids(5, 17))),
    (_TURNS[:8], _TURNS[8:12]),
)
AXES = {
    "sequence": {"sp_size": 2},
    "context": {"cp_size": 2},
    "tensor": {"tp_size": 2},
    "data": {},
    "pipeline": {"pp_size": 2},
}
FOUR = {
    "context and sequence": {"cp_size": 2, "sp_size": 2},
    "context and tensor": {"cp_size": 2, "tp_size": 2},
    "data and sequence": {"sp_size": 2},
    "data and tensor": {"tp_size": 2},
}


def setting(folder: Path, axes: dict[str, int], **options: Any) -> Setting:
    return Setting(folder=str(folder), **axes, **options)


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_two_ranks_take_the_step_of_one_process(tiny_folder: Folder, axes: dict[str, int]) -> None:
    folder = tiny_folder("qwen3")
    check(setting(folder, axes), TREES, 2, one_process(setting(folder, {}), TREES))


@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_trees_cut_by_the_budget_with_checkpointing(tiny_folder: Folder, axes: dict[str, int]) -> None:
    folder = tiny_folder("gemma3" if "pp_size" not in axes else "qwen3")
    split = setting(folder, axes, max_tokens=36, checkpointing=True)
    check(split, TREES, 2, one_process(setting(folder, {}), TREES))


@pytest.mark.parametrize("axes", [AXES["sequence"], AXES["context"], AXES["data"]])
def test_adapters(tiny_folder: Folder, axes: dict[str, int]) -> None:
    lora = LoraConfig(rank=4, alpha=8.0)
    folder = tiny_folder("qwen3")
    check(setting(folder, axes, lora=lora), TREES, 2, one_process(setting(folder, {}, lora=lora), TREES))


@pytest.mark.parametrize("axes", [{}, {"ep_size": 2}], ids=["data", "experts"])
def test_experts(tiny_folder: Folder, axes: dict[str, int]) -> None:
    folder = tiny_folder("qwen3_moe")
    check(setting(folder, axes), TREES, 2, one_process(setting(folder, {}), TREES))


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("axes", FOUR.values(), ids=FOUR)
def test_four_ranks_take_the_step_of_one_process(
    tiny_folder: Folder, axes: dict[str, int], kind: str
) -> None:
    folder = tiny_folder(kind)
    split = setting(folder, axes, max_tokens=36, checkpointing=True)
    check(split, TREES, 4, one_process(setting(folder, {}), TREES))
