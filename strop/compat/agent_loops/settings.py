"""The setting that names loops, among those of agents."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoopSettings:
    loops: str = ""
    """YAML list of agent loops: name, _target_ (FILE.py:CLASS, or a dotted path) and further constructor arguments."""
