"""Settings of generation with vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from strop.config.sections import section
from strop.rollout.vllm.environment import vllm_python
from strop.utils.field_types import PositiveFloat, PositiveInt, PositiveShare

LEAST_TEMPERATURE = 0.01
"""That vLLM samples at, whatever lower one but 0 it is asked for (its _MAX_TEMP)."""
OURS = (
    "model", "trust_remote_code", "dtype", "load_format", "max_model_len", "max_num_seqs", "tensor_parallel_size",
    "pipeline_parallel_size", "nnodes", "node_rank", "master_addr", "master_port", "logprobs_mode",
    "skip_tokenizer_init", "worker_extension_cls", "weight_transfer_config", "enable_sleep_mode",
    "enable_return_routed_experts", "aux_output_config",
)  # fmt: skip
"""Arguments of vLLM's engine that follow from other settings, or that training depends on."""

NOT_RECORDED = (
    "async_scheduling", "enable_prefix_caching", "speculative_config", "decode_context_parallel_size",
    "prefill_context_parallel_size", "kv_transfer_config",
)  # fmt: skip
"""Arguments of vLLM's engine that follow from rollout.router_replay, or with which vLLM records no routing."""


@section("rollout.vllm")
class VllmConfig:
    python: str = ""
    """Python of the environment with vLLM. Empty: what the variable STROP_VLLM names, else the environment that
    `strop engine install vllm` makes."""
    tensor_parallel: PositiveInt = 1
    """Devices that share each matrix of one copy of the model."""
    pipeline_parallel: PositiveInt = 1
    """Stages of layers, one after another, each on tensor_parallel devices."""
    gpu_memory_utilization: PositiveShare = 0.5
    """Share of a device's memory that vLLM takes, weights and cache; the rest is the trainer's."""
    cpu_cache_gib: PositiveFloat = 1.0
    """On a CPU: memory of the key-value cache, in GiB."""
    start_timeout_s: PositiveFloat = 600.0
    """Limit for importing vLLM and making its engine, in seconds."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's engine by their Python names, such as {enable_expert_parallel: true}."""

    def __post_init__(self) -> None:
        for name in OURS:
            if name in self.engine_args:
                raise ValueError(
                    f"rollout.vllm.engine_args names {name}, which follows from other settings: remove it"
                )

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def memory_share(self) -> float:
        """Share of a device's memory that an engine takes."""
        return self.gpu_memory_utilization

    @property
    def spans_nodes(self) -> bool:
        """An engine takes whole nodes where one has too few devices for it."""
        return True

    @property
    def takes_media(self) -> bool:
        """The engine is given images and videos, which are read without the model (engines/multimodal)."""
        return True

    def installed(self) -> Path:
        """Python that the engine runs in.

        Raises:
            ValueError: there is none; the sentence says how to get it.
        """
        return vllm_python(self.python)

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """Programs that are started (strop.config.sections)."""
        if self.python:
            yield "python", f"{self.python} (started)", self.python
        if self.engine_args:
            yield "engine_args", f"{sorted(self.engine_args)} (arguments of vLLM, which may name code)", ""
