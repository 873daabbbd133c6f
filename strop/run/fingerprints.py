"""Step fingerprints: a hash chain that two equal runs share and two different runs leave at a named place."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from strop.run.errors import RunError
from strop.run.events import EventLog

STAGES = (
    "data", "prompt_tokens", "sampled_tokens", "log_probs", "ref_log_probs", "values", "process_rewards",
    "correction", "rewards", "advantages", "loss", "weights", "critic_weights", "prm_weights",
)  # fmt: skip
"""The stages of a step in the order they happen: the first one that differs is where two runs part."""

KIND = "fingerprint"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Hashes of the stages of one step."""

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
                matches = difflib.get_close_matches(name, STAGES, n=1)
                hint = f"did you mean {matches[0]!r}?" if matches else f"known: {', '.join(STAGES)}"
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
