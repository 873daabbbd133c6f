"""Puts references.megatron_cpu in force in the worker processes of Ray, and nowhere else: for model.external_lib."""

from __future__ import annotations

import os

from references.megatron_cpu import use_cpu

if "RAY_RAYLET_PID" in os.environ:  # set in processes that Ray starts
    use_cpu()
