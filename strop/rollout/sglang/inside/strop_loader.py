"""Weights out of shared memory, as a custom loader of SGLang (`--custom-weight-loader strop_loader.load`).

It runs in each of SGLang's model workers, where there is no strop: the digest is loaded from its file. What SGLang
hands on as named tensors are empty ones, whose names are the JSON of what `shared_bucket` gives
(strop.rollout.weight_sync.bucket).
"""

from __future__ import annotations

import importlib.util
import json
import mmap
from pathlib import Path
from typing import Any

import torch


def load(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Load buckets, each tensor compared with its digest first.

    Raises:
        ValueError: what is in the memory is not what was announced.
    """
    for text, _ in named_tensors:
        bucket = json.loads(text)
        with Path(bucket["path"]).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), bucket["num_bytes"], flags=mmap.MAP_PRIVATE)
        data = torch.frombuffer(mapped, dtype=torch.uint8)
        tensors = []
        for name, shape, dtype, offset, digest in bucket["entries"]:
            kind = getattr(torch, dtype)
            size = torch.Size(shape).numel() * kind.itemsize
            value = data[offset : offset + size].view(kind).view(shape)
            if (actual := digest_tensor(value)) != digest:
                raise ValueError(f"{name} arrived with digest {actual:016x} instead of {digest:016x}")
            tensors.append((name, value))
        model.load_weights(iter(tensors))


def _digest() -> Any:
    path = Path(__file__).parents[3] / "engines" / "checksum" / "tensors.py"
    spec = importlib.util.spec_from_file_location("strop_digest", path)
    assert spec is not None
    assert spec.loader is not None, "a Python file has a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.digest_tensor


digest_tensor = _digest()
