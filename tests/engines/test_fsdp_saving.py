"""Checksums and model folders of a sharded engine are those of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fsdp_cases import Case, accumulate, engine_of
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from references.rank_processes import Ranks, run_ranks
from strop.engines.config import EngineConfig

Folder = Callable[[str], Path]
UNEVEN = ((0, 3, 6, 7, 1), (4, 2, 5))


def save(ranks: Ranks, case: Case, folder: str) -> tuple[str, str]:
    """Checksums before and after a step; the untrained model is saved."""
    engine = engine_of(case, ranks.join(shard_size=case.engine.shard_size) if ranks.world_size > 1 else None)
    engine.save_model(Path(folder))
    before = engine.checksum()
    accumulate(engine, case, 0, case.assignment[ranks.rank])
    engine.step()
    return before, engine.checksum()


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=pytest.mark.slow), "llama", "llama_score"])
def test_a_sharded_model_saves_the_files_of_one_process(
    tiny_folder: Folder, tmp_path: Path, kind: str
) -> None:
    case = Case(
        folder=str(tiny_folder(kind)), dtype="float32", assignment=UNEVEN, values=kind.endswith("_score")
    )
    alone = save(Ranks(0, 1, 0), case, str(tmp_path / "alone"))
    sums = run_ranks(save, 2, case, str(tmp_path / "sharded"))
    files = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "sharded").iterdir())
    for name in files:
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "sharded" / name).read_bytes(), name
    assert sums[0] == sums[1]
    assert sums[0][0] == alone[0]
    assert sums[0][1] != sums[0][0]
    read = AutoModelForSequenceClassification if case.values else AutoModelForCausalLM
    original = read.from_pretrained(case.folder)
    for name, parameter in read.from_pretrained(tmp_path / "sharded").named_parameters():
        assert torch.equal(parameter, original.get_parameter(name)), name


def save_slowly(ranks: Ranks, case: Case, folder: str) -> bool:
    """The disk takes three times as long as ranks may wait for each other; True where the folder is written."""
    engine = engine_of(case, ranks.join(timeout_s=2.0))
    module: Any = engine.model.module
    save_pretrained = module.save_pretrained

    def slow(*args: Any, **settings: Any) -> None:
        time.sleep(6.0)
        save_pretrained(*args, **settings)

    module.save_pretrained = slow
    engine.save_model(Path(folder))
    return (Path(folder) / "model.safetensors").is_file()


def test_a_disk_may_be_slower_than_ranks_wait_for_each_other(tiny_folder: Folder, tmp_path: Path) -> None:
    case = Case(folder=str(tiny_folder("llama")), assignment=UNEVEN)
    assert run_ranks(save_slowly, 2, case, str(tmp_path / "model"))[0]


def checksum_of_bits(ranks: Ranks, case: Case) -> list[str]:
    engine = engine_of(case, ranks.join(shard_size=case.engine.shard_size))
    sums = [engine.checksum()]
    _, parameter = list(engine.model.named_parameters())[-1]
    if ranks.rank == 1:  # the last rank holds the last rows
        with torch.no_grad():
            parameter.to_local().view(torch.int64).flatten()[-1] ^= 1
    return [*sums, engine.checksum()]


def test_the_checksum_sees_a_single_bit_of_any_rank(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("llama")), assignment=UNEVEN, engine=EngineConfig())
    first, second = run_ranks(checksum_of_bits, 2, case)
    assert first == second
    assert first[0] != first[1]
    assert np.array_equal(first[0], engine_of(case, None).checksum())
