"""Memory that leaves the device for a while: host memory that is kept, and activations that are copied once.

What is here lies on a CPU, and moves as the memory of a device does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from strop.engines.parallel import offload
from strop.engines.parallel.host_activations import HostActivations
from strop.engines.parallel.offload import HostCopies

aten = torch.ops.aten


class Operations(TorchDispatchMode):
    """Counts the operations that make tensors with numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves(results)):
            self.counts[func.overloadpacket] += 1
        return results


def tensors_of(sizes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(size, generator=generator) for size in sizes]


def nothing_is_here(tensors: Sequence[Tensor]) -> bool:
    return not any(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_where_there_is_no_host_memory_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tensors_of([1000]), tensors_of([90_000])
    before = [tensor.clone() for tensor in (*first, *second)]
    copies = HostCopies()
    copies.put(first)

    def nothing(*size: object, **options: object) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", nothing)
        with pytest.raises(RuntimeError, match="out of memory"):
            copies.put(second)
    copies.restore()
    for tensor, expected in zip((*first, *second), before, strict=True):
        assert torch.equal(tensor, expected)


def test_host_memory_is_taken_once_and_kept_from_step_to_step() -> None:
    tensors = tensors_of([3, 1000, 70_000, 1])
    before = [tensor.clone() for tensor in tensors]
    copies = HostCopies()
    allocated = []
    for _ in range(3):
        with Operations() as operations:
            copies.put(tensors)
        allocated.append(operations.counts[aten.empty])
        assert nothing_is_here(tensors)
        assert copies.num_bytes == 4 * 71_004
        copies.restore()
        assert copies.num_bytes == 0
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
        for tensor in [*tensors, *before]:
            tensor.mul_(0.5)  # of the next step
    assert allocated == [1, 0, 0]


def test_what_is_larger_than_a_block_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "BLOCK_BYTES", 4096)
    tensors = tensors_of([5, 1021, 1, 4000, 130, 2])
    before = [tensor.clone() for tensor in tensors]
    copies = HostCopies()
    copies.put(tensors)
    copies.restore()
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    blocks = [len(block) for block in copies._blocks]
    # Each begins at 512 bytes: 512 + 4096 + 512 + 16384 + 1024 + 512 = 23,040, five blocks and 2,560 bytes.
    assert blocks == [4096] * 5 + [4096]
    assert all(size & (size - 1) == 0 for size in blocks), "torch pins powers of two"


def test_gradients_go_beside_what_left_before_and_shared_memory_leaves_once() -> None:
    first, second = tensors_of([700, 300]), tensors_of([2000])
    before = [tensor.clone() for tensor in [*first, *second]]
    copies = HostCopies()
    copies.put([*first, first[0][100:], first[0]])
    copies.put([*first, *second])
    assert copies.num_bytes == 4 * 3000
    assert nothing_is_here([*first, *second])
    copies.restore()
    assert all(torch.equal(*pair) for pair in zip([*first, *second], before, strict=True))


def test_a_stage_without_values_stays(tmp_path: object) -> None:
    copies = HostCopies()
    copies.put([torch.empty(4, device="meta"), torch.empty(0)])
    assert copies.num_bytes == 0
    copies.restore()


@pytest.fixture
def activations() -> Iterator[HostActivations]:
    """While these are open, saved tensors lie on the host."""
    kept = HostActivations(torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
        yield kept


def output(leaf: Tensor) -> Tensor:
    """Saves the memory of `many` as seven tensors of four shapes, and that of its sine and cosine."""
    many = leaf * 2
    flat, turned = many.view(-1), many.T
    return (flat * flat.sin()).sum() + (turned @ many).sum() + (many[8:, :40] * flat[:4].sum()).square().sum()


def test_a_piece_of_memory_is_copied_once_and_comes_back_once(activations: HostActivations) -> None:
    leaf = tensors_of([4096])[0].view(64, 64).requires_grad_()
    copied = Counter[int]()
    pieces: dict[int, Tensor] = {}

    real = activations._copied

    def noted(source: Tensor) -> Any:
        copied[source.untyped_storage().data_ptr()] += 1
        pieces[source.untyped_storage().data_ptr()] = source  # kept, so that no address comes twice
        return real(source)

    activations._copied = noted  # type: ignore[method-assign]
    value = output(leaf)
    activations.close()
    assert set(copied.values()) == {1}
    with Operations() as operations:
        value.backward()  # type: ignore[no-untyped-call]
    assert operations.counts[aten._to_copy] == len(copied)


def test_gradients_through_the_host_have_the_same_bits() -> None:
    gradients = []
    for is_kept in (False, True):
        leaf = tensors_of([4096])[0].view(64, 64).requires_grad_()
        kept = HostActivations(torch.device("cpu"))
        if is_kept:
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
                value = output(leaf)
        else:
            value = output(leaf)
        kept.close()
        value.backward()  # type: ignore[no-untyped-call]
        gradients.append(leaf.grad)
    assert gradients[0] is not None
    assert torch.equal(gradients[0], gradients[1])


def test_memory_that_was_written_to_is_another_piece(activations: HostActivations) -> None:
    # d(a w) / dw = a as it was, and d(2a v) / dv = 2a: autograd alone refuses this.
    first, second = (torch.ones(50, requires_grad=True) for _ in range(2))
    numbers = tensors_of([50])[0]
    memory = numbers.clone()
    total = (memory * first).sum()
    memory.mul_(2)
    total = total + (memory * second).sum()
    total.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(first.grad, numbers)
    assert torch.equal(second.grad, 2 * numbers)


def test_a_small_part_of_a_large_piece_goes_alone(activations: HostActivations) -> None:
    large = tensors_of([100_000])[0]
    weight = torch.ones(10, requires_grad=True)
    value = (large[500:520:2] * weight).sum()
    (piece,) = activations._pieces.values()
    assert piece.host.nbytes == 4 * 10
    value.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(weight.grad, large[500:520:2])


def test_a_second_backward_pass_brings_them_again(activations: HostActivations) -> None:
    weight = torch.ones(10, requires_grad=True)
    value = (tensors_of([10])[0] * weight).square().sum()
    first = torch.autograd.grad(value, weight, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(value, weight)[0], first)
