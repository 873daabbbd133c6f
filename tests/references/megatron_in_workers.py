"""Puts references.megatron_cpu in force in the worker processes of Ray, and nowhere else: for model.external_lib. The
process that imports it lets runs on a CPU pass."""

from __future__ import annotations

import importlib.util
import os

from references.megatron_cpu import allow_cpu, use_cpu

IS_INSTALLED = importlib.util.find_spec("megatron") is not None
SETTINGS = ("kind=megatron", "megatron.distributed_optimizer=false")
"""Of a role's engine, beside `model.external_lib=references.megatron_in_workers`."""

allow_cpu()
if "RAY_RAYLET_PID" in os.environ:  # set in processes that Ray starts
    use_cpu()
