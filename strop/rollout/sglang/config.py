"""Settings of generation with SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from pathlib import Path
from typing import Any

from strop.config.sections import section
from strop.rollout.sglang.environment import sglang_python
from strop.utils.field_types import PositiveFloat, PositiveInt, PositiveShare

OURS = (
    "model_path", "trust_remote_code", "dtype", "load_format", "context_length", "max_running_requests", "tp_size",
    "pp_size", "host", "port", "api_key", "skip_tokenizer_init", "custom_weight_loader", "incremental_streaming_output",
    "enable_memory_saver", "weight_version",
)  # fmt: skip
"""Arguments of SGLang's server that follow from other settings, or that training depends on."""


@section("rollout.sglang")
class SglangConfig:
    python: str = ""
    """Python of an environment with SGLang. Empty: what the variable STROP_SGLANG names."""
    tensor_parallel: PositiveInt = 1
    """Devices that share each matrix of one copy of the model."""
    pipeline_parallel: PositiveInt = 1
    """Stages of layers, one after another, each on tensor_parallel devices."""
    mem_fraction_static: PositiveShare = 0.5
    """Share of a device's memory for weights and cache; the rest is the trainer's."""
    start_timeout_s: PositiveFloat = 600.0
    """Limit for importing SGLang and starting its server, in seconds."""
    server_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang's server by their Python names, such as {ep_size: 8}."""

    def __post_init__(self) -> None:
        for name in OURS:
            if name in self.server_args:
                raise ValueError(
                    f"rollout.sglang.server_args names {name}, which follows from other settings: remove it"
                )

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def memory_share(self) -> float:
        """Share of a device's memory that an engine takes."""
        return self.mem_fraction_static

    @property
    def spans_nodes(self) -> bool:
        """All devices of an engine are on one node."""
        return False

    @property
    def takes_media(self) -> bool:
        """The engine is given text alone."""
        return False

    def installed(self) -> Path:
        """Python that the engine runs in.

        Raises:
            ValueError: there is none; the sentence says how to get it.
        """
        return sglang_python(self.python)

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """Programs that are started (strop.config.sections)."""
        if self.python:
            yield "python", f"{self.python} (started)", self.python
        if self.server_args:
            yield "server_args", f"{sorted(self.server_args)} (arguments of SGLang, which may name code)", ""
