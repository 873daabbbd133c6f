"""Changes of weights in place of whole ones: their form, and syncs over the network that send them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.sync_cases import Pair, bits, side_by_side
from torch import Tensor, nn

from strop.engines.checksum.models import digest_weights
from strop.engines.weight_parts import Runs, part_of
from strop.engines.weights import TensorMetadata
from strop.rollout.weight_sync import collective, comparison, sender, shared_memory
from strop.rollout.weight_sync.delta import (
    ChangedPart,
    Changes,
    SentParts,
    bits_of,
    changes_between,
    joined_changes,
    read_changes,
    write_changes,
)
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.stream import Bucket
from strop.rollout.weight_sync.target import WeightTarget
from strop.rollout.weight_sync.types import SyncCorrupted, SyncReport

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn)
NAN, OTHER_NAN, ZERO, MINUS_ZERO = 0x7FC0, 0x7FC1, 0x0000, -0x8000
"""Bits of bfloat16 values that compare in ways of their own."""


def metadata(tensor: Tensor, name: str = "w") -> TensorMetadata:
    return TensorMetadata(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """[numel] with every bit at random; of bool, 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    data = torch.randint(high, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype)


def through_a_bucket(old: Tensor, new: Tensor) -> tuple[Tensor, int] | None:
    """`old` after the changes to `new` went through a bucket, and their bytes; None where they are too many."""
    changes = changes_between(bits_of(old).clone(), [(0, bits_of(new))])
    if changes is None:
        return None
    data = torch.full((64 + changes.num_bytes,), 0xAA, dtype=torch.uint8)
    data[64:] = write_changes(changes)
    held, count = old.clone(), len(changes.positions)
    read_changes(data, metadata(new), ChangedPart(offset=64, count=count, places=all_of(new))).apply(held)
    return held, changes.num_bytes


def all_of(tensor: Tensor) -> Runs:
    return Runs(first=0, stride=0, count=1, length=tensor.nbytes)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES), numel=st.integers(0, 400), share=st.sampled_from([0.0, 0.01, 0.05, 0.3, 1.0]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_changes_give_every_bit_in_fewer_bytes_or_are_refused(
    dtype: torch.dtype, numel: int, share: float, seed: int
) -> None:
    old, other = random_bits(numel, dtype, seed), random_bits(numel, dtype, seed + 1000)
    chosen = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < share
    new = torch.where(chosen, bits_of(other), bits_of(old)).view(dtype)
    result = through_a_bucket(old, new)
    num_changed = int((bits_of(old) != bits_of(new)).sum())
    if result is None:
        # Two bytes for each position, and one to fill up an odd number of single bytes.
        assert num_changed * (dtype.itemsize + 2) + 1 >= numel * dtype.itemsize
    else:
        held, num_bytes = result
        assert same(held, new)
        assert num_bytes < numel * dtype.itemsize


def test_gaps_of_more_than_16_bits_are_bridged() -> None:
    # 65535 is the largest gap; 65536 needs one element between, as does each further 65535.
    for positions in ([0], [65535], [65536], [131070, 131071], [5, 65541, 399_999]):
        old = torch.zeros(400_000, dtype=torch.bfloat16)
        new = old.clone()
        new[positions] = 1.0
        result = through_a_bucket(old, new)
        assert result is not None, positions
        assert same(result[0], new), positions
        assert result[1] <= 4 * (len(positions) + 400_000 // 65535), positions


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_differing_elements_are_found_in_every_part(
    is_compiled: bool, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_PART", 64)
    if not is_compiled:
        monkeypatch.setattr(comparison, "comparison_kernel", lambda: None)
    elif comparison.comparison_kernel() is None:
        pytest.skip("nothing can be compiled here")
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for kind, count in itertools.product((np.int8, np.int16, np.int32, np.int64), (1, 63, 64, 999, 1000)):
            old = np.zeros(count, dtype=kind)
            for positions in ([], [0], [count - 1], sorted({0, count // 2, count - 1})):
                new = old.copy()
                new[positions] = 1
                found = comparison.differing(old, new, count)
                assert found is not None
                assert found.tolist() == sorted(set(positions))
            assert comparison.differing(old, old + kind(1), count - 1) is None
            few = np.zeros(count, dtype=kind)
            few[:3] = 1
            assert comparison.differing(old, few, min(count, 3) - 1) is None
    finally:
        torch.set_num_threads(threads)


def test_bits_are_compared_not_values() -> None:
    old = torch.zeros(300, dtype=torch.int16)
    old[:4] = torch.tensor([NAN, NAN, ZERO, MINUS_ZERO], dtype=torch.int16)
    new = old.clone()
    new[1], new[2], new[3] = OTHER_NAN, MINUS_ZERO, ZERO
    held, num_bytes = through_a_bucket(old.view(torch.bfloat16), new.view(torch.bfloat16)) or (old, 0)
    assert same(held, new)
    assert num_bytes == 3 * 4  # the NaN that stayed is not among them


def test_a_tensor_of_one_element_or_of_none_travels_whole() -> None:
    for old, new in ((torch.tensor(1.0), torch.tensor(2.0)), (torch.empty(0, 3), torch.empty(0, 3))):
        assert changes_between(bits_of(old).clone(), [(0, bits_of(new))]) is None


def test_changes_are_written_into_a_weight_that_is_not_contiguous() -> None:
    new = torch.arange(60, dtype=torch.bfloat16).view(6, 10)
    old = new.clone()
    old[2, 3] = old[5, 9] = -1.0
    changes = changes_between(bits_of(old).clone(), [(0, bits_of(new))])
    assert changes is not None
    held = old.t().contiguous().t()
    assert not held.is_contiguous()
    changes.apply(held)
    assert torch.equal(held, new)


@pytest.mark.parametrize(
    ("gaps", "count", "message"),
    [
        ([3, 0], 2, "or one twice"),
        ([8, 7], 2, r"elements up to 15 of 15"),
        ([1, 1], 9, "9 changes of torch.bfloat16 from byte 0 on, in 8 bytes"),
        ([1, 1], -1, "-1 changes"),
    ],
)
def test_changes_that_fit_no_weight_are_refused(gaps: list[int], count: int, message: str) -> None:
    weight = TensorMetadata(name="w", shape=(3, 5), dtype=torch.bfloat16)
    data = torch.tensor([0, 0, *gaps], dtype=torch.int16).view(torch.uint8)
    places = Runs(first=0, stride=0, count=1, length=30)
    with pytest.raises(ValueError, match=message):
        read_changes(data, weight, ChangedPart(offset=0, count=count, places=places))


def test_values_that_begin_in_the_middle_of_an_element_are_refused() -> None:
    weight = TensorMetadata(name="w", shape=(3,), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="1 changes of torch.bfloat16 from byte 1 on"):
        read_changes(
            torch.zeros(20, dtype=torch.uint8),
            weight,
            ChangedPart(offset=1, count=1, places=all_of(torch.zeros(3))),
        )


@pytest.mark.parametrize(
    "places", [Runs(first=1, stride=0, count=1, length=2), Runs(first=0, stride=8, count=3, length=16)]
)
def test_parts_that_a_weight_does_not_have_are_refused(places: Runs) -> None:
    weight = TensorMetadata(name="w", shape=(3, 5), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a part at Runs"):
        read_changes(
            torch.zeros(20, dtype=torch.uint8), weight, ChangedPart(offset=0, count=1, places=places)
        )


def test_changes_of_columns_are_changes_of_the_whole() -> None:
    # Columns 2 to 4 of 5, of three rows: elements 2, 3, 4, 7, 8, 9, 12, 13, 14 of the whole.
    weight = TensorMetadata(name="w", shape=(3, 5), dtype=torch.float32)
    places = Runs(first=8, stride=20, count=3, length=12)
    changes = Changes(torch.tensor([0, 4, 8]), torch.tensor([5, 6, 7], dtype=torch.int32))
    held = torch.zeros(3, 5)
    data = write_changes(changes)
    read_changes(data, weight, ChangedPart(offset=0, count=3, places=places)).apply(held)
    assert held.view(torch.int32).tolist() == [[0, 0, 5, 0, 0], [0, 0, 0, 6, 0], [0, 0, 0, 0, 7]]


def changes_of(last: SentParts, tensor: Tensor, *, is_known: bool, name: str = "w") -> int | None:
    """Number of the changes of a tensor that one rank holds; None where all of it has to travel."""
    part = part_of(tensor, tensor.dtype, rank=0, num_ranks=1)
    assert part is not None
    changes = last.changes(metadata(tensor, name), part, part.word_sum(tensor.nbytes), is_known=is_known)
    return None if changes is None else len(changes.positions)


def test_weights_of_more_than_two_bytes_are_forgotten_once_most_of_them_changed() -> None:
    for dtype, is_kept in ((torch.float32, False), (torch.bfloat16, True)):
        last, weight = SentParts(), torch.zeros(1000, dtype=dtype)
        changes_of(last, weight, is_known=False)
        assert last.num_bytes == weight.nbytes
        assert changes_of(last, weight + 1, is_known=True) is None
        assert last.num_bytes == (weight.nbytes if is_kept else 0)
        few = weight + 1
        few[7] = 3
        assert changes_of(last, few, is_known=True) == (1 if is_kept else None)
        assert changes_of(last, few, is_known=True) == 0, "the sum shows it"
        assert changes_of(last, few[None], is_known=True) == 0
        assert changes_of(last, few[1:], is_known=True) is None, "another part"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_weights_that_memory_has_no_room_for_travel_whole(
    caplog: pytest.LogCaptureFixture, num_ranks: int
) -> None:
    """Of 10,000 bytes a rank that are free, those that all ranks of the machine keep take at most half."""
    last = SentParts(free_bytes=lambda: num_ranks * (10_000 - last.num_bytes))
    last.num_ranks = num_ranks
    weights = {name: torch.zeros(1000, dtype=torch.bfloat16) for name in "abc"}
    for _ in range(2):
        counts = {
            name: changes_of(last, weight, is_known=True, name=name) for name, weight in weights.items()
        }
        for weight in weights.values():
            weight[3] += 1
    assert counts == {"a": 1, "b": 1, "c": None}
    assert last.num_bytes == 4000
    assert [record.message[:35] for record in caplog.records] == ["host memory has room for 0.0 GB of "]


def test_changes_of_no_part_are_refused() -> None:
    with pytest.raises(ValueError, match="no part of it has changed"):
        joined_changes(torch.zeros(20, dtype=torch.uint8), metadata(torch.zeros(3)), [])


# Syncs over the network.


class HalfNet(nn.Module):
    """Weights in half precision, a tied head, one in float32, one of no dimension and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(60, 50, dtype=torch.bfloat16)
        self.up = nn.Linear(50, 80, dtype=torch.bfloat16)
        self.wide = nn.Parameter(torch.zeros(40, 40))
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))
        self.nothing = nn.Parameter(torch.zeros(0, 7, dtype=torch.bfloat16))
        self.head = nn.Linear(50, 60, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight


NUM_BYTES = 2 * (60 * 50 + 50 * 80 + 80 + 1) + 4 * 40 * 40


def half_net(seed: int) -> HalfNet:
    model = HalfNet()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


class WholeTensors:
    """A target that takes whole tensors, and wants all of them each time, as vLLM and SGLang do."""

    def __init__(self, module: nn.Module) -> None:
        self._inner = ModuleTarget(module)
        self.weights_metadata = self._inner.weights_metadata
        self._arrived: set[str] = set()

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._arrived |= {name for name, _ in tensors}
        self._inner.load(tensors)

    def digests(self, names: Sequence[str]) -> dict[str, int]:
        first = {weight.name for weight in self.weights_metadata()}
        assert self._arrived == first, f"{first - self._arrived} did not come"
        self._arrived = set()
        return self._inner.digests(names)


@pytest.fixture(params=[ModuleTarget, WholeTensors])
def far(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A sender and two receivers that share no memory, in buckets of which the model fills several."""
    monkeypatch.setattr(shared_memory, "FOLDER", Path("/no/such/folder"))
    yield from pair_of(request.param)


def pair_of(kind: Callable[[nn.Module], WeightTarget]) -> Iterator[Any]:
    model, copies = half_net(1), [half_net(2), half_net(3)]
    sending = WeightSender(model, bucket_bytes=8192, timeout_s=20.0)
    endpoint = sending.open(num_receivers=2)
    assert endpoint is not None
    receivers = [WeightReceiver(kind(copy), timeout_s=20.0) for copy in copies]
    for index, receiver in enumerate(receivers):
        receiver.join(endpoint, index=index)
    pair: Any = Pair(sending, receivers, model, copies)  # type: ignore[arg-type]
    try:
        yield pair
    finally:
        pair.close()


def synced(pair: Any, version: int) -> int:
    """Bytes that one sync sent to a receiver, every bit of which was compared."""
    results = pair.sync(version)
    assert all(isinstance(result, SyncReport) for result in results), results
    assert [bits(copy) for copy in pair.copies] == [bits(pair.model)] * 2
    assert {result.digest for result in results} == {digest_weights(pair.model)}
    assert len({result.sent_bytes for result in results}) == 1
    assert {result.num_bytes for result in results} == {NUM_BYTES}
    sent: int = results[0].sent_bytes
    return sent


@torch.no_grad()
def change(model: HalfNet, share: float, seed: int) -> None:
    """Give this share of each weight's elements other bits."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.parameters():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        tensor[chosen] += torch.randint(1, 9, tensor.shape, generator=generator).to(tensor)[chosen]


def test_few_changes_travel_in_few_bytes_and_every_bit_arrives(far: Any) -> None:
    assert synced(far, 1) >= NUM_BYTES
    for version, share in ((2, 0.01), (3, 0.05), (4, 0.02)):
        change(far.model, share, version)
        # At most 4 bytes for an element of two and 6 for one of four, and the space between the weights.
        assert synced(far, version) < 2.5 * share * NUM_BYTES + 5 * 64


def test_nothing_travels_where_nothing_changed(far: Any) -> None:
    synced(far, 1)
    assert synced(far, 2) == 0


def test_where_everything_changed_whole_weights_travel_and_later_changes_again(far: Any) -> None:
    synced(far, 1)
    change(far.model, 1.0, 2)
    assert synced(far, 2) >= NUM_BYTES - 100
    with torch.no_grad():
        far.model.up.weight[3, 4] += 1
        far.model.wide[3, 4] += 1
    assert 0 < synced(far, 3) - far.model.wide.nbytes < 100  # of float32, forgotten


def test_a_NaN_and_a_sign_of_zero_travel_as_changes(far: Any) -> None:
    synced(far, 1)
    up = far.model.up.weight.data.view(torch.int16)
    for version, (first, second) in enumerate(((NAN, ZERO), (OTHER_NAN, MINUS_ZERO)), start=2):
        up[0, 0], up[79, 49] = first, second
        assert synced(far, version) == 2 * 4


def test_a_worker_without_the_last_sync_gets_whole_weights(far: Any) -> None:
    synced(far, 1)
    far.receivers[1]._digest = "of other weights"
    change(far.model, 0.01, 2)
    assert synced(far, 2) >= NUM_BYTES
    change(far.model, 0.01, 3)
    assert synced(far, 3) < 0.1 * NUM_BYTES


def test_after_a_failed_sync_whole_weights_travel(far: Any) -> None:
    synced(far, 1)
    change(far.model, 0.01, 2)
    first, second = far.receivers
    side_by_side(
        [lambda: far.sender.send(2), lambda: first.receive(2), lambda: second.refuse(2, "it is busy")]
    )
    change(far.model, 0.01, 3)
    assert synced(far, 3) >= NUM_BYTES


def test_a_corrupted_change_is_refused_by_the_digest_and_named(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced(far, 1)
    with torch.no_grad():
        far.model.up.weight[3, 4] += 1
    send = collective.CollectiveSender.send

    def corrupted(transport: collective.CollectiveSender, contents: list[Tensor]) -> None:
        first = contents[0].clone()
        first[0] ^= 1
        send(transport, [first, *contents[1:]])

    monkeypatch.setattr(collective.CollectiveSender, "send", corrupted)
    _, *results = far.sync(2)
    for result in results:
        assert isinstance(result, SyncCorrupted)
        assert str(result).startswith("sync 2 corrupted: up.weight differs from its digest")
    monkeypatch.undo()
    monkeypatch.setattr(shared_memory, "FOLDER", Path("/no/such/folder"))
    assert synced(far, 3) >= NUM_BYTES


def test_changes_that_cannot_be_read_are_refused_and_named(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    synced(far, 1)
    with torch.no_grad():
        far.model.up.weight[3, 4] += 1
    announce = sender._Session._announce

    def too_many(session: sender._Session, bucket: Bucket) -> None:
        (part,) = bucket.changes["up.weight"]
        announce(session, replace(bucket, changes={"up.weight": (replace(part, count=700),)}))

    monkeypatch.setattr(sender._Session, "_announce", too_many)
    _, *results = far.sync(2)
    for result in results:
        assert "sync 2 corrupted: the changes of up.weight in bucket 0 cannot be read (700 changes" in str(
            result
        )


def test_changes_are_refused_where_the_values_before_them_are_not(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced(far, 1)
    change(far.model, 0.01, 2)
    for receiver in far.receivers:
        receiver._digest = "of other weights"
    monkeypatch.setattr("strop.rollout.weight_sync.channel.SenderChannel.say_so", lambda *args: True)
    _, *results = far.sync(2)
    for result in results:
        assert isinstance(result, SyncCorrupted)
        assert "changes of wide, whose value before them is not here" in str(result)


def test_on_one_node_neither_side_keeps_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    for pair in pair_of(WholeTensors):
        for version in (1, 2):
            assert synced(pair, version) >= NUM_BYTES
            assert pair.sender._last.num_bytes == 0
            assert pair.receivers[0]._copy._values == {}
