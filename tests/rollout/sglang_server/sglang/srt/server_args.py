"""ServerArgs of the stand-in: the arguments that the real ones have by these names, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMAS = json.loads((Path(__file__).parents[3] / "sglang_0_5_23.json").read_text())


class ServerArgs:
    """Arguments by name."""

    def __init__(self, **arguments: Any) -> None:
        if unknown := set(arguments) - set(SCHEMAS["server_args"]):
            raise TypeError(f"ServerArgs.__init__() got an unexpected keyword argument {min(unknown)!r}")
        self.values = arguments
