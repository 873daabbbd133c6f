"""The device this machine computes on: its name, its collective backend, its visibility variable.

No other module names a vendor. torch is imported only when a question about this machine is asked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


OF_EACH_PROCESS = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WG_PREFIX", "WG_BACKEND",
)  # fmt: skip
"""Variables of the environment that tell a worker process its place among the others; its group sets them."""


VISIBILITY_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES",
)  # fmt: skip
"""Variables of the environment by which a user limits a process to some devices; AMD's runtime heeds three of them."""


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """Names of a kind of device: torch's, that of its collectives and that of its driver's variable."""

    name: str
    """The torch device type, for example `cuda`."""
    collective_backend: str
    """The torch.distributed backend whose collectives run on this kind of device."""
    visibility_variable: str | None
    """The environment variable that limits a process to some devices; None where none exists."""


_KINDS: dict[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        DeviceKind(name="cuda", collective_backend="nccl", visibility_variable="CUDA_VISIBLE_DEVICES"),
        DeviceKind(name="npu", collective_backend="hccl", visibility_variable="ASCEND_RT_VISIBLE_DEVICES"),
        DeviceKind(name="cpu", collective_backend="gloo", visibility_variable=None),
    )
}


def check_device_name(name: str, key: str) -> None:
    """Refuse what is the name of no kind of device, or has the number of one, whatever this machine has.

    Args:
        name: that was asked for; `auto` too.
        key: of the setting.

    Raises:
        ValueError: the sentence names the devices.
    """
    kind = name.partition(":")[0]
    if name != "auto" and kind not in _KINDS:
        accelerator = next(iter(_KINDS))
        suggestion = f"; did you mean {accelerator}?" if kind == "gpu" else ""
        raise ValueError(f"{key} is {name!r}, but the devices are auto, {', '.join(_KINDS)}{suggestion}")
    if name != kind:
        variable = _KINDS[kind].visibility_variable
        by_number = f", and choose one by {variable}={name.partition(':')[2]}" if variable else ""
        raise ValueError(f"{key} is {name!r}, but it names a kind of device: set it to {kind}{by_number}")


def device_name(requested: str = "auto") -> str:
    """The torch device type to compute on: `requested`, or with `auto` an accelerator if there is one.

    Raises:
        ValueError: the name is unknown, or this machine has no such device.
    """
    if requested == "auto":
        return next((name for name in _KINDS if _num_devices(name) > 0), "cpu")
    _kind(requested)
    if _num_devices(requested) == 0:
        raise ValueError(
            f"device {requested!r} was asked for, but torch finds none on this machine; use 'auto' or 'cpu', "
            f"or install the build of torch for it"
        )
    return requested


def collective_backend(device: str) -> str:
    """The torch.distributed backend for a device type, for example `nccl` for `cuda`."""
    return _kind(device).collective_backend


def visibility_variable(device: str) -> str | None:
    """The environment variable that limits which devices a process sees; None for a CPU. AMD's devices are `cuda` to
    torch, and have a variable of their own."""
    kind = _kind(device)
    if kind.name == "cuda":
        import torch  # heavy: asked for only when devices are handed out

        if torch.version.hip is not None:
            return "HIP_VISIBLE_DEVICES"
    return kind.visibility_variable


def num_devices(device: str) -> int:
    """Number of devices of this type that the process sees; 1 for a CPU."""
    return _num_devices(_kind(device).name)


def _kind(device: str) -> DeviceKind:
    name = device.partition(":")[0]
    if name not in _KINDS:
        raise ValueError(f"unknown device {device!r}; known: {', '.join(_KINDS)}")
    return _KINDS[name]


def _num_devices(name: str) -> int:
    if name == "cpu":
        return 1
    import torch  # heavy: asked for only when the machine is looked at

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return torch.accelerator.device_count() if accelerator is not None and accelerator.type == name else 0


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of host memory on a device, without waiting for the device; the tensor itself where it is there."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def can_record_memory(device: str) -> bool:
    """True of a device whose allocator torch can keep a history of."""
    return _kind(device).name == "cuda"


_MEMORY_EVENTS = 1_000_000
"""Allocations in the history of a step; the newest stay."""


def record_memory() -> None:
    """Begin a history of the allocations on the device, with the stack of each."""
    import torch

    torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)


def save_memory(path: Path) -> None:
    """Write the history since `record_memory`, for pytorch.org/memory_viz."""
    import torch

    torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]


def end_memory() -> None:
    """End the history of `record_memory`."""
    import torch

    torch.cuda.memory._record_memory_history(enabled=None)


_NSYS_SESSION = "NSYS_PROFILING_SESSION_ID"
"""Variable that `nsys` sets in the processes that it profiles."""


def trace_activities() -> set[torch.profiler.ProfilerActivity]:
    """Activities that torch's profiler can record here: all that this machine has, and those of the CPU alone where
    Nsight Systems profiles the process. Both would subscribe to CUPTI, which takes one subscriber."""
    from torch import profiler

    if os.environ.get(_NSYS_SESSION):
        return {profiler.ProfilerActivity.CPU}
    return set(profiler.supported_activities())  # type: ignore[no-untyped-call]


def start_capture() -> None:
    """Begin the range that `nsys profile --capture-range=cudaProfilerApi` captures; nothing without CUDA."""
    import torch

    if _num_devices("cuda"):
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]


def stop_capture() -> None:
    """End the range of `start_capture`."""
    import torch

    if _num_devices("cuda"):
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


def trace_range() -> Callable[[str], AbstractContextManager[object]] | None:
    """Maker of named ranges that the vendor's profiler shows (NVTX for Nsight Systems, MSTX for MindStudio); None on a
    CPU."""
    if _num_devices("cuda"):
        import torch

        return torch.cuda.nvtx.range
    return _mstx_range if _num_devices("npu") else None


@contextlib.contextmanager
def _mstx_range(name: str) -> Iterator[None]:
    from torch_npu.npu import mstx  # only there on an NPU

    number = mstx.range_start(message=name)
    try:
        yield
    finally:
        mstx.range_end(number)
