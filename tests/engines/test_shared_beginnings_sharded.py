"""Rows that begin alike over several ranks: the step of one process, which test_shared_beginnings.py compares with each
row alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from references.engine_steps import Pair, Setting, check, engine_of, ids, one_process
from references.language_models import VOCAB, exact_norms
from references.rank_processes import Ranks, run_ranks
from strop.engines.config import LoraConfig
from strop.engines.gradients import full
from strop.engines.packing import make_rows
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.tokens import Tokens

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


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(axes, id=name, marks=[] if name in ("context", "pipeline") else pytest.mark.slow)
        for name, axes in AXES.items()
    ],
)
def test_trees_cut_by_the_budget_with_checkpointing(tiny_folder: Folder, axes: dict[str, int]) -> None:
    folder = tiny_folder("gemma3" if "pp_size" not in axes else "qwen3")
    split = setting(folder, axes, max_tokens=36, checkpointing=True)
    check(split, TREES, 2, one_process(setting(folder, {}), TREES))


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(AXES["sequence"], marks=pytest.mark.slow),
        pytest.param(AXES["context"], marks=pytest.mark.slow),
        AXES["data"],
    ],
)
def test_adapters(tiny_folder: Folder, axes: dict[str, int]) -> None:
    lora = LoraConfig(rank=4, alpha=8.0)
    folder = tiny_folder("qwen3")
    check(setting(folder, axes, lora=lora), TREES, 2, one_process(setting(folder, {}, lora=lora), TREES))


@pytest.mark.parametrize("axes", [{}, {"ep_size": 2}], ids=["data", "experts"])
def test_experts(tiny_folder: Folder, axes: dict[str, int]) -> None:
    folder = tiny_folder("qwen3_moe")
    check(setting(folder, axes), TREES, 2, one_process(setting(folder, {}), TREES))


CHOSEN = torch.arange(2 * sum(len(response) for _, response in TREES)).view(-1, 2) % VOCAB
"""Two further tokens in the place of each response token, others where rows share it."""


def chosen_gradient(parallel: Parallel, setting: Setting) -> tuple[dict[str, Tensor], Tensor]:
    """Log-probs of sampled and of chosen tokens, and the gradient of the output matrix by both."""
    with exact_norms():
        engine = engine_of(parallel, setting)
        rows = make_rows([torch.tensor(p) for p, _ in TREES], [torch.tensor(r) for _, r in TREES])

        def asked(tokens: Tokens) -> dict[str, Tensor]:
            log_probs, entropies, at = tokens.log_probs_at(CHOSEN[tokens.response_index], temperature=0.7)
            own = {"own": log_probs, "entropies": entropies, "at": at.log_probs}
            return own | {"likely": at.is_likely.to(log_probs)}

        def loss(tokens: Tokens) -> Tensor:
            weight = torch.cos(1.0 + tokens.response_index.double())
            made = asked(tokens)
            return sum(
                ((weight * values.view(len(weight), -1).T.exp()).sum() for values in made.values()),
                torch.zeros(()),
            )

        results = dict(engine.map_tokens(rows, asked))
        engine.accumulate(rows, loss)
        engine.step()
        (weight,) = (p for name, p in engine.model.named_parameters() if name.endswith("embed_tokens.weight"))
        return results, full(weight.detach())


def chosen_on_ranks(ranks: Ranks, setting: Setting) -> tuple[dict[str, Tensor], Tensor]:
    return chosen_gradient(ranks.join(**setting.axes), setting)


@pytest.mark.parametrize(
    ("axes", "world"),
    [
        pytest.param({"sp_size": 2}, 2, marks=pytest.mark.slow),
        ({"cp_size": 2}, 2),
        ({"tp_size": 2}, 2),
        pytest.param({"cp_size": 2, "tp_size": 2}, 4, marks=pytest.mark.dist),
        pytest.param({"cp_size": 2, "sp_size": 2}, 4, marks=pytest.mark.dist),
    ],
)
def test_chosen_tokens_of_rows_that_share_a_place(
    tiny_folder: Folder, axes: dict[str, int], world: int
) -> None:
    folder = tiny_folder("qwen3")
    expected, weight = chosen_gradient(alone("cpu"), setting(folder, {}))
    for results, found in run_ranks(chosen_on_ranks, world, setting(folder, axes, max_tokens=60)):
        for name, values in expected.items():
            torch.testing.assert_close(results[name], values, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(found, weight, atol=1e-9, rtol=1e-9)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["qwen3", "gemma3"])
@pytest.mark.parametrize("axes", FOUR.values(), ids=FOUR)
def test_four_ranks_take_the_step_of_one_process(
    tiny_folder: Folder, axes: dict[str, int], kind: str
) -> None:
    folder = tiny_folder(kind)
    split = setting(folder, axes, max_tokens=36, checkpointing=True)
    check(split, TREES, 4, one_process(setting(folder, {}), TREES))
