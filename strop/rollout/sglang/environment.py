"""SGLang's environment: one of its own, because it pins other versions than strop."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "STROP_SGLANG"
"""Names the Python of that environment."""


def sglang_python(setting: str) -> Path:
    """Python of the environment with SGLang.

    Args:
        setting: rollout.sglang.python.

    Raises:
        ValueError: none is named, or there is no such program.
    """
    named = setting or os.environ.get(VARIABLE, "")
    if not named:
        raise ValueError(
            f"rollout.engine=sglang needs SGLang in an environment of its own (it pins other versions than strop): "
            f"install sglang there, and name its Python with rollout.sglang.python or {VARIABLE}"
        )
    if not Path(named).expanduser().is_file():
        origin = "rollout.sglang.python" if setting else f"the variable {VARIABLE}"
        raise ValueError(
            f"{origin} names {named!r}, which is no program; name a Python that can import sglang"
        )
    return Path(named).expanduser()
