"""Syncs of tests between real processes: the ranks of an actor, and behind them those that receive."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rollout.test_weight_sync_processes import full_bits, read_endpoint, write_endpoint
from torch import nn

from references.engine_steps import Setting, engine_of
from references.rank_processes import Ranks, leave
from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.parallel.ranks import Parallel
from strop.rollout.weight_sync.model_target import ModuleTarget
from strop.rollout.weight_sync.receiver import WeightReceiver
from strop.rollout.weight_sync.sender import WeightSender
from strop.rollout.weight_sync.types import SyncError, SyncReport

Bits = dict[str, bytes]
_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of the C library: what is larger is taken from the system, and given back there."""
BUCKET_BYTES = 1536
"""Rows of the largest matrices of tiny models fill several of them, and end in the middle."""
MODEL_BYTES, PEAK_BUCKET_BYTES = 96 << 20, 4 << 20
"""Of `large_model`, and of the buckets in which it travels."""


def joined(ranks: Ranks, *, num_receivers: int = 1, **sizes: int) -> Parallel:
    """The ranks of the actor: all processes but the last ones, which receive."""
    parallel: Parallel = replace(ranks, world_size=ranks.world_size - num_receivers).join(**sizes)
    return parallel


@contextlib.contextmanager
def receiving(module: nn.Module, directory: str, *, index: int = 0) -> Iterator[WeightReceiver]:
    """Receiver of a model that has met the sender of this directory; it leaves at the end."""
    leave()  # a receiver is no rank of an actor
    receiver = WeightReceiver(ModuleTarget(module), timeout_s=60.0)
    receiver.join(read_endpoint(Path(directory) / "endpoint"), index=index)
    yield receiver
    receiver.close()


@contextlib.contextmanager
def sending(
    module: nn.Module, parallel: Parallel, directory: str, *, num_receivers: int = 1,
    bucket_bytes: int = BUCKET_BYTES, **options: Any,
) -> Iterator[WeightSender]:  # fmt: skip
    """Sender of this rank, whose receivers find it by the directory; it ends when all ranks are at the end."""
    sender = WeightSender(module, rank=parallel.rank, bucket_bytes=bucket_bytes, timeout_s=60.0, **options)
    if (endpoint := sender.open(num_receivers=num_receivers)) is not None:
        write_endpoint(endpoint, Path(directory) / "endpoint")
    yield sender
    parallel.barrier("the end")
    sender.close()


def zeroed(folder: str, dtype: str, kind: torch.dtype | None = None) -> nn.Module:
    """The model of a folder with nothing but zeros, which a receiver fills."""
    module = load_model(ModelConfig(path=folder, dtype=dtype)).module  # type: ignore[arg-type]
    if kind is not None:
        module.to(kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    return module


def merged_and_received(ranks: Ranks, directory: str, setting: Setting) -> tuple[str, str, Bits]:
    """Transport, digest and bits of a sync of weights with an adapter, on all ranks of the actor and in a receiver."""
    if ranks.rank == ranks.world_size - 1:
        copy = load_model(ModelConfig(path=setting.folder, dtype="float64")).module
        with receiving(copy, directory) as receiver:
            report = receiver.receive(1)
        return report.transport, report.digest, bits_of(copy)
    parallel = joined(ranks, **setting.axes)
    engine = engine_of(parallel, setting)
    enlarge_adapters(engine.model.module)
    with sending(engine.model.module, parallel, directory) as sender:
        report = sender.send(1, engine.streamed_weights())
    return report.transport, report.digest, {}


@torch.no_grad()
def enlarge_adapters(module: nn.Module) -> None:
    """Give the adapters of a model something to add."""
    for name, parameter in module.named_parameters():
        if ".lora_B." in name and not parameter.is_meta:
            parameter.add_(0.25)


def bits_of(module: nn.Module, dtype: torch.dtype | None = None) -> Bits:
    """Bytes of every weight by name, in this dtype."""
    return {name: full_bits(tensor.to(dtype or tensor.dtype)) for name, tensor in module.state_dict().items()}


def outcome(call: Callable[[], Any]) -> str:
    """The version of a sync, or its error."""
    try:
        result = call()
    except (SyncError, RuntimeError, ValueError) as error:
        return str(error)
    assert isinstance(result, SyncReport)
    return f"version {result.version}"


def assert_refused_then_failed(first: Sequence[str], second: Sequence[str], received: Sequence[str]) -> None:
    """Check what rank 0, rank 1 and the receiver say of two syncs: the receiver refuses one, and rank 1 fails in the
    other for want of memory."""
    assert "sync 1 refused: busy" in first[0]
    assert second[0] == "version 1", "it has done its part, and rank 0 says what came of it"
    assert received[0] == "sync 1 refused: busy"
    assert first[1] == "rank 1 of the actor could not give its part of the weights; its log says why"
    assert second[1] == "no memory for a cast"
    assert "the sender gave up: rank 1 of the actor could not give" in received[1]


def large_model() -> nn.Module:
    """A matrix of half the model, and small ones."""
    side = 1 << 10
    model = nn.ModuleList(
        [nn.Linear(side, 12 * side, bias=False), *(nn.Linear(side, side) for _ in range(12))]
    )
    assert sum(p.nbytes for p in model.parameters()) > MODEL_BYTES
    return model


class Peak:
    """Resident memory beyond that at the start, at most; in a list of one number. What is freed is given back at once,
    so that nothing of before is taken again unseen."""

    def __enter__(self) -> list[int]:
        gc.collect()
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 64 << 10)
        library.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        self._before, self._used = _status_bytes("VmRSS"), [0]
        return self._used

    def __exit__(self, *error: object) -> None:
        self._used[0] = _status_bytes("VmHWM") - self._before


def _status_bytes(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
