"""Weights gathered to rank 0 alone: their values for every way to cut a model, and the bytes that each rank sends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from references.engine_steps import Setting, engine_of
from references.rank_processes import Ranks, run_ranks
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.parallel.first_rank import GatherToFirst
from strop.engines.parallel.pipeline import whole_weight
from strop.engines.parallel.sent_bytes import sent_bytes
from strop.engines.weights import named_weights, weights_metadata

Folder = Callable[[str], Path]
ROWS, COLUMNS = 48, 64
HEADER_BYTES = 32
"""Four numbers of eight bytes, that each rank tells each other."""


def test_a_process_alone_has_the_weight_already() -> None:
    model = nn.Linear(3, 2)
    weight = GatherToFirst()(model, "weight", model.weight, torch.bfloat16)
    assert torch.equal(weight, model.weight.to(torch.bfloat16))  # type: ignore[arg-type]
    assert GatherToFirst()(model, "weight", model.weight, torch.float32).data_ptr() == model.weight.data_ptr()  # type: ignore[union-attr]


def bytes_of_a_matrix(ranks: Ranks, shard_size: int) -> list[dict[str, float]]:
    """Sent by this rank, for two matrices of 48 rows of 256 bytes: to rank 0, and to all."""
    parallel = ranks.join(shard_size=shard_size)
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    fully_shard(model, mesh=parallel.mesh)
    counted = []
    for gather in (GatherToFirst(), whole_weight):
        with sent_bytes() as sent:
            for _ in range(2):
                gather(model, "weight", model.weight, torch.float32)
        counted.append(sent.of)
    return counted


@pytest.mark.dist
@pytest.mark.parametrize(("shard_size", "senders"), [(0, (1, 2, 3)), (2, (1,))])
def test_each_part_travels_once_and_to_rank_0_alone(shard_size: int, senders: tuple[int, ...]) -> None:
    part = ROWS * COLUMNS * 4 // (len(senders) + 1)
    for rank, (to_first, to_all) in enumerate(run_ranks(bytes_of_a_matrix, 4, shard_size)):
        assert to_first.pop("allgather_") == 3 * HEADER_BYTES, "of weights that are cut alike once"
        assert to_first == ({"send": 2 * part} if rank in senders else {})
        assert sum(to_all.values()) == 2 * len(senders) * part, "an all-gather sends it to each of the others"


def gathered_model(ranks: Ranks, folder: str, dtype: str, sizes: dict[str, int]) -> list[str]:
    """Names of the weights that are not those of the folder; on rank 0, and whatever came to others."""
    names = {"tensor_parallel": "tp_size", "pipeline_parallel": "pp_size", "expert_parallel": "ep_size"}
    setting = Setting(folder=folder, **{names[name]: size for name, size in sizes.items() if name in names})
    module = engine_of(ranks.join(**sizes), setting).model.module
    whole = load_model(ModelConfig(path=folder, dtype="float64")).module
    kind: torch.dtype = getattr(torch, dtype)
    expected, tensors = named_weights(whole), named_weights(module)
    wrong, gather = [], GatherToFirst()
    for weight in weights_metadata(module):
        weights = gather(module, weight.name, tensors[weight.name], kind)
        if (weights is not None) != (ranks.rank == 0):
            wrong.append(f"{weight.name} on rank {ranks.rank}")
        elif weights is not None and not torch.equal(weights, expected[weight.name].to(kind)):
            wrong.append(weight.name)
    return wrong


@pytest.mark.dist
@pytest.mark.parametrize(
    ("kind", "dtype", "sizes"),
    [
        ("qwen3", "float32", {}),
        ("llama_biased", "bfloat16", {"shard_size": 2}),
        ("qwen3", "float32", {"tensor_parallel": 2}),  # 61 tokens on two ranks, columns, rows of rows
        ("qwen3", "bfloat16", {"tensor_parallel": 4}),
        ("qwen3", "float32", {"tensor_parallel": 2, "shard_size": 1}),
        ("qwen3", "float32", {"pipeline_parallel": 2}),  # the head is the embedding
        ("qwen3", "float32", {"pipeline_parallel": 2, "tensor_parallel": 2}),
    ],
)
def test_rank_0_gets_the_weights_of_one_process(
    tiny_folder: Folder, kind: str, dtype: str, sizes: dict[str, int]
) -> None:
    assert run_ranks(gathered_model, 4, str(tiny_folder(kind)), dtype, sizes) == [[]] * 4
