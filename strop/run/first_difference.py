"""First step and stage in which the fingerprints of two runs differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strop.run.fingerprints import STAGES, Fingerprint


@dataclass(frozen=True, kw_only=True)
class Difference:
    """First difference of two runs."""

    step: int
    stage: str
    num_equal_steps: int
    """Steps that both runs have and that are equal, all before `step`."""


def common_steps(a: Sequence[Fingerprint], b: Sequence[Fingerprint]) -> list[int]:
    """Steps that both runs have, in order."""
    return sorted({fingerprint.step for fingerprint in a} & {fingerprint.step for fingerprint in b})


def compare(a: Sequence[Fingerprint], b: Sequence[Fingerprint]) -> Difference | None:
    """The first step and stage where two runs differ; None when all common steps are equal.

    Raises:
        ValueError: the runs have no step in common.
    """
    first, second = ({fingerprint.step: fingerprint for fingerprint in run} for run in (a, b))
    steps = common_steps(a, b)
    if not steps:
        raise ValueError(
            f"the two runs have no step in common ({len(first)} and {len(second)} fingerprints), so there is "
            f"nothing to compare"
        )
    for num_equal_steps, step in enumerate(steps):
        for stage in STAGES:
            if first[step].stages.get(stage) != second[step].stages.get(stage):
                return Difference(step=step, stage=stage, num_equal_steps=num_equal_steps)
    return None
