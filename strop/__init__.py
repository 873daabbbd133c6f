"""strop: reinforcement-learning post-training of language models.

The names below are loaded on first use, so that `import strop` stays quick and pulls in no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.controller.ray.future import DataProtoFuture
    from strop.protocol import DataProto
    from strop.python.doors import GRPO, evaluate, sft, train
    from strop.python.pieces import Pieces
    from strop.python.results import Result
    from strop.trajectory import Prompt, Trajectory

__version__ = "0.2.0"

__all__ = [
    "GRPO",
    "DataProto",
    "DataProtoFuture",
    "Pieces",
    "Prompt",
    "Result",
    "Trajectory",
    "__version__",
    "evaluate",
    "sft",
    "train",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "strop.controller.ray.future": "DataProtoFuture",
        "strop.protocol": "DataProto",
        "strop.python.doors": "GRPO evaluate sft train",
        "strop.python.pieces": "Pieces",
        "strop.python.results": "Result",
        "strop.trajectory": "Prompt Trajectory",
    },
)
