"""Copies of a GPU's tensors, begun while it computes."""

from __future__ import annotations

import pytest
import torch

from strop.utils.host_copy import HostCopy

pytestmark = pytest.mark.gpu


def test_a_copy_that_was_waited_for_has_the_numbers_of_work_that_takes_long() -> None:
    matrix = torch.eye(4096, device="cuda")
    for _ in range(50):
        matrix = matrix @ matrix
    copies = HostCopy({"sum": matrix.sum(), "row": matrix[0]})
    fetched = copies.wait()
    assert float(fetched["sum"]) == 4096
    assert fetched["row"].is_pinned()
    assert fetched["row"][:2].tolist() == [1.0, 0.0]
