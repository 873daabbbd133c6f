"""Sharded checkpoints: the same bits on any number of ranks, and a sentence for what does not fit."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from references.rank_processes import Ranks, run_ranks
from strop.engines.checkpoint import (
    load_sharded,
    save_sharded,
    save_sharded_async,
)
from strop.engines.checkpoint_reader import SavedTensors, shard_name
from strop.engines.parallel.ranks import alone

ALONE = alone("cpu")
NUMBERS = {"optimizer": {"num_steps": 3, "lr": 0.1}, "rng": [1, 2], "note": "ä"}


def whole_tensors() -> dict[str, Tensor]:
    """Tensors of several types, whose first axes no number of ranks divides; every float32 bit pattern kind."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (7, 5), generator=generator, dtype=torch.int64).to(torch.int32)
    bits[0] = torch.tensor([0, -(2**31), 1, 0x7F800000, 0x7FC00123], dtype=torch.int32)  # 0 -0 tiny inf nan
    return {
        "model/layers.0.weight": bits.view(torch.float32),
        "model/layers.1.weight": torch.randn(5, 4, generator=generator),
        "model/norm.weight": torch.randn(3, generator=generator),
        "model/one": torch.randn(1, 6, generator=generator),
        "model/half": torch.randn(3, 3, generator=generator).bfloat16(),
        "model/cube": torch.randn(3, 2, 5, generator=generator, dtype=torch.float64),
        "model/buffer": torch.randint(0, 99, (4,), generator=generator),
        "model/mask": torch.tensor([True, False, True]),
        "optim/step": torch.tensor(7.0),
    }


def saved_in(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint."""
    forms = SavedTensors(folder).tensors
    tensors = {name: torch.empty(form.shape, dtype=form.dtype) for name, form in forms.items()}
    load_sharded(folder, tensors)
    return tensors


def bits_of(tensor: Tensor) -> list[int]:
    return tensor.contiguous().flatten().view(torch.uint8).tolist()


def same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits_of(found[name]) == bits_of(tensor), name


def spread(tensors: dict[str, Tensor], mesh: Any, layout: str) -> dict[str, Tensor]:
    """The tensors as DTensors: sharded over the mesh's last axis, by rows or by columns; scalars stay plain."""
    if mesh is None:
        return {name: tensor.clone() for name, tensor in tensors.items()}
    spread_ones: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        dim = tensor.dim() - 1 if layout == "columns" else 0
        placements = [*[Replicate()] * (mesh.ndim - 1), Shard(dim)]
        if name == "model/one" and layout == "rows":
            placements = [Replicate()] * mesh.ndim
        is_plain = tensor.dim() == 0 or name == "model/mask"
        spread_ones[name] = tensor.clone() if is_plain else distribute_tensor(tensor, mesh, placements)
    return spread_ones


def save_on_ranks(ranks: Ranks, folder: Path, layout: str, shard_size: int, in_background: bool) -> int:
    """Bytes of the tensors in this rank's file."""
    parallel = ranks.join(shard_size=shard_size)
    tensors = spread(whole_tensors(), parallel.mesh, layout)
    if in_background:
        pending = save_sharded_async(folder, tensors, NUMBERS, parallel=parallel)
        for tensor in tensors.values():  # the live tensors change at once
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
        pending.result(60)
    else:
        save_sharded(folder, tensors, NUMBERS, parallel=parallel)
    content = (folder / shard_name(parallel.rank, parallel.world_size)).read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def load_on_ranks(ranks: Ranks, folder: Path, layout: str, shard_size: int) -> tuple[dict[str, Any], Any]:
    parallel = ranks.join(shard_size=shard_size)
    tensors = spread(
        {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}, parallel.mesh, layout
    )
    numbers = load_sharded(folder, tensors)
    return numbers, {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
        for name, tensor in tensors.items()
    }


def check_on_ranks(folder: Path, world_size: int, layout: str, shard_size: int = 0) -> None:
    for numbers, tensors in run_ranks(load_on_ranks, world_size, folder, layout, shard_size):
        assert numbers == NUMBERS
        same_bits(tensors, whole_tensors())


def check_alone(folder: Path) -> None:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in whole_tensors().items()}
    assert load_sharded(folder, tensors) == NUMBERS
    same_bits(tensors, whole_tensors())


def test_alone_keeps_every_bit_without_a_process_group(tmp_path: Path) -> None:
    save_sharded(tmp_path / "actor", whole_tensors(), NUMBERS, parallel=ALONE)
    names = sorted(path.name for path in (tmp_path / "actor").iterdir())
    assert names == ["shard-00001-of-00001.safetensors", "state.json"]
    check_alone(tmp_path / "actor")
    same_bits(saved_in(tmp_path / "actor"), whole_tensors())
    assert [name for name in SavedTensors(tmp_path / "actor").tensors if name.startswith("optim/")] == [
        "optim/step"
    ]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_saved_on_two_ranks_loads_on_one_and_on_two_cut_otherwise(
    tmp_path: Path, layout: str, in_background: bool
) -> None:
    sizes = run_ranks(save_on_ranks, 2, tmp_path, layout, 0, in_background)
    assert sum(sizes) == sum(t.numel() * t.element_size() for t in whole_tensors().values()), "once each"
    assert max(sizes) < 0.7 * sum(sizes), "both have work"
    check_alone(tmp_path)
    same_bits(saved_in(tmp_path), whole_tensors())
    check_on_ranks(tmp_path, 2, "columns" if layout == "rows" else "rows")


def test_saved_alone_loads_on_two_ranks(tmp_path: Path) -> None:
    save_sharded(tmp_path, whole_tensors(), NUMBERS, parallel=ALONE)
    check_on_ranks(tmp_path, 2, "rows")


def test_replicas_are_written_once_and_the_work_is_shared(tmp_path: Path) -> None:
    sizes = run_ranks(save_on_ranks, 2, tmp_path, "rows", 1, True)
    assert sum(sizes) == sum(tensor.numel() * tensor.element_size() for tensor in whole_tensors().values())
    assert max(sizes) - min(sizes) < 20, "of 553 bytes"
    check_alone(tmp_path)


@pytest.mark.dist
@pytest.mark.parametrize("saved_on", [1, 2, 3, 4])
def test_saved_on_any_number_of_ranks_loads_on_any_other(tmp_path: Path, saved_on: int) -> None:
    run_ranks(save_on_ranks, saved_on, tmp_path, "rows", 0, False)
    check_alone(tmp_path)
    for world_size in (1, 2, 3, 4):
        check_on_ranks(tmp_path, world_size, "columns")


@pytest.mark.dist
@pytest.mark.parametrize("in_background", [False, True])
def test_hybrid_meshes_reshard_too(tmp_path: Path, in_background: bool) -> None:
    run_ranks(save_on_ranks, 4, tmp_path, "rows", 2, in_background)
    check_alone(tmp_path)
    check_on_ranks(tmp_path, 4, "columns", shard_size=0)
    check_on_ranks(tmp_path, 4, "columns", shard_size=2)
    check_on_ranks(tmp_path, 2, "rows", shard_size=1)


def test_files_are_read_by_dcp_and_by_safetensors(tmp_path: Path) -> None:
    run_ranks(save_on_ranks, 2, tmp_path, "rows", 0, False)
    expected = whole_tensors()
    metadata = HuggingFaceStorageReader(str(tmp_path)).read_metadata()
    assert {name: one.size for name, one in metadata.state_dict_metadata.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    first, second = (safe_open(tmp_path / f"shard-0000{n}-of-00002.safetensors", "pt") for n in (1, 2))
    rows = torch.cat([file.get_tensor("model/layers.0.weight") for file in (first, second)])
    assert bits_of(rows) == bits_of(expected["model/layers.0.weight"]), "four rows and three"
    assert {"model/buffer", "model/cube"} <= set(first.keys()) & set(second.keys())


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save_sharded(tmp_path, whole_tensors(), NUMBERS, parallel=ALONE)
    wanted = whole_tensors()
    wanted["model/bias"] = torch.zeros(2)
    del wanted["model/one"]
    wanted["model/norm.weight"] = torch.zeros(4)
    wanted["model/half"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match="does not fit this model: it lacks model/bias; nothing here takes "
                       r"model/one; of another form: model/norm.weight \(float32 \[3\] saved, float32 \[4\] here\), "
                       r"model/half \(bfloat16 \[3, 3\] saved, float32 \[3, 3\] here\); use the model"):  # fmt: skip
        load_sharded(tmp_path, wanted)
    before = whole_tensors()["model/buffer"]
    model = {name: tensor for name, tensor in whole_tensors().items() if name.startswith("model/")}
    model["model/buffer"].zero_()
    load_sharded(tmp_path, model, leave=["optim/"])
    assert model["model/buffer"].equal(before)
    with pytest.raises(ValueError, match="nothing here takes optim/step"):
        load_sharded(tmp_path, model)
    many = {f"model/{i}": torch.zeros(1) for i in range(5)}
    with pytest.raises(ValueError, match="lacks model/0, model/1, model/2 and 2 more; nothing here takes"):
        load_sharded(tmp_path, many)


def test_a_lost_or_foreign_or_torn_shard_is_said(tmp_path: Path) -> None:
    run_ranks(save_on_ranks, 2, tmp_path, "rows", 0, False)
    second = tmp_path / "shard-00002-of-00002.safetensors"
    content = second.read_bytes()
    second.unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} is incomplete: {second.name} is missing"):
        SavedTensors(tmp_path)
    second.write_bytes(content[:-1])
    with pytest.raises(ValueError, match=f"is damaged: {second.name} cannot be read"):
        SavedTensors(tmp_path)
    second.write_bytes((tmp_path / "shard-00001-of-00002.safetensors").read_bytes())
    with pytest.raises(
        ValueError, match="is damaged: its shards hold 20 of the 35 numbers of model/layers.0.wei"
    ):
        SavedTensors(tmp_path)
    second.write_bytes(content)
    state = json.loads((tmp_path / "state.json").read_text())
    for change, message in (
        ({"tensors": {**state["tensors"], "model/norm.weight": {"dtype": "F32", "shape": [2]}}}, "describe"),
        (
            {"tensors": {"model/one": {"dtype": "F1", "shape": [2]}}},
            r"gives model/one the unknown type 'F1'; known",
        ),
        ({"format": 9}, "has format 9, this strop reads format 1"),
    ):
        (tmp_path / "state.json").write_text(json.dumps({**state, **change}))
        with pytest.raises(ValueError, match=message):
            SavedTensors(tmp_path)
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"is damaged: state\.json cannot be read"):
        SavedTensors(tmp_path)
    (tmp_path / "state.json").unlink()
    with pytest.raises(ValueError, match=r"holds no sharded checkpoint: it has no state\.json"):
        SavedTensors(tmp_path)


def test_what_the_format_cannot_hold_leaves_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "actor"
    for tensors, numbers, message in (
        ({"a": torch.zeros(1, dtype=torch.complex64)}, {}, "tensors of type torch.complex64 cannot be saved"),
        ({}, {"lr": float("nan")}, "not JSON compliant"),
        ({}, {"rng": object()}, "not JSON serializable"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            save_sharded(folder, tensors, numbers, parallel=ALONE)
        with pytest.raises((ValueError, TypeError), match=message):
            save_sharded_async(folder, tensors, numbers, parallel=ALONE)
    assert not folder.exists()


def sum_to_be(ranks: Ranks, folder: Path) -> str:
    parallel = ranks.join()
    unreduced = DTensor.from_local(torch.ones(2), parallel.mesh, [Partial()])
    with pytest.raises(ValueError) as refused:
        save_sharded(folder, {"a": unreduced}, {}, parallel=parallel)
    return str(refused.value)


def test_a_sum_that_is_not_taken_yet_is_refused(tmp_path: Path) -> None:
    assert all("partial placements" in said for said in run_ranks(sum_to_be, 2, tmp_path))


def test_the_background_write_is_of_the_moment_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()

    def late(*args: Any, **kwargs: Any) -> None:
        assert may_write.wait(30)
        save_file(*args, **kwargs)

    monkeypatch.setattr("strop.engines.checkpoint.save_file", late)
    live = whole_tensors()
    numbers: dict[str, Any] = {"rng": [1, 2]}
    pending = save_sharded_async(tmp_path, live, numbers, parallel=ALONE)
    for tensor in live.values():
        tensor.zero_()
    numbers["rng"].append(3)
    assert not pending.done()
    may_write.set()
    pending.result(30)
    assert pending.done()
    same_bits(saved_in(tmp_path), whole_tensors())
    assert SavedTensors(tmp_path).numbers == {"rng": [1, 2]}


def test_a_refusal_of_the_disk_comes_with_the_result(tmp_path: Path) -> None:
    (tmp_path / "actor").write_text("a file where the folder should be")
    pending = save_sharded_async(tmp_path / "actor", whole_tensors(), {}, parallel=ALONE)
    with pytest.raises(OSError, match="File exists"):
        pending.result(30)
    assert pending.done()


def test_each_tensor_of_a_file_starts_at_a_multiple_of_its_element_size(tmp_path: Path) -> None:
    save_sharded(tmp_path, whole_tensors(), NUMBERS, parallel=ALONE)
    content = (tmp_path / "shard-00001-of-00001.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    del header["__metadata__"]
    assert header.keys() == whole_tensors().keys()
    for name, entry in header.items():
        assert (8 + length + entry["data_offsets"][0]) % whole_tensors()[name].element_size() == 0, name
