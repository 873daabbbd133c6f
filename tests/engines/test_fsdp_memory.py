"""What lies where: shards, host copies, activations; and what it may not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_cases import ALONE, OPTIM, Case, Outcome, accumulate, batch, engine_of, pairs, train
from torch import Tensor
from torch.distributed.tensor import DTensor

from references.rank_processes import Ranks, run_ranks
from references.token_passes import log_probs_of
from strop.engines.config import EngineConfig, ModelConfig
from strop.engines.gradients import local
from strop.engines.model import load_model
from strop.engines.packing import make_rows
from strop.engines.parallel import offload
from strop.engines.parallel.fsdp import shard
from strop.engines.training import TrainEngine

Folder = Callable[[str], Path]
UNEVEN = ((0, 3, 6, 7, 1), (4, 2, 5))


def everything(engine: TrainEngine) -> list[Tensor]:
    """Parameters and optimizer state."""
    parameters = [parameter.detach() for _, parameter in engine.model.named_parameters()]
    return [*parameters, *engine.optimizer.memory()]


def moved_between_steps(ranks: Ranks, case: Case) -> tuple[Outcome, list[int]]:
    """A run whose tensors leave for host memory and come back before each use; and the bytes on the way."""
    engine = engine_of(case, ranks.join() if ranks.world_size > 1 else None)
    seen = []

    def there_and_back() -> None:
        copies = offload.HostCopies()
        tensors = everything(engine)
        copies.put(tensors)
        seen.append(copies.num_bytes)
        assert not any(local(tensor).untyped_storage().nbytes() for tensor in tensors)
        copies.restore()
        assert copies.num_bytes == 0

    there_and_back()
    accumulate(engine, case, 0, case.assignment[ranks.rank])
    engine.step()
    there_and_back()
    return train(engine, case, ranks.rank), seen


def not_moved(ranks: Ranks, case: Case) -> Outcome:
    engine = engine_of(case, ranks.join() if ranks.world_size > 1 else None)
    accumulate(engine, case, 0, case.assignment[ranks.rank])
    engine.step()
    return train(engine, case, ranks.rank)


def assert_bitwise(first: Outcome, second: Outcome) -> None:
    assert (first.losses, first.norms, first.checksums) == (second.losses, second.norms, second.checksums)
    assert all(np.array_equal(first.weights[name], second.weights[name]) for name in first.weights)


def test_host_copies_come_back_bit_for_bit(tiny_folder: Folder) -> None:
    # In float64: float32 weights on a CPU are the mapped file itself, which cannot be freed.
    case = Case(folder=str(tiny_folder("llama")), dtype="float64", assignment=ALONE)
    moved, num_bytes = moved_between_steps(Ranks(0, 1, 0), case)
    assert_bitwise(moved, not_moved(Ranks(0, 1, 0), case))
    size = 8 * sum(weight.size for weight in moved.weights.values())
    # Before the first step the parameters; then two moments as well, and a step count per parameter.
    assert num_bytes == [size, 3 * size + 4 * len(moved.weights)]


def test_host_copies_of_shards_come_back_bit_for_bit(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("qwen3")), dtype="float32", assignment=UNEVEN)
    moved = run_ranks(moved_between_steps, 2, case)
    still = run_ranks(not_moved, 2, case)
    whole = 4 * sum(weight.size for weight in moved[0][0].weights.values())
    for (outcome, num_bytes), other in zip(moved, still, strict=True):
        assert_bitwise(outcome, other)
        assert num_bytes[0] < 0.6 * whole


def test_on_a_cpu_nothing_moves_and_nothing_changes(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("qwen3")), dtype="float32")
    plain = train(engine_of(case, None), case, 0)
    engine = engine_of(case, None)
    engine.offload()
    assert all(tensor.untyped_storage().nbytes() for tensor in everything(engine))
    copies = offload.HostCopies()
    offload.offload(engine.model, copies)
    offload.offload_optimizer(engine.optimizer, copies)
    assert copies.num_bytes == 0
    engine.offload()
    assert_bitwise(train(engine, case, 0), plain)
    engine.offload()
    engine.load_to_device()


@pytest.fixture
def hosts_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the CPU move as those of a device do."""
    monkeypatch.setattr(offload, "_on_device", iter)


@pytest.mark.usefixtures("hosts_differ")
@pytest.mark.parametrize("what", ["none", "optimizer"])
def test_a_role_leaves_and_comes_back_when_it_is_used(tiny_folder: Folder, what: str) -> None:
    case = Case(
        folder=str(tiny_folder("qwen3")),
        engine=EngineConfig(offload=what),  # type: ignore[arg-type]
    )
    plain, engine = engine_of(case, None), engine_of(case, None)
    parameters = [parameter for _, parameter in engine.model.named_parameters()]

    def bytes_of(tensors: Iterable[Tensor]) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    whole = bytes_of(parameters)
    for step in range(2):
        losses = [accumulate(each, case, step, ALONE[0]) for each in (plain, engine)]
        assert losses[0] == losses[1]
        engine.offload()  # with a gradient
        assert bytes_of([*parameters, *(p.grad for p in parameters if p.grad is not None)]) == 0
        engine.offload()
        log_probs_of(engine, batch(step), rows=(), temperature=1.0)
        assert bytes_of(parameters) == whole
        assert bytes_of(engine._optimizer.memory()) == 0  # log-probs need the model alone
        assert plain.step() == engine.step()
        # Between steps the state alone is away, also while the model computes.
        accumulate(engine, case, step, ())
        state = bytes_of(engine._optimizer.memory())
        assert (state == 0) == (what == "optimizer")
        engine.offload()
        assert bytes_of([*parameters, *engine._optimizer.memory()]) == 0
    assert bytes_of(engine.optimizer.memory()) == bytes_of(plain.optimizer.memory())
    assert_bitwise(train(engine, case, 0), train(plain, case, 0))


def test_a_device_alone_keeps_its_parameters(tiny_folder: Folder) -> None:
    model = load_model(ModelConfig(path=str(tiny_folder("qwen3"))), device="cpu")
    model.device = torch.device("cuda")
    with pytest.raises(ValueError, match="engine.offload is 'all', which needs a role of several ranks"):
        TrainEngine(model, EngineConfig(offload="all"), OPTIM, total_steps=None)


def shards(ranks: Ranks, case: Case) -> tuple[list[str], list[int], list[int], bool]:
    """Parameter names, rows of this rank's shards, all rows, and whether a forward pass leaves nothing gathered."""
    engine = engine_of(case, ranks.join(shard_size=case.engine.shard_size))
    named = list(engine.model.named_parameters())
    assert all(isinstance(p, DTensor) for _, p in named)
    accumulate(engine, case, 0, case.assignment[ranks.rank])
    prompt, response = pairs(0)[0]
    log_probs_of(engine, make_rows([prompt], [response]), temperature=1.0)
    again = [id(p) for _, p in engine.model.named_parameters()]
    return (
        [name for name, _ in named],
        [local(p.detach()).shape[0] for _, p in named],
        [p.shape[0] for _, p in named],
        again == [id(p) for _, p in named],
    )


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_each_rank_holds_its_rows_of_each_parameter(tiny_folder: Folder, kind: str) -> None:
    case = Case(folder=str(tiny_folder(kind)), assignment=UNEVEN)
    alone = [name for name, _ in engine_of(case, None).model.named_parameters()]
    (names, first, whole, stable), (_, second, _, _) = run_ranks(shards, 2, case)
    assert names == alone
    assert first == [-(-n // 2) for n in whole]
    assert second == [n // 2 for n in whole]
    assert stable


def test_replicas_hold_all_rows(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("qwen3")), assignment=UNEVEN, engine=EngineConfig(shard_size=1))
    for _, held, whole, _ in run_ranks(shards, 2, case):
        assert held == whole


def test_activations_leave_the_device_and_parameters_stay(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[tuple[Tensor, object]] = []
    real = torch.autograd.graph.saved_tensors_hooks

    def hooks(pack: Callable[[Tensor], object], unpack: Callable[[object], Tensor]) -> object:
        def noted(tensor: Tensor) -> object:
            packed.append((tensor, pack(tensor)))
            return packed[-1][1]

        return real(noted, unpack)

    monkeypatch.setattr(torch.autograd.graph, "saved_tensors_hooks", hooks)
    case = Case(folder=str(tiny_folder("llama")), engine=EngineConfig(offload_activations=True))
    engine = engine_of(case, None)
    accumulate(engine, case, 0, ALONE[0])
    storages = {p.untyped_storage().data_ptr() for _, p in engine.model.named_parameters()}
    kept = [tensor for tensor, result in packed if result is tensor]
    moved = [tensor for tensor, result in packed if result is not tensor]
    assert kept
    assert all(tensor.untyped_storage().data_ptr() in storages for tensor in kept)
    assert moved
    assert not any(tensor.untyped_storage().data_ptr() in storages for tensor in moved)


def second_shard(ranks: Ranks, case: Case) -> str:
    parallel = ranks.join()
    engine = engine_of(case, parallel)
    with pytest.raises(ValueError, match="the model is sharded already") as caught:
        shard(engine.model, parallel, case.engine)
    return str(caught.value)


def test_a_model_is_sharded_once(tiny_folder: Folder) -> None:
    case = Case(folder=str(tiny_folder("qwen3")), assignment=UNEVEN)
    assert "load it again" in run_ranks(second_shard, 2, case)[0]
