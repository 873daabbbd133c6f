"""strop: reinforcement-learning post-training of language models.

The names below are loaded on first use, so that `import strop` stays quick and pulls in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.protocol import DataProto, DataProtoFuture
    from strop.trajectory import Prompt, Trajectory

__version__ = "0.1.0"

__all__ = ["DataProto", "DataProtoFuture", "Prompt", "Trajectory", "__version__"]

_HOMES = {
    "DataProto": "strop.protocol",
    "DataProtoFuture": "strop.protocol",
    "Prompt": "strop.trajectory",
    "Trajectory": "strop.trajectory",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'strop' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
