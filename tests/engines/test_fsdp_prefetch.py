"""Layers are gathered while the one before them computes, and never more than two at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from references.language_models import config, save_model
from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of, of_log_probs
from strop.engines.config import EngineConfig, ModelConfig, OptimizerConfig
from strop.engines.gradients import full
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel.fsdp import sharded_units
from strop.engines.training import TrainEngine

NUM_LAYERS = 4
ROWS = make_rows([torch.tensor([5, 9, 2])] * 2, [torch.tensor([7, 3, 11]), torch.tensor([60, 4])])


class _Events(TorchDispatchMode):
    """Notes where parameters are gathered, and which layer computes, in the order in which a rank says so."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather_base" in str(func):
            self.seen.append("gather")
        return func(*args, **(kwargs or {}))


@contextmanager
def noted(engine: TrainEngine) -> Iterator[list[str]]:
    with _Events() as events:
        hooks = [
            layer.get_submodule("self_attn").register_forward_pre_hook(
                lambda *_, number=number: events.seen.append(f"layer {number}")
            )
            for number, layer in enumerate(engine.model.layers)
        ]
        yield events.seen
    for hook in hooks:
        hook.remove()


def loss(log_probs: Tensor, _: Tensor, __: Tensor) -> Tensor:
    return -log_probs.sum() / 10


def passes(
    ranks: Ranks, folder: str, checkpointing: bool, gathers_ahead: bool, ep_size: int = 1
) -> dict[str, Any]:
    parallel = ranks.join(expert_parallel=ep_size)
    model = load_model(ModelConfig(path=folder, gradient_checkpointing=checkpointing), parallel=parallel)
    config = EngineConfig(expert_parallel=ep_size)
    engine = TrainEngine(model, config, OptimizerConfig(), total_steps=None, parallel=parallel)
    if not gathers_ahead:
        for unit in sharded_units(model):
            unit.set_modules_to_forward_prefetch([])
    with noted(engine) as forward:
        log_probs = log_probs_of(engine, ROWS, temperature=1.0)[0]
    with noted(engine) as update:
        engine.accumulate(ROWS, of_log_probs(loss, temperature=1.0))
    gradients = {name: full(p.grad) for name, p in engine.model.named_parameters() if p.grad is not None}
    engine.step()
    after = log_probs_of(engine, ROWS, temperature=1.0)[0]
    return {
        "forward": list(forward), "update": list(update), "log_probs": log_probs, "gradients": gradients,
        "after": after,
    }  # fmt: skip


@pytest.mark.dist
def test_layers_that_are_computed_again_gather_no_layer_behind_their_experts(tmp_path: Path) -> None:
    # Two layers, each with shared experts, which are beside the others, and two ranks with half of the experts each,
    # whose units have nobody to gather from.
    save_model(config("qwen2_moe"), tmp_path)
    first, second = (run_ranks(passes, 2, str(tmp_path), True, gathers, 2) for gathers in (True, False))
    for seen, other in zip(first, second, strict=True):
        assert seen["update"].count("gather") == other["update"].count("gather") == 1 + 2 * 2
        assert seen["forward"] == ["gather", "gather", "gather", "layer 0", "layer 1"]
        assert other["forward"] == ["gather", "gather", "layer 0", "gather", "layer 1"]
        assert all(torch.equal(seen["gradients"][name], g) for name, g in other["gradients"].items())
        assert torch.equal(seen["after"], other["after"])


@pytest.mark.dist
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_next_layer_is_gathered_while_a_layer_computes(tmp_path: Path, checkpointing: bool) -> None:
    shape = config("qwen3")
    shape.num_hidden_layers, shape.layer_types = NUM_LAYERS, ["full_attention"] * NUM_LAYERS
    save_model(shape, tmp_path)
    # The root and the first layer; then each layer computes behind the gathering of the next one.
    ahead = ["gather", "gather"]
    for number in range(NUM_LAYERS):
        ahead += ["gather", f"layer {number}"] if number < NUM_LAYERS - 1 else [f"layer {number}"]
    plain = ["gather"] + [event for number in range(NUM_LAYERS) for event in ("gather", f"layer {number}")]
    arguments = (str(tmp_path), checkpointing)
    first, second = (run_ranks(passes, 2, *arguments, gathers) for gathers in (True, False))
    for seen, other in zip(first, second, strict=True):
        assert seen["forward"] == ahead
        assert other["forward"] == plain
        assert seen["update"][: len(ahead)] == ahead
        # Backward each layer is gathered once more, the root was kept.
        assert seen["update"].count("gather") == other["update"].count("gather") == 1 + 2 * NUM_LAYERS
        assert torch.equal(seen["log_probs"], other["log_probs"])
        assert seen["gradients"].keys() == other["gradients"].keys()
        assert all(torch.equal(seen["gradients"][name], g) for name, g in other["gradients"].items())
        assert torch.equal(seen["after"], other["after"])
        assert not torch.equal(seen["after"], seen["log_probs"])
