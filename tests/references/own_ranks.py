"""Processes of ranks that the tests of one module have for themselves: a fixture of the module that imports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from references.rank_processes import end_ranks


@pytest.fixture(scope="module", autouse=True)
def own_ranks() -> Iterator[None]:
    """In the processes of these tests CUDA goes to the CPU."""
    end_ranks()
    yield
    end_ranks()
