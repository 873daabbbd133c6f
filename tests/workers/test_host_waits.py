"""How often an optimizer step makes the host wait for the device: never per micro-batch.

On a CPU nothing waits, but the operation that fetches a number from a tensor is the same one, so it is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from actor_batches import make_actor, random_batch, totals_of
from critic_batches import make_critic, value_batch
from torch.utils._python_dispatch import TorchDispatchMode

from strop.algorithms.config import AlgorithmConfig
from strop.engines import training
from strop.engines.optimizer import StepReport
from strop.engines.training import TrainEngine


class Waits(TorchDispatchMode):
    """Counts numbers that are fetched from tensors; not those of packing, whose tables are in host memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.count = self.micro_batches = 0
        self._is_packing = False
        pack = training.pack

        def uncounted(*args: Any, **kwargs: Any) -> object:
            self._is_packing = True
            self.micro_batches += 1
            try:
                return pack(*args, **kwargs)
            finally:
                self._is_packing = False

        monkeypatch.setattr(training, "pack", uncounted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten._local_scalar_dense and not self._is_packing:
            self.count += 1
        return func(*args, **(kwargs or {}))


def waits_of(update: Callable[[], object], engine: TrainEngine) -> tuple[int, int]:
    """Micro-batches of an update, and numbers fetched before its optimizer step."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "step", lambda: StepReport(grad_norm=0.0, lr=0.0))
        with Waits(patch) as seen:
            update()
    return seen.micro_batches, seen.count


@pytest.mark.parametrize(
    "settings",
    [{}, {"use_kl_loss": True, "entropy_coeff": 0.02}],
    ids=["some rows are only measured", "kl-entropy"],
)
def test_a_policy_update_waits_as_often_for_many_micro_batches_as_for_one(
    tiny_model: Path, settings: dict[str, Any]
) -> None:
    batch = random_batch()
    seen = []
    for max_tokens in (1000, 15):
        actor = make_actor(tiny_model, AlgorithmConfig(**settings), max_tokens=max_tokens)
        seen.append(waits_of(lambda a=actor: a.update_policy(batch, totals_of(batch)), actor.engine))  # type: ignore[misc]
    (few, waits), (many, same) = seen
    assert (few, many) == ((1, 4) if settings else (2, 4))
    assert same == waits  # of columns in host memory, the loss, and all metrics at once


def test_an_update_of_values_waits_as_often_for_many_micro_batches_as_for_one(tiny_model: Path) -> None:
    batch = value_batch()
    seen = []
    for max_tokens in (1000, 15):
        critic = make_critic(tiny_model, AlgorithmConfig(), max_tokens=max_tokens)
        seen.append(waits_of(lambda c=critic: c.update_critic(batch, totals_of(batch)), critic.engine))  # type: ignore[misc]
    (few, waits), (many, same) = seen
    assert few == 1
    assert many > 3
    assert same == waits
