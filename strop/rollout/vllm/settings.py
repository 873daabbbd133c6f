"""Settings of one engine of vLLM, and the arguments and variables that follow from them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.engines.multimodal.vl_model import Reader
from strop.rollout.vllm.config import VllmConfig
from strop.utils.allocator import fixed_segments

_CPU_TOKENS_PER_STEP = 4096
"""Most tokens that vLLM computes at a time on a CPU, if no sequence is longer."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of an engine."""

    model: str
    """Hugging Face folder: its shape; weights are written into the engine."""
    trust_remote_code: bool = False
    """Run Python code of the folder."""
    dtype: str
    """Compute precision: float32, bfloat16 or float16."""
    device: str
    """`cpu` or `cuda`."""
    max_tokens: int
    """Of the longest sequence, prompt and response."""
    max_running: int
    """Sequences decoded together."""
    num_threads: int
    """For tensor operations on a CPU."""
    shares_device: bool
    """The trainer uses the device in turn, so memory is given back between."""
    log: Path
    """File that takes what vLLM prints."""
    reader: Reader | None = None
    """Reader of the model's images and videos; None for a model of text alone."""
    architecture: str = ""
    """Class of a model with media, by its name in the folder."""
    unused_tokens: tuple[int, ...] = ()
    """Ids that no text has, and that are never sampled."""
    records_routing: bool = False
    """Outputs say which experts their tokens went to (rollout.router_replay)."""
    nodes: tuple[str, ...] = ()
    """Addresses of the nodes that the engine spans, this one first; empty: this one alone, over loopback."""

    def engine_args(self, config: VllmConfig, *, node: int = 0, port: int = 0) -> dict[str, Any]:
        """Arguments of vLLM's engine.

        Args:
            config: rollout.vllm.
            node: number of the node that they are for.
            port: of the first node, where the workers of several meet.
        """
        of_device: dict[str, Any] = {"gpu_memory_utilization": config.gpu_memory_utilization}
        if self.device == "cpu":
            of_device = {
                "kv_cache_memory_bytes": int(config.cpu_cache_gib * 2**30),
                # A prompt in pieces throws drawn tokens away and sets their random streams back, which streams of a
                # CPU cannot do: vLLM ends with "CPU Generator does not use offset".
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(self.max_tokens, _CPU_TOKENS_PER_STEP),
            }
        if self.reader is not None:
            # Patches go to vLLM's core with each request, normalised; what a tower made of them is kept there.
            of_device |= {"mm_processor_cache_gb": 0, "mm_device_do_normalize": False}
        of_routing: dict[str, Any] = {}
        if self.records_routing:
            # The rows of a step are taken before the next one is scheduled (inside/strop_routing.py).
            of_routing = {"enable_return_routed_experts": True, "async_scheduling": False}
        of_nodes: dict[str, Any] = {}
        if self.nodes:
            of_nodes = {
                "nnodes": len(self.nodes),
                "node_rank": node,
                "master_addr": self.nodes[0],
                "master_port": port,
                "distributed_executor_backend": "mp",
            }
        return {
            "seed": 0,
            "enforce_eager": self.device == "cpu",  # compiling takes a minute there, and gains nothing
            "enable_prefix_caching": True,
            "disable_log_stats": False,  # `health` reads them
            "generation_config": "vllm",  # no sampling settings of the folder
            **of_device,
            **config.engine_args,
            **of_nodes,
            **of_routing,
            "model": self.model,
            "trust_remote_code": self.trust_remote_code,
            "dtype": self.dtype,
            "load_format": "dummy",
            "max_model_len": self.max_tokens,
            "max_num_seqs": self.max_running,
            "tensor_parallel_size": config.tensor_parallel,
            "pipeline_parallel_size": config.pipeline_parallel,
            "logprobs_mode": "processed_logprobs",
            "skip_tokenizer_init": True,
            "enable_sleep_mode": self.device == "cuda" and self.shares_device,
        }

    def env(self, *, node: int = 0) -> dict[str, str]:
        """Variables of vLLM's processes on a node: quiet, offline, on loopback where it is the only one."""
        variables = {
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_HOST_IP": self.nodes[node] if self.nodes else "127.0.0.1",
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sampler has another place for log-probs (inside/strop_worker.py)
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            **fixed_segments(os.environ),
        }
        if self.records_routing:
            variables["STROP_ROUTING"] = "1"  # has its processes import inside/strop_routing.py
        if self.reader is not None:
            sizes = {kind: self.reader.most_tokens(kind) for kind in self.reader.token_ids}
            variables["STROP_PICTURES"] = json.dumps(
                {"architecture": self.architecture, "most_tokens": sizes}
            )
        if self.device == "cpu":
            variables |= {
                "VLLM_TARGET_DEVICE": "cpu",
                # The process of the core computes, if one device is enough. Else vLLM starts another on a CPU, and each
                # waits for the other in a loop of sched_yield; Linux 6.18 was seen to leave a third process, such as
                # this one, without processor time for seconds beside them.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # whoever starts several engines would get one core for all
                "OMP_NUM_THREADS": str(self.num_threads),
                "TORCHDYNAMO_DISABLE": "1",  # the first log-probs would wait a minute for a compiler
            }
        return variables
