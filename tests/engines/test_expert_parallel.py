"""The engine with its experts divided over ranks: losses, gradients, checkpoints and generation of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fsdp_cases import Case
from test_fsdp_generation import generate_between_steps
from test_sharded_checkpoint_roles import assert_same, resume, train_and_save
from torch.distributed.tensor import DTensor

from references.engine_steps import PAIRS, Setting, check, engine_of, one_process, rank_step, run_step
from references.rank_processes import Ranks, run_ranks
from references.token_passes import of_log_probs
from strop.engines.config import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig
from strop.engines.gradients import full
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel.experts import check_expert_parallel
from strop.engines.parallel.ranks import Parallel, alone
from strop.engines.training import TrainEngine

SLOW = pytest.mark.slow
Folder = Callable[[str], Path]


# Softmax over all experts; sigmoid, groups, a bias of the choice and a shared expert; biases and transposed matrices;
# a shared expert with a gate; weights in float32 whatever the model has.
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3_moe",
        pytest.param("deepseek_v3_experts", marks=pytest.mark.slow),
        pytest.param("gpt_oss", marks=SLOW),
        pytest.param("qwen2_moe", marks=SLOW),
        pytest.param("mixtral", marks=SLOW),
    ],
)
def test_two_ranks_with_half_of_the_experts_take_the_step_of_one_process(
    tiny_folder: Folder, kind: str
) -> None:
    folder = str(tiny_folder(kind))
    expected = one_process(Setting(folder=folder))
    check(Setting(folder=folder, ep_size=2), PAIRS, 2, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "afmoe",
        "flex_olmo",
        "granitemoe",
        "hunyuan_moe",
        "minimax_m2",
        "mimo_v2_flash",
        "olmoe",
    ],
)
def test_experts_of_more_families(tiny_folder: Folder, kind: str) -> None:
    folder = str(tiny_folder(kind))
    expected = run_step(alone("cpu"), Setting(folder=folder), PAIRS)
    check(Setting(folder=folder, ep_size=2), PAIRS, 2, expected)


@pytest.mark.parametrize(
    ("checkpointing", "sync"), [(True, "last"), pytest.param(False, "each", marks=pytest.mark.slow)]
)
def test_rows_cut_into_micro_batches_with_checkpointing(
    tiny_folder: Folder, checkpointing: bool, sync: str
) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    expected = one_process(Setting(folder=folder))
    setting = Setting(folder=folder, ep_size=2, max_tokens=28, checkpointing=checkpointing, sync=sync)
    check(setting, PAIRS, 2, expected)


def test_values_over_two_ranks(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3_moe_score"))
    expected = run_step(alone("cpu"), Setting(folder=folder, values=True), PAIRS)
    split = Setting(folder=folder, values=True, ep_size=2, max_tokens=28, checkpointing=True)
    check(split, PAIRS, 2, expected)


def test_a_rank_without_rows_and_experts_without_tokens_take_the_same_step(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("deepseek_v3_experts"))  # eight experts
    pairs = ((PAIRS[0][0][:1], PAIRS[0][1][:1]),)  # one token, through two of them
    expected = run_step(alone("cpu"), Setting(folder=folder), pairs)
    check(Setting(folder=folder, ep_size=2), pairs, 2, expected)


# Experts sharded over all ranks, and divided over those that share a matrix; a shared expert that is cut as well.
@pytest.mark.parametrize("ep_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "kind", ["qwen3_moe", pytest.param("glm4_moe", marks=SLOW), pytest.param("qwen2_moe", marks=SLOW)]
)
def test_ranks_that_share_matrices_take_the_step_of_one_process(
    tiny_folder: Folder, kind: str, ep_size: int
) -> None:
    folder = str(tiny_folder(kind))
    expected = one_process(Setting(folder=folder))
    check(Setting(folder=folder, tp_size=2, ep_size=ep_size, max_tokens=28), PAIRS, 2, expected)


def test_ranks_that_share_sequences_take_the_step_of_one_process(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    expected = one_process(Setting(folder=folder))
    check(Setting(folder=folder, sp_size=2, ep_size=2, checkpointing=True), PAIRS, 2, expected)


@pytest.mark.dist
@pytest.mark.parametrize(
    "axes",
    [
        {"ep_size": 2},
        {"ep_size": 4},
        {"ep_size": 2, "tp_size": 2},
        {"ep_size": 4, "tp_size": 2},
        {"tp_size": 2},
    ],
    ids=str,
)
def test_four_ranks_take_the_step_of_one_process(tiny_folder: Folder, axes: dict[str, int]) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    expected = one_process(Setting(folder=folder))
    cut = Setting(folder=folder, max_tokens=28, checkpointing=True, **axes)  # type: ignore[arg-type]
    check(cut, PAIRS, 4, expected)


@pytest.mark.dist
def test_fewer_experts_than_ranks_are_sharded_inside_of_their_matrices(tiny_folder: Folder) -> None:
    folder = str(tiny_folder("qwen3_moe_pair"))
    expected = run_step(alone("cpu"), Setting(folder=folder), PAIRS)
    check(Setting(folder=folder, ep_size=2), PAIRS, 4, expected)
    for shapes in run_ranks(held, 4, folder):
        assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (1, 16, 32)  # half of one of [2, 32, 32]


def held(ranks: Ranks, folder: str) -> dict[str, Any]:
    """In a rank: shapes of what it holds, and the digest of all."""
    engine = engine_of(ranks.join(expert_parallel=2), Setting(folder=folder, ep_size=2))
    shapes: dict[str, Any] = {
        name: tuple(parameter.to_local().shape)
        for name, parameter in engine.model.named_parameters()
        if isinstance(parameter, DTensor)
    }
    return shapes | {"checksum": engine.checksum()}


def test_each_rank_holds_half_of_the_experts_and_the_weights_have_the_digest_of_one_process(
    tiny_folder: Folder,
) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    whole = engine_of(alone("cpu"), Setting(folder=folder))
    first, second = run_ranks(held, 2, folder)
    assert first["checksum"] == second["checksum"] == whole.checksum()
    for name, parameter in whole.model.named_parameters():
        halves = first[name][0], second[name][0]
        assert sum(halves) == len(parameter), name
        if ".experts." in name:
            assert halves == (2, 2)


ON_TWO = EngineConfig(max_tokens_per_device=20, expert_parallel=2)
MESHES = [pytest.param(ON_TWO, marks=SLOW), dataclasses.replace(ON_TWO, tensor_parallel=2)]


@pytest.mark.parametrize("engine", MESHES, ids=["ep2", "tp2 ep2"])
def test_tokens_are_those_of_one_process(tiny_folder: Folder, engine: EngineConfig) -> None:
    case = Case(folder=str(tiny_folder("qwen3_moe")))
    alone_result = generate_between_steps(Ranks(0, 1, 0), case, [[0, 1, 2, 3, 4]])
    every_row = case.assignment[0]
    of_ranks = (every_row, every_row) if engine.tensor_parallel > 1 else ((0, 3, 6, 7, 1), (4, 2, 5))
    two = dataclasses.replace(case, assignment=of_ranks, engine=engine)
    requests = [[0, 1, 2, 4], [3]]
    results = run_ranks(generate_between_steps, 2, two, requests, timeout_s=60)
    for result, which in zip(results, requests, strict=True):
        for (tokens, log_probs), number in zip(result["outputs"], which, strict=True):
            assert tokens == alone_result["outputs"][number][0]
            np.testing.assert_allclose(log_probs, alone_result["outputs"][number][1], atol=1e-9)
        assert result["resharded"]
        for name, weight in alone_result["weights"].items():
            np.testing.assert_allclose(result["weights"][name], weight, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("engine", MESHES, ids=["ep2", "tp2 ep2"])
def test_a_checkpoint_goes_on_in_one_process_and_on_ranks_without_the_axis(
    tiny_folder: Folder, tmp_path: Path, engine: EngineConfig
) -> None:
    case = Case(folder=str(tiny_folder("qwen3_moe")), engine=engine)
    if engine.tensor_parallel > 1:  # one share of the rows
        case = dataclasses.replace(case, folder=str(tiny_folder("glm4_moe")))
    original = run_ranks(train_and_save, 2, case, tmp_path, False)
    for world_size, mesh in ((1, EngineConfig()), (2, EngineConfig()), (2, engine)):
        for seen in run_ranks(resume, world_size, dataclasses.replace(case, engine=mesh), tmp_path):
            assert_same(seen.saved, original[0].saved)
            assert_same(seen.after, original[0].after, tolerance=1e-9)


def adapted(
    parallel: Parallel, folder: str, optimizer: str, *, expert_parallel: int = 1
) -> dict[str, np.ndarray[Any, Any]]:
    """What is trained after two steps of this rank's rows: adapters of the attention, or all weights."""
    lora = LoraConfig(rank=3, alpha=6.0) if optimizer == "adamw" else LoraConfig()
    model = load_model(ModelConfig(path=folder, dtype="float64", lora=lora), device="cpu", parallel=parallel)
    optim = OptimizerConfig(name=optimizer, lr=1e-2, eps=1e-3)  # type: ignore[arg-type]
    config = EngineConfig(expert_parallel=expert_parallel)
    engine = TrainEngine(model, config, optim, total_steps=None, parallel=parallel)
    mine = PAIRS[parallel.dp_rank :: parallel.dp_size]
    rows = make_rows([torch.tensor(p) for p, _ in mine], [torch.tensor(r) for _, r in mine])
    for _ in range(2):
        engine.accumulate(rows, of_log_probs(lambda lp, _, __: -lp.sum() / 47, temperature=1.0))
        assert not engine.step().skipped
    named = model.named_parameters()
    return {name: full(p.detach()).numpy().copy() for name, p in named if p.requires_grad}


def adapted_on_ranks(ranks: Ranks, folder: str, optimizer: str) -> dict[str, np.ndarray[Any, Any]]:
    return adapted(ranks.join(expert_parallel=2), folder, optimizer, expert_parallel=2)


@pytest.mark.parametrize(("optimizer", "tolerance"), [("adamw", 1e-10), ("muon", 2e-3)])  # bfloat16 in muon
def test_adapters_and_muon_move_as_in_one_process(
    tiny_folder: Folder, optimizer: str, tolerance: float
) -> None:
    folder = str(tiny_folder("qwen3_moe"))
    expected = adapted(alone("cpu"), folder, optimizer)
    for found in run_ranks(adapted_on_ranks, 2, folder, optimizer):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            np.testing.assert_allclose(found[name], weight, atol=tolerance, err_msg=name)


@pytest.mark.parametrize(
    ("dtype", "largest", "median"),
    [pytest.param("float32", 1e-4, 1e-6, marks=pytest.mark.slow), ("bfloat16", 2.5, 0.08)],
)
def test_lower_precisions_stay_near_one_process(
    tiny_folder: Folder, dtype: str, largest: float, median: float
) -> None:
    """Grouped products in place of one expert after the other. In bfloat16 a rounding sends some tokens of the tiny
    router to other experts, so that only the median is near."""
    folder = str(tiny_folder("qwen3_moe"))
    expected = run_step(alone("cpu"), Setting(folder=folder, dtype=dtype), PAIRS)
    results = run_ranks(rank_step, 2, Setting(folder=folder, ep_size=2, dtype=dtype), PAIRS)
    ends = np.cumsum([len(response) for _, response in PAIRS]).tolist()
    for result in results:
        places = [place for i in result.rows for place in range(ends[i] - len(PAIRS[i][1]), ends[i])]
        for ours, wanted in zip(result.before, expected.before, strict=True):
            difference = (ours - wanted[places]).abs()
            assert float(difference.max()) < largest
            assert float(difference.median()) < median
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=largest / 10)


@pytest.mark.parametrize(
    ("config", "ep_size", "sentence"),
    [
        (transformers.Qwen3Config(), 2, "qwen3 is a dense model, without experts"),
        (
            transformers.Qwen3MoeConfig(num_experts=6, num_hidden_layers=1),
            4,
            "the 6 experts of a layer of the model do not divide over 4 ranks; use one of 1, 2, 3, 6$",
        ),
        (
            transformers.LongcatFlashConfig(num_layers=1),
            2,
            "the experts of longcat_flash are not parameters of one matrix per expert",
        ),
    ],
)
def test_models_whose_experts_cannot_be_divided_are_refused(config: Any, ep_size: int, sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"^critic.engine.expert_parallel is {ep_size}, but {sentence}"):
        check_expert_parallel(config, ep_size, section="critic.engine")
