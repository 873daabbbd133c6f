"""One mini-batch gives the same loss, gradient norm and weights on any number of ranks, however it is cut.

Expected values: padded batches in plain transformers (references/padded_training.py), and the engine alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from default_cases import draws
from fsdp_cases import ALONE, NUM_ROWS, Case, Outcome, assert_same_run, expected_outcome, run_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from references.language_models import exact_norms
from references.rank_processes import Ranks, run_ranks
from strop.engines.config import EngineConfig

Folder = Callable[[str], Path]
TOLERANCES = {"float64": 1e-10, "float32": 2e-5}
UNEVEN = ((0, 3, 6, 7, 1), (4, 2, 5))
ONE_EMPTY = ((), ALONE[0])

_expected: dict[tuple[str, bool], Outcome] = {}


def expected(case: Case) -> Outcome:
    """What plain transformers gives, computed once per model."""
    key = (case.folder, case.values)
    if key not in _expected:
        with exact_norms():
            _expected[key] = expected_outcome(case)
    return _expected[key]


def check(case: Case, *, world_size: int) -> None:
    outcomes = run_ranks(run_case, world_size, case)
    assert_same_run(outcomes, case, expected(case), TOLERANCES[case.dtype])


@pytest.mark.parametrize("kind", ["qwen3", "llama"])  # a tied head, a head of its own
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_alone_is_plain_transformers(tiny_folder: Folder, kind: str, dtype: str) -> None:
    case = Case(folder=str(tiny_folder(kind)), dtype=dtype, engine=EngineConfig(max_tokens_per_device=20))
    outcome = run_case(Ranks(0, 1, 0), case)
    assert_same_run([outcome], case, expected(case), TOLERANCES[dtype])


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.slow), "llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
def test_two_ranks_are_one(tiny_folder: Folder, kind: str, dtype: str) -> None:
    check(Case(folder=str(tiny_folder(kind)), dtype=dtype, assignment=UNEVEN), world_size=2)


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(EngineConfig(max_tokens_per_device=16, gradient_sync="each"), marks=pytest.mark.slow),
        pytest.param(
            EngineConfig(max_tokens_per_device=16, reshard_after_forward=False), marks=pytest.mark.slow
        ),
        EngineConfig(max_tokens_per_device=16, reshard_after_forward=False, gradient_sync="each"),
        EngineConfig(max_tokens_per_device=16, shard_size=1),
        pytest.param(EngineConfig(max_tokens_per_device=16, offload="all"), marks=pytest.mark.slow),
        EngineConfig(max_tokens_per_device=16, offload="optimizer", offload_activations=True),
    ],
    ids=["each", "keep", "keep-each", "replicas", "host", "activations"],
)
def test_engine_settings_change_no_number(tiny_folder: Folder, engine: EngineConfig) -> None:
    for checkpointing in (False, True):
        case = Case(
            folder=str(tiny_folder("qwen3")),
            assignment=UNEVEN,
            engine=engine,
            gradient_checkpointing=checkpointing,
        )
        check(case, world_size=2)


@pytest.mark.parametrize("sync", [pytest.param("last", marks=pytest.mark.slow), "each"])
def test_a_rank_without_rows_takes_part(tiny_folder: Folder, sync: str) -> None:
    engine = EngineConfig(max_tokens_per_device=16, gradient_sync=sync)  # type: ignore[arg-type]
    check(Case(folder=str(tiny_folder("llama")), assignment=ONE_EMPTY, engine=engine), world_size=2)
    check(Case(folder=str(tiny_folder("llama")), assignment=ONE_EMPTY[::-1], engine=engine), world_size=2)


@pytest.mark.draws
@settings(
    max_examples=draws(8, by_default=3),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_any_assignment_of_rows_and_any_cut(tiny_folder: Folder, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, 1), min_size=NUM_ROWS, max_size=NUM_ROWS), label="owners")
    engine = EngineConfig(
        max_tokens_per_device=data.draw(st.integers(16, 80), label="max_tokens"),
        gradient_sync=data.draw(st.sampled_from(["last", "each"]), label="sync"),
        reshard_after_forward=data.draw(st.booleans(), label="reshard"),
    )
    assignment = tuple(tuple(row for row in range(NUM_ROWS) if owners[row] == rank) for rank in range(2))
    check(Case(folder=str(tiny_folder("qwen3")), assignment=assignment, engine=engine), world_size=2)


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_value_models_on_two_ranks(tiny_folder: Folder, checkpointing: bool) -> None:
    for kind, assignment in (("qwen3", UNEVEN), ("llama", ONE_EMPTY)):
        case = Case(
            folder=str(tiny_folder(f"{kind}_score")),
            assignment=assignment,
            values=True,
            gradient_checkpointing=checkpointing,
            engine=EngineConfig(max_tokens_per_device=20),
        )
        check(case, world_size=2)


def test_bfloat16_on_two_ranks_is_near(tiny_folder: Folder) -> None:
    # 8 bits of mantissa: the master weights stay float32, losses and norms agree to a few per cent. After the first
    # step the loss is that of weights whose numbers with small gradients went either way, so it may be further off.
    exact = Case(folder=str(tiny_folder("qwen3")), assignment=UNEVEN)
    case = dataclasses.replace(exact, dtype="bfloat16", engine=EngineConfig(max_tokens_per_device=16))
    outcomes = run_ranks(run_case, 2, case)
    wanted = expected(exact)
    assert {w.dtype.name for o in outcomes for w in o.weights.values()} == {"float32"}
    first, *later = (sum(losses) for losses in zip(*(o.losses for o in outcomes), strict=True))
    assert first == pytest.approx(wanted.losses[0], rel=0.05, abs=0.3)
    assert later == pytest.approx(wanted.losses[1:], rel=0.05, abs=0.6)
    assert outcomes[0].norms == outcomes[1].norms
    assert outcomes[0].norms == pytest.approx(wanted.norms, rel=0.05)
    for name, weight in wanted.weights.items():
        # Two steps move each number by about 0.03.
        assert abs(outcomes[0].weights[name] - weight).mean() < 0.006, name


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shard_size", [0, 2, 1])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_four_ranks_are_one(tiny_folder: Folder, kind: str, shard_size: int, dtype: str) -> None:
    for assignment in (((0, 5), (), (1, 2, 3, 7), (4, 6)), ((), (), ALONE[0], ())):
        for checkpointing, reshard, sync in ((False, True, "last"), (True, False, "each")):
            engine = EngineConfig(
                max_tokens_per_device=18,
                shard_size=shard_size,
                reshard_after_forward=reshard,
                gradient_sync=sync,  # type: ignore[arg-type]
            )
            case = Case(
                folder=str(tiny_folder(kind)),
                dtype=dtype,
                assignment=assignment,
                engine=engine,
                gradient_checkpointing=checkpointing,
            )
            check(case, world_size=4)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_layers_change_no_number(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("qwen3")), engine=EngineConfig(max_tokens_per_device=20, compile=True))
    outcome = run_case(Ranks(0, 1, 0), case)
    assert_same_run([outcome], case, expected(case), TOLERANCES["float64"])
    two = dataclasses.replace(case, assignment=UNEVEN)
    outcomes = run_ranks(run_case, 2, two, timeout_s=600)
    assert_same_run(outcomes, two, expected(case), TOLERANCES["float64"])
