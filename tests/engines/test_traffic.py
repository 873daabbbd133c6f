"""Bytes that ranks send, beside the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmark_modules import benchmark_module
from torch import Tensor

from references.engine_steps import Setting, engine_of, ids
from references.rank_processes import RankFailed, Ranks, run_ranks
from references.token_passes import of_log_probs
from strop.engines.attention_form import AttentionForm
from strop.engines.packing import make_rows
from strop.engines.parallel.context import ContextAttention, context_layout
from strop.engines.segments import Segment

sent_bytes = benchmark_module("sent_bytes").sent_bytes
traffic = benchmark_module("traffic")
Folder = Callable[[str], Path]


def collectives(ranks: Ranks) -> dict[str, float]:
    """In one of three ranks: each operation once."""
    ranks.join()
    rows = torch.zeros(6, 2, dtype=torch.float64)
    third = torch.zeros(2, 2, dtype=torch.float64)
    with sent_bytes() as counted:
        dist.all_gather([torch.empty_like(third) for _ in range(3)], third)
        dist.all_gather_into_tensor(torch.empty_like(rows), third)
        dist.reduce_scatter(third, list(rows.chunk(3)))
        dist.reduce_scatter_tensor(third, rows)
        dist.all_reduce(rows)
        dist.all_to_all_single(torch.empty_like(rows), rows)
        counts = [1, 2, 3]
        received = rows.new_empty((3 * counts[ranks.rank], 2))
        dist.all_to_all_single(received, rows, [counts[ranks.rank]] * 3, counts)
        dist.barrier()
    dist.all_reduce(rows)  # after it is over
    return counted.of


def test_a_rank_sends_what_the_algorithms_of_the_field_send() -> None:
    # Rows of 16 bytes: 2 others get 2 rows in a gather or a sum, an all-reduce is both, a rank keeps its own of 6.
    for rank, of in enumerate(run_ranks(collectives, 3)):
        assert of.pop("alltoall_base_") == 4 * 16 + (6 - (1, 2, 3)[rank]) * 16
        assert of == {
            "allgather_": 64.0, "_allgather_base_": 64.0, "reduce_scatter_": 64.0, "_reduce_scatter_base_": 64.0,
            "allreduce_": 128.0,
        }  # fmt: skip


def unknown(ranks: Ranks) -> None:
    ranks.join()
    with sent_bytes():
        dist.gather(torch.zeros(1), [torch.zeros(1)] * 2 if ranks.rank == 0 else None)


def test_an_operation_that_is_not_known_is_named() -> None:
    with pytest.raises(RankFailed, match="bytes that gather_ sends are not known"):
        run_ranks(unknown, 2)


HEADS, KEY_HEADS, DIM, VALUE_DIM = 3, 1, 4, 2


def layer_bytes(ranks: Ranks) -> tuple[float, float]:
    """In a rank: bytes sent by one layer's attention, forward and backward."""
    group = ranks.join(context_parallel=ranks.world_size).cp_group
    layout = context_layout([Segment(start=0, length=41)], 41, ranks.world_size)
    attention = ContextAttention(layout, group, torch.device("cpu"))
    n = layout.tokens.shape[1]
    shapes = ((HEADS, DIM), (KEY_HEADS, DIM), (KEY_HEADS, VALUE_DIM))
    query, key, value = (torch.randn(n, *shape, requires_grad=True) for shape in shapes)
    with sent_bytes() as forward:
        out = attention.attend(0, query, key, value, AttentionForm(scaling=1.0))
    with sent_bytes() as backward:
        out.sum().backward()
    return forward.total, backward.total


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.dist)])
def test_a_layer_of_a_context_sends_keys_and_values_alone(size: int) -> None:
    n = math.ceil(41 / size)
    expected = (size - 1) * n * KEY_HEADS * (DIM + VALUE_DIM) * 4  # the formula of context.py
    assert run_ranks(layer_bytes, size) == [(expected, expected)] * size


def step_bytes(ranks: Ranks, setting: Setting) -> float:
    """In a rank: bytes sent by an accumulation over two micro-batches and a step."""
    parallel = ranks.join(**setting.axes)
    engine = engine_of(parallel, setting)
    rows = [(ids(20, 50 + i), ids(21, 60 + i)) for i in range(2 * parallel.dp_size)][
        parallel.dp_rank :: parallel.dp_size
    ]
    data = make_rows([torch.tensor(p) for p, _ in rows], [torch.tensor(r) for _, r in rows])

    def loss(log_probs: Tensor, entropies: Tensor, _: Tensor) -> Tensor:
        return (log_probs + entropies).sum()

    with sent_bytes() as counted:
        engine.accumulate(data, of_log_probs(loss, temperature=1.0))
        engine.step()
    return counted.total


def qwen3(tensor: int) -> Any:
    """The tiny model of the tests: 4 heads of 8, 2 key heads, 32 wide, 48 in its feed-forward parts, tied head."""
    keys_and_values = ((16 // min(tensor, 2), 32),) * 2  # of four ranks each has one head whole
    cut = ((32 // tensor, 32), (32, 32 // tensor), (48 // tensor, 32), (48 // tensor, 32), (32, 48 // tensor))
    norms = ((32,), (32,), (8,), (8,))
    return traffic.TrafficModel(
        layers=2, hidden=32, heads=4, key_heads=2, key_dim=8, value_dim=8,
        layer_cut=cut if tensor > 2 else cut + keys_and_values,
        layer_whole=norms + ((16, 32),) * 2 if tensor > 2 else norms,
        embedding=((math.ceil(61 / tensor), 32),), head=(), norm=((32,),),
    )  # fmt: skip


def predicted(setting: Setting, size: int, rank: int) -> Any:
    """Of a rank: two rows of 40 tokens, of which 21 are predicted, one in each micro-batch."""
    width = 8 if setting.dtype == "float64" else 4
    plan = traffic.TrafficPlan(
        shards=size // (setting.tp_size * setting.pp_size), tensor=setting.tp_size, sequence=setting.sp_size,
        context=setting.cp_size,
        checkpointing=setting.checkpointing, activation_bytes=width, gradient_bytes=width, result_bytes=width,
        each_pass=setting.sync == "each", stage_layers=(1, 1) if setting.pp_size > 1 else (),
        stage=rank // (size // setting.pp_size),
    )  # fmt: skip
    batches = [traffic.MicroBatchSize(num_tokens=40, num_predicted=21)] * 2
    return traffic.step_traffic(qwen3(setting.tp_size), plan, batches)


PLANS = {
    "sharded": ({}, 2),
    "tensor": ({"tp_size": 2}, 2),
    "sequence": ({"sp_size": 2}, 2),
    "context": ({"cp_size": 2}, 2),
    "stages": ({"pp_size": 2}, 2),
}
MORE = {
    "tensor of four": ({"tp_size": 4}, 4),
    "sequence of four": ({"sp_size": 4}, 4),
    "context of four": ({"cp_size": 4}, 4),
    "stages and data": ({"pp_size": 2}, 4),
    "stages and tensor": ({"pp_size": 2, "tp_size": 2}, 4),
    "context and data": ({"cp_size": 2}, 4),
    "tensor and data": ({"tp_size": 2}, 4),
    "context and tensor": ({"cp_size": 2, "tp_size": 2}, 4),
    "context and sequence": ({"cp_size": 2, "sp_size": 2}, 4),
}


@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    ("axes", "size"),
    [
        *(pytest.param(*plan, id=name) for name, plan in PLANS.items()),
        *(pytest.param(*plan, id=name, marks=pytest.mark.dist) for name, plan in MORE.items()),
    ],
)
def test_a_step_sends_what_the_formulas_say(
    tiny_folder: Folder, axes: dict[str, int], size: int, checkpointing: bool
) -> None:
    row_ranks = axes.get("sp_size", 1) * axes.get("cp_size", 1)
    setting = Setting(
        folder=str(tiny_folder("qwen3")),
        max_tokens=math.ceil(40 / row_ranks),
        checkpointing=checkpointing,
        sync="each" if checkpointing else "last",
        **axes,
    )
    for rank, total in enumerate(run_ranks(step_bytes, size, setting)):
        expected = predicted(setting, size, rank)
        assert total == pytest.approx(expected.total, rel=0.05), expected
