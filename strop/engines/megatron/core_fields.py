"""Names of the fields of megatron-core's TransformerConfig, read from its source files: importing them takes ten
seconds and says warnings.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_FILES = ("transformer/transformer_config.py", "model_parallel_config.py")
"""Of megatron.core: the class, and the one that it extends."""


@cache
def transformer_fields() -> frozenset[str]:
    """Fields that TransformerConfig of the megatron-core on this machine takes; empty where there is none."""
    if importlib.util.find_spec("megatron") is None:
        return frozenset()
    core = importlib.util.find_spec("megatron.core")
    if core is None or core.origin is None:
        return frozenset()
    classes: dict[str, ast.ClassDef] = {}
    for name in _FILES:
        tree = ast.parse((Path(core.origin).parent / name).read_text(encoding="utf-8"))
        classes |= {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    return frozenset(_fields_of("TransformerConfig", classes))


def _fields_of(name: str, classes: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Annotated names in the body of a class and of those that it extends."""
    node = classes[name]
    for base in node.bases:
        if isinstance(base, ast.Name) and base.id in classes:
            yield from _fields_of(base.id, classes)
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            yield entry.target.id
