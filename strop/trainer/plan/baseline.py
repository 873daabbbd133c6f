"""Memory of a process of a run before it has a model: the interpreter and what it imports."""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache

_PROGRAM = """
import strop.cli.commands.train, strop.cli.launching, strop.trainer.start, strop.trainer.train
import strop.engines.model, strop.data.loading, pyarrow.parquet, tokenizers, datasets
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3 import modeling_qwen3
import torch
layer = torch.nn.Linear(256, 256)
layer(torch.rand(64, 256)).sum().backward()
torch.optim.AdamW(layer.parameters(), fused=True).step()
for line in open("/proc/self/status"):
    if line.startswith("VmHWM"):
        print(1024 * int(line.split()[1]))
"""
TIMEOUT_S = 120.0
ASSUMED_BYTES = 750 << 20
"""Assumption for a system that does not tell it, or not in that time."""


@lru_cache
def baseline_bytes(*, uses_ray: bool = False) -> int:
    """Most memory of such a process on this machine, measured in one of its own: about ten seconds."""
    program = f"import ray\n{_PROGRAM}" if uses_ray else _PROGRAM
    try:
        result = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return ASSUMED_BYTES
    words = result.stdout.split()
    return int(words[-1]) if result.returncode == 0 and words else ASSUMED_BYTES
