"""How a rollout worker plays, and what it keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strop.agents.config import AgentConfig


@dataclass(frozen=True, kw_only=True)
class Playing:
    """What a `RolloutWorker` is told beside its model, and how to generate and to score."""

    device: str
    """Where the policy is, if it is the worker's own."""
    seed: int
    """Of the run; with a prompt's uid and the sample's number it fixes every random number."""
    agent: AgentConfig = field(default_factory=AgentConfig)
    """Agents and tools; single turns unless it says otherwise."""
    template_options: Mapping[str, Any] | None = None
    """Variables of the chat template."""
    max_prompt_tokens: int | None = None
    """Of any prompt of the run."""
    max_tokens: int = 0
    """Of the longest sequence, prompt and response, for engines that plan their memory by it."""
    version: int = 0
    """Policy version that the weights hold."""
    share_with: str | None = None
    """Role in this process whose model generates; None for a copy of the worker's own."""
    extensions: tuple[str, ...] = ()
    """Files of the user's that register an engine."""
    is_replayed: bool = False
    """Requests wait for the versions that sampled them in another run."""
    recording: Path | None = None
    """A run whose samples are taken in place of new ones."""

    keeps_text: bool = False
    """Add columns raw_prompt and response_text to the rows, for a reward model."""
    reward_keys: tuple[str, ...] = ()
    """Parts of the reward that become the column reward_parts."""
    anchor_similarity: float | None = None
    """Add the columns of single answers, with this similarity; None: not."""
    samples: Path | None = None
    """Folder of the sample store that `write_samples` writes to."""
    keeps_rows: bool = False
    """Write what rewards get of the dataset rows as well, which cannot be read again by number."""
    logs: Path | None = None
    """Folder for what the engine and reward functions print, and for how far a call is."""
