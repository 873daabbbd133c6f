"""megatron-core on a CPU with gloo, for processes of tests alone: requests for CUDA go to the CPU.

    use_cpu()        # once in a process, before models are made

Each change is one that was seen to be needed with megatron-core 0.16.1 and torch 2.13. All of them are about devices;
the arithmetic is megatron-core's.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from strop.engines.megatron import checks


class _Stream:
    """A stream or an event, with nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, *args: Any) -> None: ...

    def wait_event(self, *args: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *args: Any) -> _Stream:
        return self


class _CudaToCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if function is torch.Tensor.to:
            args = tuple(map(_on_cpu, args))
        return function(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    if isinstance(device, str) and device.startswith("cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(device, torch.device) and device.type == "cuda" else device


def allow_cpu() -> None:
    """Let checks of this process pass where the run is on a CPU, as models are made in processes that `use_cpu`."""
    checks.DEVICES = ("cuda", "cpu")


@cache
def use_cpu() -> None:
    """Redirect the CUDA of this process to the CPU."""
    allow_cpu()
    torch._dynamo.config.disable = True  # what megatron-core compiles would take minutes here
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _Stream()
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign, assignment]
    _CudaToCpu().__enter__()
    _name_types_as_on_cuda()
    _use_generator_of_cpu()
    _exchange_by_lists()


def _name_types_as_on_cuda() -> None:
    """The optimizers compare names of types, such as torch.cuda.FloatTensor."""
    name_or_cast: Any = torch.Tensor.type

    def as_on_cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = name_or_cast(self, *args, **kwargs)
        return f"torch.cuda.{result.rpartition('.')[2]}" if isinstance(result, str) else result

    torch.Tensor.type = as_on_cuda  # type: ignore[method-assign, assignment]


def _use_generator_of_cpu() -> None:
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    cuda.get_rng_state = lambda *args, **kwargs: torch.random.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.random.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.random.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.random.set_rng_state(state)


def _exchange_by_lists() -> None:
    """Sizes of what experts exchange become arrays of numpy on their way from CUDA, and stay tensors on a CPU, which
    torch does not take."""
    from megatron.core.transformer.moe import token_dispatcher

    exchange = token_dispatcher.all_to_all

    def with_lists(group: Any, rows: Any, received: Any = None, sent: Any = None) -> Any:
        received, sent = (None if sizes is None else [int(n) for n in sizes] for sizes in (received, sent))
        return exchange(group, rows, received, sent)

    token_dispatcher.all_to_all = with_lists
