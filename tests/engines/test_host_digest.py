"""Sums of host memory in C: those of the definition, alone and while copying."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from references.weight_digest import slow_digest
from strop.engines.checksum import host, tensors
from strop.engines.checksum.tensors import finish

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="the function is compiled by gcc")
ROW_BYTES = 8 * 4096


def numbers(size: int) -> Tensor:
    return torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(size)).to(torch.uint8)


@pytest.mark.parametrize(
    "size", [0, 1, 7, 8, 9, ROW_BYTES - 8, ROW_BYTES, ROW_BYTES + 13, 20 * ROW_BYTES + 5]
)
def test_sums_are_those_of_the_definition_alone_and_while_copying(size: int) -> None:
    content = numbers(size)
    assert host.digest_kernel() is not None, "the compiled function is what is tested"
    assert host.digest_tensor(content) == slow_digest(content)
    target = torch.full_like(content, 7)
    total = host.copied(content, target)
    assert torch.equal(target, content)
    assert finish(int(total), size) == slow_digest(content)


@pytest.mark.parametrize("first", [8, ROW_BYTES - 16, 3 * ROW_BYTES + 24])
def test_parts_start_at_any_word(first: int) -> None:
    content = numbers(5 * ROW_BYTES)
    target = torch.zeros_like(content)
    sums = [
        host.copied(content[:first], target[:first]),
        host.copied(content[first:], target[first:], first_byte=first),
    ]
    assert finish(int(sum(sums)), len(content)) == slow_digest(content) == host.digest_tensor(target)
    with pytest.raises(ValueError, match="a part starts at byte 4"):
        host.word_sum(content[4:], first_byte=4)


@pytest.mark.parametrize(
    "form",
    [
        lambda flat: flat.view(torch.float32)[1:].view(torch.uint8),  # not at a word
        lambda flat: flat.view(torch.float32).view(-1, 8).t(),
        lambda flat: flat.view(torch.bfloat16).view(4, -1)[:, ::2],
    ],
    ids=["memory between words", "transposed", "every second"],
)
def test_other_forms_of_memory_are_read_as_they_are(form: Callable[[Tensor], Tensor]) -> None:
    source = form(numbers(2 * ROW_BYTES))
    target = torch.empty(source.shape, dtype=source.dtype)
    assert finish(int(host.copied(source, target)), target.nbytes) == slow_digest(source)
    assert target.contiguous().view(-1).view(torch.uint8).tolist() == (
        source.contiguous().view(-1).view(torch.uint8).tolist()
    )


def test_a_copy_that_casts_has_the_sum_of_what_arrived() -> None:
    source = torch.randn(100, generator=torch.Generator().manual_seed(0))
    target = torch.empty(100, dtype=torch.bfloat16)
    assert finish(int(host.copied(source, target)), 200) == slow_digest(source.bfloat16())


def test_threads_change_nothing() -> None:
    content, before = numbers(100 * ROW_BYTES + 3), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        target = torch.zeros_like(content)
        assert finish(int(host.copied(content, target)), len(content)) == tensors.digest_tensor(content)
        assert torch.equal(target, content)
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_torch_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(host, "digest_kernel", host.digest_kernel.__wrapped__)
    content = numbers(3 * ROW_BYTES)
    assert host.digest_kernel() is None
    assert host.digest_tensor(content) == slow_digest(content)
    assert int(host.copied(content, torch.empty_like(content))) == int(tensors.word_sum(content))
