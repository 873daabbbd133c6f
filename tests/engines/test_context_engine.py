"""The engine with its sequences over ranks that exchange keys and values: losses, steps and values of one process.

Ranks are real processes over gloo, with sharded parameters. The expected values come from the same engine in one
process, which tests/engines/test_packed_forward.py compares with the models' own forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from default_cases import draws
from hypothesis import given, settings
from hypothesis import strategies as st

from references.engine_steps import (
    PAIRS,
    A,
    Pair,
    Setting,
    check,
    ids,
    one_process,
    rank_step,
    run_step,
)
from references.language_models import config
from references.rank_processes import run_ranks
from strop.engines.parallel.context import check_context_parallel
from strop.engines.parallel.ranks import alone

SLOW = pytest.mark.slow
Folder = Callable[[str], Path]

LONG: tuple[Pair, ...] = ((A, ids(50, 31)),)
"""One row that each rank has several runs of."""


@pytest.fixture(scope="module")
def odd_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads, which no two ranks can have equal numbers of."""
    folder = tmp_path_factory.mktemp("odd")
    settings_of = {**config("qwen3").to_dict(), "num_attention_heads": 3, "num_key_value_heads": 3}
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**settings_of))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


# Norms of queries and keys; a head of its own; windows; one key head; learned positions.
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        "gemma3",
        pytest.param("llama", marks=SLOW),
        pytest.param("llama_mqa", marks=SLOW),
        pytest.param("gpt2", marks=SLOW),
    ],
)
def test_two_ranks_of_a_context_take_the_step_of_one_process(tiny_folder: Folder, kind: str) -> None:
    setting = Setting(folder=str(tiny_folder(kind)))
    check(Setting(folder=setting.folder, cp_size=2), PAIRS, 2, one_process(setting))


def test_any_number_of_heads(odd_folder: Path) -> None:
    setting = Setting(folder=str(odd_folder))
    check(Setting(folder=setting.folder, cp_size=2), PAIRS, 2, one_process(setting))


@pytest.mark.parametrize(
    "pairs",
    [LONG, PAIRS[1:2], pytest.param((((3,), (5,)),), marks=pytest.mark.slow)],
    ids=["long", "short", "one token"],
)
def test_rows_longer_and_shorter_than_the_runs(tiny_folder: Folder, pairs: tuple[Pair, ...]) -> None:
    folder = str(tiny_folder("gemma3"))
    expected = run_step(alone("cpu"), Setting(folder=folder), pairs)
    check(Setting(folder=folder, cp_size=2, max_tokens=29), pairs, 2, expected)


@pytest.mark.parametrize(
    ("checkpointing", "sync"),
    [(False, "last"), pytest.param(True, "last", marks=pytest.mark.slow), (True, "each")],
)
def test_sequences_cut_into_micro_batches_with_checkpointing(
    tiny_folder: Folder, checkpointing: bool, sync: str
) -> None:
    folder = str(tiny_folder("qwen3"))
    setting = Setting(folder=folder, cp_size=2, max_tokens=14, checkpointing=checkpointing, sync=sync)
    check(setting, PAIRS, 2, one_process(Setting(folder=folder)))


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_values_over_two_ranks(value_folder: Path, checkpointing: bool) -> None:
    setting = Setting(folder=str(value_folder), values=True)
    split = Setting(folder=setting.folder, values=True, cp_size=2, max_tokens=20, checkpointing=checkpointing)
    check(split, PAIRS, 2, one_process(setting))


def test_float32_over_two_ranks_stays_near_one_process(tiny_folder: Folder) -> None:
    setting = Setting(folder=str(tiny_folder("qwen3")), dtype="float32")
    # As for Ulysses: sums of some 50 terms of size 4 in another order.
    near = {"atol": 1e-4, "rtol": 1e-4}
    split = Setting(folder=setting.folder, cp_size=2, dtype="float32")
    check(split, PAIRS, 2, one_process(setting), near)


def test_bfloat16_over_two_ranks_stays_near_float32(tiny_folder: Folder) -> None:
    # As for Ulysses: 2^-9 per operation, on log-probs of size 4.
    folder = str(tiny_folder("qwen3"))
    exact = one_process(Setting(folder=folder, dtype="float32"))
    one, other = run_ranks(rank_step, 2, Setting(folder=folder, cp_size=2, dtype="bfloat16"), PAIRS)
    assert one.loss == other.loss
    for ours, wanted in zip(one.before, exact.before, strict=True):
        assert ours.dtype == torch.float32
        assert 1e-4 < float((ours - wanted).abs().max()) < 0.4
        assert float((ours - wanted).abs().mean()) < 0.08
    assert one.grad_norm == pytest.approx(exact.grad_norm, rel=0.05)


FOUR = {
    "cp4": {"cp_size": 4},
    "cp2 dp2": {"cp_size": 2},
    "cp2 tp2": {"cp_size": 2, "tp_size": 2},
    "cp2 sp2": {"cp_size": 2, "sp_size": 2},
}


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["qwen3", "llama_mqa", "gemma3"])
@pytest.mark.parametrize("max_tokens", [1000, 14])
@pytest.mark.parametrize("axes", FOUR.values(), ids=FOUR)
def test_four_ranks_take_the_step_of_one_process(
    tiny_folder: Folder, kind: str, max_tokens: int, axes: dict[str, int]
) -> None:
    setting = Setting(folder=str(tiny_folder(kind)))
    cut = Setting(folder=setting.folder, max_tokens=max_tokens, checkpointing=True, **axes)
    check(cut, PAIRS, 4, one_process(setting))


@pytest.mark.dist
@pytest.mark.parametrize("axes", FOUR.values(), ids=FOUR)
def test_values_over_four_ranks(value_folder: Path, axes: dict[str, int]) -> None:
    expected = one_process(Setting(folder=str(value_folder), values=True))
    check(Setting(folder=str(value_folder), values=True, max_tokens=20, **axes), PAIRS, 4, expected)


@pytest.mark.dist
@pytest.mark.parametrize("axes", FOUR.values(), ids=FOUR)
def test_a_group_of_ranks_without_rows_or_with_a_long_one(tiny_folder: Folder, axes: dict[str, int]) -> None:
    folder = str(tiny_folder("qwen3"))
    for pairs in (PAIRS[3:4], LONG, (((3,), (5,)),)):  # of two groups of ranks one has none
        expected = run_step(alone("cpu"), Setting(folder=folder), pairs)
        check(Setting(folder=folder, checkpointing=True, **axes), pairs, 4, expected)


any_rows = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=7)


@pytest.mark.draws
@settings(max_examples=draws(6, by_default=2), deadline=None)
@given(
    rows=any_rows,
    prompts=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    spare=st.integers(0, 20),
    checkpointing=st.booleans(),
)
def test_any_rows_and_any_budget_over_two_ranks(
    tiny_folder: Folder, rows: list[tuple[int, int]], prompts: list[int], spare: int, checkpointing: bool
) -> None:
    pairs = tuple(
        (ids(prompts[which], which), ids(length, 100 + index)) for index, (which, length) in enumerate(rows)
    )
    longest = max(len(prompt) + len(response) - 1 for prompt, response in pairs)
    folder = str(tiny_folder("qwen3"))
    expected = run_step(alone("cpu"), Setting(folder=folder), pairs)
    setting = Setting(
        folder=folder, cp_size=2, max_tokens=(longest + 1) // 2 + spare, checkpointing=checkpointing
    )
    check(setting, pairs, 2, expected)


def test_models_that_cannot_be_divided_are_refused() -> None:
    check_context_parallel(config("qwen3_next_hybrid"), 1)
    with pytest.raises(
        ValueError,
        match="^critic.engine.context_parallel is 3, but layers of qwen3_next carry a state .* "
        "use critic.engine.context_parallel=1$",
    ):
        check_context_parallel(config("qwen3_next_hybrid"), 3, section="critic.engine")
    shape = config("llama")
    shape.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(
        ValueError, match="^engine.context_parallel is 2, but .* of type 'dynamic' depends on the longest"
    ):
        check_context_parallel(shape, 2)
