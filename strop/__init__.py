"""strop: reinforcement-learning post-training of language models.

The names below are loaded on first use, so that `import strop` stays quick and pulls in no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from strop.protocol import DataProto
    from strop.trajectory import Prompt, Trajectory

__version__ = "0.2.0"

__all__ = ["DataProto", "Prompt", "Trajectory", "__version__"]

__getattr__, __dir__ = lazy_names(
    __name__, {"strop.protocol": "DataProto", "strop.trajectory": "Prompt Trajectory"}
)
