"""Extension of vLLM's worker processes: weights out of shared memory, and log-probs of the whole distribution.

It runs in vLLM's environment, where there is no strop: the digest, and what opens memory of a device, are loaded from
their files.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

BACKEND = "strop"
"""Name of the transfer of weights in vLLM's configuration."""


class WorkerExtension:
    """Base class that vLLM adds to its workers; to name it is what makes them import this module."""

    model_runner: Any

    def prepare_stage(self) -> None:
        """Make memory for what the stage of layers before this one gives.

        vLLM 0.32 makes it in a run of the model for the compiler, which eager mode on a CPU leaves out, and ends at the
        first token with an AssertionError; once it makes it there too, this goes.
        """
        runner = self.model_runner
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def never_sample(self, token_ids: list[int]) -> None:
        """Give these tokens probability zero everywhere, as the trainer's model does."""
        model = self.model_runner.get_model()
        compute = model.compute_logits
        ids = torch.tensor(token_ids)

        def without(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            nonlocal ids
            if logits is not None:  # only one worker of several has them
                ids = ids.to(logits.device)
                logits.index_fill_(-1, ids, float("-inf"))
            return logits

        model.compute_logits = without

    def routed_layers(self) -> list[int]:
        """Numbers of the layers with experts, in order."""
        import strop_routing

        layers: list[int] = strop_routing.routed_layers(self.model_runner.get_model())
        return layers

    def try_memory(self, memory: dict[str, Any]) -> str:
        """Open memory of a device as weights will come in it; the reason for which that fails, or ""."""
        try:
            opened_memory(memory)
        except OSError as error:
            return str(error)
        return ""


@dataclass
class Start(WeightTransferInitInfo):
    """Nothing is to be agreed on."""


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some tensors in one piece of memory."""

    paths: list[str] = field(default_factory=list)
    """Path of shared memory on each node of the engine."""
    memory: dict[str, Any] = field(default_factory=dict)
    """Memory of a device instead; empty for none."""
    num_bytes: int = 0
    entries: list[list[Any]] = field(default_factory=list)
    """Of each tensor: Hugging Face name, shape, dtype, first byte, digest."""


class SharedMemoryTransfer(WeightTransferEngine[Start, Bucket]):
    """Weights from the memory of the process that owns the engine, each checked against its digest as it arrives."""

    init_info_cls = Start
    update_info_cls = Bucket

    def init_transfer_engine(self, init_info: Start) -> None:
        """Nothing is to be opened before the first bucket."""

    def start_weight_update(self) -> None:
        """Bring the layers back to the form in which weights are loaded: vLLM repacks some of them.

        Experts on a CPU are repacked when their kernel is made, and not when weights come later (vLLM 0.32,
        `_setup_kernel`): it is made again. Once vLLM repacks them each time, this goes.
        """
        if current_platform.is_cpu():
            for part in self.model.modules():
                method = getattr(part, "quant_method", None)
                if isinstance(method, UnquantizedFusedMoEMethod):
                    method.moe_kernel = None
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Bucket) -> None:
        """Load one bucket. vLLM keeps tensors until the whole of a layer is there: memory of the node stays mapped so
        long, and memory of a device, which is used again, is copied.

        Raises:
            ValueError: what is in the memory is not what was announced.
            OSError: this process cannot open it.
        """
        if update_info.memory:
            data = opened_memory(update_info.memory)[: update_info.num_bytes].clone()
            torch.accelerator.synchronize()  # it is given back when this returns
        else:
            with Path(update_info.paths[self.parallel_config.node_rank]).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), update_info.num_bytes, flags=mmap.MAP_PRIVATE)
            data = torch.frombuffer(mapped, dtype=torch.uint8)
        tensors = []
        for name, shape, dtype, offset, digest in update_info.entries:
            kind = getattr(torch, dtype)
            size = torch.Size(shape).numel() * kind.itemsize
            value = data[offset : offset + size].view(kind).view(shape)
            if (actual := digest_tensor(value)) != digest:
                raise ValueError(f"{name} arrived with digest {actual:016x} instead of {digest:016x}")
            tensors.append((name, value))
        self.model.load_weights(iter(tensors))

    def finish_weight_update(self) -> None:
        """Bring the layers into the form in which they are used.

        A head that is tied to the embedding is not loaded itself. Where vLLM has a repacked copy of it, as on a CPU,
        the copy is made again from the weights that it shares.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        for part in self.model.modules():
            if isinstance(part, ParallelLMHead) and isinstance(part.quant_method, UnquantizedEmbeddingMethod):
                part.quant_method.process_weights_after_loading(part)

    def shutdown(self) -> None:
        """Nothing is open."""


def with_extension(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's engine with those that make it use this module; plugins are loaded as it is made."""
    if (plugins := os.environ.get("VLLM_PLUGINS")) is not None:  # it names all that are loaded
        os.environ["VLLM_PLUGINS"] = f"{plugins},strop"
    return {
        **arguments,
        "worker_extension_cls": "strop_worker.WorkerExtension",
        "weight_transfer_config": {"backend": BACKEND},
    }


def opened_memory(memory: dict[str, Any]) -> torch.Tensor:
    """Memory [n] uint8 of a device that another process exported; OSError with the reason where it cannot be opened."""
    device = cuda_ipc.sharing_device(torch.device("cuda"))
    if device is None:
        raise OSError("it computes on no CUDA device")
    opened: torch.Tensor = device.open(memory)
    return opened


def _strop(name: str, *path: str) -> Any:
    """A module of strop that imports nothing of it."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[3].joinpath(*path))
    assert spec is not None, "a Python file has a loader"
    assert spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _with_whole_log_probs(sampler: Any) -> None:
    """Log-probs of the distribution at the sampling temperature, before top-k and top-p cut it.

    vLLM offers those before temperature or those after the cut; a trainer, which knows no cut, needs these. Once vLLM
    has such a mode, this goes.
    """
    cut = sampler.__call__

    def call(self: Any, logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
        full = None if k is None and p is None else logits.log_softmax(dim=-1, dtype=torch.float32)
        tokens, log_probs = cut(self, logits, generators, k, p)
        return tokens, log_probs if full is None or log_probs is None else full

    sampler.__call__ = call


digest_tensor = _strop("strop_digest", "engines", "checksum", "tensors.py").digest_tensor
cuda_ipc = _strop("strop_cuda_ipc", "rollout", "weight_sync", "cuda_ipc.py")
_with_whole_log_probs(TopKTopPSampler)
if "STROP_ROUTING" in os.environ:
    importlib.import_module("strop_routing")
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)
