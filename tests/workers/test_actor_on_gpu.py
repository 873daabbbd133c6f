"""The policy on a GPU gives its memory back between its turns."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of

from strop.algorithms.config import AlgorithmConfig
from strop.protocol import columns

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def test_an_actor_that_is_offloaded_gives_its_memory_back_and_goes_on(tiny_model: Path) -> None:
    actor = make_actor(tiny_model, AlgorithmConfig(), device=DEVICE)
    batch = random_batch()
    actor.update_policy(batch, totals_of(batch))
    before = columns.flat(actor.compute_log_prob(batch).tensors()["old_log_probs"])
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    weights = sum(p.numel() * p.element_size() for _, p in actor.engine.model.named_parameters())
    actor.offload()
    torch.cuda.synchronize()
    assert held - torch.cuda.memory_allocated() >= 3 * weights, "weights and both moments of the optimizer"
    torch.testing.assert_close(
        columns.flat(actor.compute_log_prob(batch).tensors()["old_log_probs"]), before, rtol=0, atol=0
    )
    actor.update_policy(batch, totals_of(batch))
