"""Engines in environments without strop compare weights by the digest of this one, which they load from its file."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import strop
from strop.engines.checksum.tensors import digest_tensor

INSIDE = ("rollout/sglang/inside/strop_loader.py", "rollout/vllm/inside/strop_worker.py")


@pytest.mark.parametrize("file", INSIDE)
def test_the_digest_is_found_from_where_the_file_lies(file: str) -> None:
    path = Path(strop.__file__).parent / file
    needed = [
        node
        for node in ast.parse(path.read_text()).body
        if (isinstance(node, ast.FunctionDef) and node.name == "_digest")
        or (isinstance(node, ast.Import | ast.ImportFrom) and "vllm" not in ast.unparse(node))
    ]
    names: dict[str, Any] = {"__file__": str(path)}
    exec(compile(ast.Module(body=needed, type_ignores=[]), str(path), "exec"), names)
    tensor = torch.arange(7, dtype=torch.float32)
    assert names["_digest"]()(tensor) == digest_tensor(tensor)
