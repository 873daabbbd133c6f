"""Rules that turn what a run shows into named diagnoses with advice.

preflight    before a run: can it learn anything?
"""

from __future__ import annotations

from strop.health.preflight import Check, Probe, examine

__all__ = ["Check", "Probe", "examine"]
