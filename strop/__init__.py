"""strop: reinforcement-learning post-training of language models.

The names below are loaded on first use, so that `import strop` stays quick and pulls in no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop._moved import keep_old_names
from strop.utils.lazy_import import lazy_names
from strop.version import __version__

if TYPE_CHECKING:
    from strop.api.results import Result
    from strop.api.toolkit import Pieces
    from strop.api.training import GRPO, evaluate, sft, train
    from strop.controller.ray.future import DataProtoFuture
    from strop.protocol import DataProto
    from strop.protocol.trajectory import Prompt, Trajectory

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
        "strop.api.training": "GRPO evaluate sft train",
        "strop.api.toolkit": "Pieces",
        "strop.api.results": "Result",
        "strop.protocol.trajectory": "Prompt Trajectory",
    },
)

keep_old_names()
