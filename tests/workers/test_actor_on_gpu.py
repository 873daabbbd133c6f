"""The policy on a GPU gives its memory back between its turns, and that of activations within one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of

from references.token_passes import of_log_probs
from strop.algorithms.config import AlgorithmConfig
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.training import TrainEngine
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


def test_activations_on_the_host_give_the_same_gradient(tiny_model: Path) -> None:
    rows = make_rows([torch.arange(10, 40)] * 6, [torch.arange(10, 14 + 5 * n) for n in range(6)])
    gradients = []
    for is_kept in (False, True):
        model = load_model(ModelConfig(path=str(tiny_model), dtype="float32"), device=DEVICE)
        config = EngineConfig(offload_activations=is_kept)
        engine = TrainEngine(model, config, OptimizerConfig(lr=1e-3), total_steps=None)
        engine.accumulate(rows, of_log_probs(lambda lp, _, __: -lp.sum() / 10, temperature=1.0))
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert expected is not None
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-5, msg=name)
