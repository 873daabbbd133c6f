"""The breach of a rule; shared by the checks of estimators and of losses (torch-free)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RuleBreach:
    """One rule that a function breaks."""

    rule: str
    """The rule in a few words, the same for every function: `zero outside the mask`."""
    sentence: str
    """The observation, with the numbers, and its consequence."""
