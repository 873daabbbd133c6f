"""Batches and tensors come out of the object store as they went in, and only what is theirs goes in."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray_cluster import shared_cluster
from ray_workers import batch

from strop.controller.ray.future import DataProtoFuture, LocalBatch
from strop.controller.ray.transport import HEAVY_BYTES, BatchRefs, detached_from_store, payload_bytes
from strop.protocol import DataProto, is_jagged, jagged, rows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True, scope="module")
def cluster() -> None:
    shared_cluster()


def assert_same(left: DataProto, right: DataProto) -> None:
    assert list(left.tensors()) == list(right.tensors())
    assert len(left) == len(right)
    assert (left.batch is None) == (right.batch is None)
    for name, column in left.tensors().items():
        other = right.tensors()[name]
        assert column.dtype == other.dtype
        assert is_jagged(column) == is_jagged(other)
        for mine, theirs in zip(rows(column), rows(other), strict=True):
            assert torch.equal(mine.nan_to_num(7.5), theirs.nan_to_num(7.5))
    assert list(left.non_tensor_batch) == list(right.non_tensor_batch)
    for name, array in left.non_tensor_batch.items():
        assert array.dtype == right.non_tensor_batch[name].dtype
        assert array.tolist() == right.non_tensor_batch[name].tolist()
        assert right.non_tensor_batch[name].flags.writeable
    assert left.meta_info == right.meta_info


def whole(stored: BatchRefs, get: Callable[[list[Any]], list[Any]]) -> DataProto:
    return stored.read(stored.contents.tensors, stored.contents.others, get)


def many_kinds(num_rows: int, width: int = 3) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    lengths = [number % 4 for number in range(num_rows)]
    return DataProto.from_dict(
        {
            "bf16": torch.rand(num_rows, width, generator=generator).bfloat16(),
            "mask": torch.rand(num_rows, width, generator=generator) > 0.5,
            "nan": torch.full((num_rows,), torch.nan, dtype=torch.float64),
            "ids": jagged([torch.arange(length) for length in lengths]),
            "log_probs": jagged([torch.rand(length, generator=generator) for length in lengths]),
            "wide": jagged([torch.rand(length + 1, 2, generator=generator) for length in lengths]),
            "empty": torch.zeros(num_rows, 0),
        },
        {
            "uid": [f"u{number}" for number in range(num_rows)],
            "any": [{"a": [number]} for number in range(num_rows)],
            "floats": np.arange(num_rows, dtype=np.float32),
        },
        {"temperature": 1.0, "nested": {"x": (1, 2)}},
    )


@pytest.mark.parametrize("num_rows", [1, 5])
def test_batches_of_every_kind_of_column_survive(num_rows: int) -> None:
    data = many_kinds(num_rows)
    back = ray.get(ray.put(data))
    assert_same(data, back)
    # Columns with rows of equal length can be computed with each other.
    assert is_jagged(back.tensors()["log_probs"] * back.tensors()["ids"])
    assert_same(data, whole(BatchRefs.of(data), ray.get))


def test_batches_without_rows_or_columns_survive() -> None:
    none = many_kinds(3)[:0]
    for data in (
        none,
        DataProto(),
        DataProto.from_dict({}, {"uid": ["a"]}),
        many_kinds(4).select([], []),
        DataProto(meta_info={"only": "facts"}),
    ):
        assert_same(data, ray.get(ray.put(data)))
        assert_same(data, whole(BatchRefs.of(data), ray.get))


def test_heavy_columns_are_fetched_alone() -> None:
    width = HEAVY_BYTES // 4
    data = DataProto.from_dict(
        {"light": torch.arange(2.0), "heavy": torch.ones(2, width), "more": torch.zeros(2, width)},
        {"uid": ["a", "b"], "text": ["x" * HEAVY_BYTES, "y"]},
        {"step": 3},
    )
    stored = BatchRefs.of(data)
    assert (stored.contents.num_rows, set(stored.heavy)) == (2, {"heavy", "more", "text"})
    fetched: list[int] = []

    def get(references: list[object]) -> list[object]:
        fetched.append(len(references))
        return list(ray.get(references))

    assert_same(data.select(["light"], ["uid"]), stored.read(["light"], ["uid"], get))
    assert_same(
        data.select(["heavy", "light"], []),
        stored.read(["heavy", "light"], [], get).select(["heavy", "light"]),
    )
    assert_same(data, whole(stored, get))
    assert fetched == [1, 2, 4]


def test_what_is_read_from_the_store_is_not_the_callers_to_write_but_a_copy_is() -> None:
    data = DataProto.from_dict({"scores": torch.zeros(100_000)})
    reference = ray.put(data)
    own = detached_from_store(ray.get(reference))
    own.tensors()["scores"].add_(1)
    assert float(ray.get(reference).tensors()["scores"].sum()) == 0


def test_a_view_of_a_few_rows_sends_these_rows_only() -> None:
    whole = DataProto.from_dict({"ids": jagged([torch.arange(1000)] * 1000), "x": torch.zeros(1000, 1000)})
    few = whole[2:4]
    assert payload_bytes(few) == 2 * 1000 * 8 + 3 * 8 + 2 * 1000 * 4
    before = ray.get(ray.put(few))
    assert before.tensors()["x"].untyped_storage().nbytes() == 8000
    assert before.tensors()["ids"].values().untyped_storage().nbytes() == 16000


def test_tensors_arrive_without_their_graph() -> None:
    weights = torch.ones(3, requires_grad=True)
    back = ray.get(ray.put({"y": weights * 2, "t": weights.detach()[:2].t(), "none": torch.zeros(2, 0)}))
    assert not back["y"].requires_grad
    assert back["y"].tolist() == [2.0, 2.0, 2.0]
    assert back["t"].shape == (2,)
    assert back["none"].shape == (2, 0)


def test_content_is_counted_and_references_are_not() -> None:
    assert payload_bytes([1, 2.0, "abc", b"de", None, {"k": (True,)}]) == 8 + 8 + 3 + 2 + 1 + 8
    assert payload_bytes(torch.zeros(3, dtype=torch.int16)) == 6
    assert payload_bytes(np.array(["ab", "c"], dtype=object)) == 3
    assert payload_bytes(lambda: 1) == 0
    data = batch(4)
    chunks = DataProtoFuture.from_local(data).chunk(2)
    assert payload_bytes(chunks[0]) < payload_bytes(data)
    elsewhere = DataProtoFuture([LocalBatch(data)])
    assert payload_bytes(data) <= payload_bytes(elsewhere) <= payload_bytes(data) + 8


@pytest.mark.slow
def test_without_ray_the_controller_works_and_the_runtime_names_the_extra() -> None:
    program = """
import sys
import strop.controller
assert "ray" not in sys.modules, "strop.controller must not need ray"
sys.modules["ray"] = None
try:
    import strop.controller.ray
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=100, check=True
    )
    assert "pip install 'strop[ray]'" in done.stdout
