"""Engines in environments without strop load what they need of it from its files: the digest, and what opens memory."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import strop
from strop.engines.checksum.tensors import digest_tensor

STROP = Path(strop.__file__).parent
SGLANG, VLLM = "rollout/sglang/inside/strop_loader.py", "rollout/vllm/inside/strop_worker.py"


def loaded(file: str, *names: str) -> dict[str, Any]:
    """Names of a file of an engine, without the engine: functions, and values that are made with them."""
    path = STROP / file
    needed = [
        node
        for node in ast.parse(path.read_text()).body
        if (isinstance(node, ast.FunctionDef) and node.name in ("_digest", "_strop", *names))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in names)
        or (isinstance(node, ast.Import | ast.ImportFrom) and "vllm" not in ast.unparse(node))
    ]
    namespace: dict[str, Any] = {"__file__": str(path)}
    exec(compile(ast.Module(body=needed, type_ignores=[]), str(path), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("file", [SGLANG, VLLM])
def test_the_digest_is_found_from_where_the_file_lies(file: str) -> None:
    tensor = torch.arange(7, dtype=torch.float32)
    assert loaded(file, "digest_tensor")["digest_tensor"](tensor) == digest_tensor(tensor)


def test_memory_of_a_device_is_opened_with_the_file_of_strop_and_refused_without_a_device() -> None:
    worker = loaded(VLLM, "cuda_ipc", "opened_memory")
    assert worker["cuda_ipc"].__file__ == str(STROP / "rollout" / "weight_sync" / "cuda_ipc.py")
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(OSError, match="it computes on no CUDA device"):
        worker["opened_memory"]({})
