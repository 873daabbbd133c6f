"""Losses never wait for the device: on tensors without values, whatever reads one is an error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.algorithms.losses import POLICY_LOSS_REGISTRY, policy_loss_terms
from strop.algorithms.losses.gspo import row_means
from strop.algorithms.names import AGGREGATION_MODES
from strop.algorithms.verl_aggregation import agg_loss

SETTINGS = {"clip_low": 0.2, "clip_high": 0.3, "clip_c": 3.0}


@pytest.mark.parametrize("name", sorted(POLICY_LOSS_REGISTRY))
def test_a_loss_reads_no_value(name: str) -> None:
    columns: dict[str, Tensor] = {
        column: torch.empty(7, device="meta") for column in ("log_probs", "old_log_probs", "advantages")
    }
    columns["row_ids"] = torch.empty(7, dtype=torch.int64, device="meta")
    mask = torch.empty(7, dtype=torch.bool, device="meta")
    columns["cov_selected"] = mask
    columns["log_probs"].requires_grad_(True)
    terms = policy_loss_terms(name, mask=mask, columns=columns, settings=SETTINGS).terms
    terms.sum().backward()
    assert terms.shape == (7,)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_a_loss_of_verl_that_is_given_its_totals_reads_no_value(mode: str) -> None:
    loss = agg_loss(
        torch.empty(2, 3, device="meta"),
        torch.empty(2, 3, device="meta"),
        mode,
        batch_num_tokens=4,
        global_batch_size=2,
        loss_scale_factor=8.0,
    )
    assert loss.shape == ()


def test_means_of_rows_in_any_order_of_any_numbers() -> None:
    # Rows 9 and 2, mixed: (1 + 3) / 2 and 5; the masked 7 of row 9 counts nowhere, row 4 has no token that counts.
    rows = torch.tensor([9, 2, 9, 9, 4])
    values = torch.tensor([1.0, 5.0, 3.0, 7.0, 8.0], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, True, False, False])
    means = row_means(values, mask, rows)
    assert means.tolist() == [2.0, 5.0, 2.0, 2.0, 0.0]
    (means * torch.tensor([1.0, 10.0, 2.0, 3.0, 100.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [3.0, 10.0, 3.0, 0.0, 0.0]
