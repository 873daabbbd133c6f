"""Kernels of Triton are used where they can be launched."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from strop.utils import triton as triton_module
from strop.utils.triton import has_kernels

CARD = torch.device("cuda")


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What is found out is of the test alone."""
    triton_module._launches.cache_clear()
    yield
    triton_module._launches.cache_clear()


def with_driver(monkeypatch: pytest.MonkeyPatch, current_target: Callable[[], object]) -> None:
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=current_target))
    monkeypatch.setattr(triton_module, "triton", SimpleNamespace(runtime=SimpleNamespace(driver=driver)))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
    ],
)
def test_a_machine_without_a_compiler_or_headers_has_none_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def build() -> object:
        raise error

    with_driver(monkeypatch, build)
    assert [has_kernels(CARD), has_kernels(CARD)] == [False, False]
    assert caplog.text.count("install gcc and the headers of Python") == 1


def test_a_card_has_them_and_a_cpu_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, lambda: "sm_90")
    assert has_kernels(CARD)
    assert not has_kernels(torch.device("cpu"))
