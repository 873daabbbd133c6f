"""Facts about the machine, which every benchmark says with its figures."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("strop", "torch", "transformers", "tensordict")
BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""With one of them a processor multiplies in bfloat16; the last is ARM's word."""


def machine() -> dict[str, Any]:
    """Processor, cores, load when the benchmark started, and versions."""
    model = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    flags = next(
        (line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))), ""
    ).split()
    return {
        "cpu": model,
        "features": [flag for flag in ("avx2", "avx512f", *BFLOAT16_FEATURES) if flag in flags],
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES},
    }


def multiplies_in_bfloat16(where: Mapping[str, Any]) -> bool:
    """Whether the machine of these facts does; on others torch takes ten times as long in bfloat16 as in float32."""
    return any(feature in where["features"] for feature in BFLOAT16_FEATURES)


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []
