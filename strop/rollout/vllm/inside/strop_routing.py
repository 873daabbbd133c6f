"""Experts that the tokens of a request are routed to: vLLM's own record of them, with its V1 model runner.

vLLM has a connector that keeps what the routers choose, for each request and, by the hash of its block, for tokens
whose keys and values are cached; its scheduler sends the rows with the output of a request ("auxiliary outputs",
`enable_return_routed_experts`). vLLM 0.32 and 0.33 call it from the V2 model runner alone, whose sampler has another
place for log-probs and needs Triton, which a CPU does not have, and refuse it with the V1 runner. To import this module
has the V1 runner call it; once vLLM's does, or strop uses V2, this goes.

Routers write into one buffer by operations of tensors, so that captured CUDA graphs write it too (never run on a GPU);
the rows of a step are taken before the next one, which vLLM therefore must not schedule meanwhile
(`async_scheduling=False`). Of workers that share matrices only the first one keeps rows.

It runs in vLLM's environment, where there is no strop.
"""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def routed_layers(model: Any) -> list[int]:
    """Numbers of the layers with experts, in order."""
    modules = model.modules()
    kinds = (MoERunner, RoutedExpertsCaptureSource)
    return sorted({int(module.layer_id) for module in modules if isinstance(module, kinds)})


def encoded(experts: np.ndarray, layers: list[int]) -> dict[str, Any]:
    """Message with the experts of a request: [n, L, k] of layers with experts, from rows [n, all layers, k]."""
    rows = np.ascontiguousarray(experts[:, layers])
    return {
        "shape": rows.shape,
        "dtype": rows.dtype.name,
        "data": base64.b64encode(rows.tobytes()).decode(),
    }


class Recorder:
    """vLLM's connector, with the step of the V1 runner that is under way."""

    def __init__(self, runner: Any, kv_cache_config: Any) -> None:
        self._connector = get_aux_output_connector(runner.get_model(), runner.vllm_config, kv_cache_config)
        self._rows: Any = None

    def begin(self, scheduled: Any) -> None:
        """Before a step: enter its requests and those that have ended."""
        self._connector.begin_step(scheduled.aux_output_connector_metadata)

    def take(self, runner: Any) -> None:
        """After the model's pass: take the rows of its tokens, which are request after request."""
        requests = runner.input_batch
        self._rows = self._connector.prepare_output(
            SimpleNamespace(
                req_ids=requests.req_ids,
                query_start_loc_np=runner.query_start_loc.np[: requests.num_reqs + 1].copy(),
                num_computed_tokens_np=requests.num_computed_tokens_cpu[: requests.num_reqs].copy(),
            )
        )

    def add_to(self, output: Any) -> None:
        """After sampling: give the rows to the output of the step, for the requests that have a token."""
        rows, self._rows = self._rows, None
        if rows is None:
            return
        counts = np.array([len(ids) for ids in output.sampled_token_ids])
        rows.enqueue_cpu_copy(num_sampled=counts, num_rejected=np.zeros_like(counts))
        torch.accelerator.synchronize()  # it is a copy that nobody waits for
        output.aux_output_connector_output = rows.process_output()


class _AsWithV2:
    """A configuration, but for the runner."""

    use_v2_model_runner = True

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def _without_check_of_runner(config_class: Any) -> None:
    """Have vLLM check everything else that the connector needs."""
    verify = config_class._verify_aux_output_compatibility

    def verify_others(self: Any) -> None:
        verify(_AsWithV2(self))

    config_class._verify_aux_output_compatibility = verify_others


def _with_connector(runner_class: Any) -> None:
    """Have model runners of this class call the connector, where the configuration asks for it."""
    initialize = runner_class.initialize_kv_cache
    execute, sample = runner_class.execute_model, runner_class.sample_tokens

    def initialize_kv_cache(self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        # Before CUDA graphs are captured; a cache for profiling, whose argument may come in either way, is dropped.
        initialize(self, kv_cache_config, *args, **kwargs)
        is_profiling = args[0] if args else kwargs.get("is_profiling", False)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            self.strop_recorder = Recorder(self, kv_cache_config)

    def execute_model(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = getattr(self, "strop_recorder", None)
        if recorder is None:
            return execute(self, scheduled, *args, **kwargs)
        recorder.begin(scheduled)
        output = execute(self, scheduled, *args, **kwargs)
        if output is None:  # it has computed, and is to sample
            recorder.take(self)
        return output

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = sample(self, *args, **kwargs)
        if (recorder := getattr(self, "strop_recorder", None)) is not None:
            recorder.add_to(output)
        return output

    runner_class.initialize_kv_cache = initialize_kv_cache
    runner_class.execute_model, runner_class.sample_tokens = execute_model, sample_tokens


_without_check_of_runner(VllmConfig)
_with_connector(GPUModelRunner)
