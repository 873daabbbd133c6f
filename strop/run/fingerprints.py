"""Step fingerprints: a hash chain that two equal runs share and two different runs leave at a named place."""

from __future__ import annotations

import difflib
import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strop.run.errors import RunError
from strop.run.events import EventLog

STAGES = (
    "data", "prompt_tokens", "sampled_tokens", "log_probs", "ref_log_probs", "values", "process_rewards",
    "correction", "rewards", "advantages", "loss", "weights", "critic_weights", "prm_weights",
)  # fmt: skip
"""The stages of a step in the order they happen: the first one that differs is where two runs part."""

KIND = "fingerprint"

Digestible = NDArray[Any] | str | bytes | int | float | Sequence[int] | Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What one step did, as hashes."""

    step: int
    stages: Mapping[str, str]
    """Digest per stage; a stage that the run does not have is absent."""
    chain: str
    """Hash over the chain of the step before and the stages of this one."""


class FingerprintChain:
    """The hash chain of a run: a view over its event log."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._last: Fingerprint | None = None
        self.reload()

    @property
    def head(self) -> str:
        """Chain hash of the last step, "" before the first; a checkpoint records it."""
        return self._last.chain if self._last else ""

    def append(self, step: int, **stage_digests: str) -> str:
        """Record the stages of one step and return its chain hash.

        Raises:
            ValueError: an unknown stage, no stage at all, or a step that is not later than the last one.
        """
        for name in stage_digests:
            if name not in STAGES:
                near = difflib.get_close_matches(name, STAGES, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(STAGES)}"
                raise ValueError(f"unknown fingerprint stage {name!r}; {hint}")
        if not stage_digests:
            raise ValueError(
                f"the fingerprint of step {step} has no stage; give one or more of {', '.join(STAGES)}"
            )
        if self._last and step <= self._last.step:
            raise ValueError(
                f"step {step} already has a fingerprint (the last one is of step {self._last.step}); roll "
                f"the run back before steps are repeated"
            )
        stages = {name: stage_digests[name] for name in STAGES if name in stage_digests}
        chain = chain_hash(self.head, step, stages)
        self._events.append(KIND, step, stages=stages, chain=chain)
        self._last = Fingerprint(step=step, stages=stages, chain=chain)
        return chain

    def read(self) -> list[Fingerprint]:
        """The fingerprints of all steps.

        Raises:
            RunError: a fingerprint does not follow from the one before it.
        """
        fingerprints: list[Fingerprint] = []
        head, before = "", "the start"
        for event in self._events.read(KIND):
            step, stages, chain = event["step"], event["stages"], event["chain"]
            if chain != chain_hash(head, step, stages):
                raise RunError(
                    f"the fingerprint of step {step} does not follow from {before} in {self._events.path}: "
                    f"records are missing or were changed, so this run cannot be compared or continued"
                )
            fingerprints.append(Fingerprint(step=step, stages=stages, chain=chain))
            head, before = chain, f"step {step}"
        return fingerprints

    def reload(self) -> None:
        """Read the position again after the event log was rolled back."""
        fingerprints = self.read()
        self._last = fingerprints[-1] if fingerprints else None


def chain_hash(previous: str, step: int, stages: Mapping[str, str]) -> str:
    """sha256 over the previous chain hash, the step, and the stages in their order."""
    hasher = hashlib.sha256(f"{previous}\n{step}\n".encode())
    for name in STAGES:
        if name in stages:
            hasher.update(f"{name}={stages[name]}\n".encode())
    return hasher.hexdigest()


def digest(*parts: Digestible) -> str:
    """sha256 over arrays and plain values, exact to the bit.

    Each part enters with its type and size, so ("ab", "c") and ("a", "bc") differ, and so do a float32 and
    a float64 zero, or 0.0 and -0.0. Arrays enter with dtype and shape, in C order, without a copy when
    they already lie so. A bfloat16 tensor comes as a view of its bits (int16).

    Raises:
        TypeError: a part of another type, or an array of objects.
    """
    hasher = hashlib.sha256()
    for part in parts:
        _update(hasher, part)
    return hasher.hexdigest()


def _update(hasher: hashlib._Hash, part: Digestible) -> None:
    if isinstance(part, np.ndarray):
        if part.dtype.hasobject:
            raise TypeError("an array of objects has no bytes to hash; convert it to numbers or strings")
        hasher.update(f"array {part.dtype.str} {part.shape}\n".encode())
        hasher.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    elif isinstance(part, (str, bytes)):
        content = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        hasher.update(f"{type(part).__name__} {len(content)}\n".encode())
        hasher.update(content)
    elif isinstance(part, (bool, int)):
        hasher.update(f"int {int(part)}\n".encode())
    elif isinstance(part, float):
        hasher.update(b"float " + struct.pack("<d", part))
    elif isinstance(part, Sequence):
        hasher.update(f"list {len(part)}\n".encode())
        for item in part:
            _update(hasher, item)
    else:
        raise TypeError(f"cannot hash a {type(part).__name__}; give arrays, strings, bytes or numbers")
