"""Lengths of answers at earlier visits of a prompt, and the order of prompts by them: rollout.longest_first.

Where more sequences wait than an engine decodes at once, a long one that begins last keeps the step waiting alone.
Beginning with those that are expected to be long ends a step earlier (longest processing time first, Graham 1969).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from strop.data.visit_ids import parse_visit_uid
from strop.protocol.trajectory import Prompt
from strop.trainer.collectors.saved_state import restore_state
from strop.workers.reports import EpisodeReport


class Lengths:
    """Tokens of the answers to each row at its last visit."""

    FILE = "lengths.json"
    """In a checkpoint."""

    def __init__(self) -> None:
        self._mean: dict[int, float] = {}

    def record(self, reports: Iterable[EpisodeReport]) -> None:
        """Remember how long these samples were."""
        tokens: dict[int, list[int]] = defaultdict(list)
        for report in reports:
            tokens[parse_visit_uid(report.uid)[1]].append(report.num_sampled_tokens)
        self._mean |= {row: sum(lengths) / len(lengths) for row, lengths in tokens.items()}

    def longest_first(self, prompts: Sequence[Prompt], *, ranks: int) -> list[Prompt]:
        """The prompts in the order in which to begin them: dealt out to ranks, each with its longest ones first.

        One that was never visited counts as long as the mean of the others.

        Args:
            prompts: in any order.
            ranks: among whom they are divided, as evenly as possible and in order.
        """
        means = [self._mean[prompt.row] for prompt in prompts if prompt.row in self._mean]
        middle = sum(means) / len(means) if means else 0.0
        ordered = sorted(prompts, key=lambda prompt: -self._mean.get(prompt.row, middle))
        return [prompt for rank in range(ranks) for prompt in ordered[rank::ranks]]

    def text(self) -> str:
        """For a checkpoint."""
        return json.dumps({str(row): mean for row, mean in self._mean.items()})

    def restore(self, file: Path) -> None:
        """Restore the state of a checkpoint; as `restore_state`."""
        restore_state(file, self._take)

    def _take(self, means: Mapping[str, float]) -> None:
        self._mean = {int(row): float(mean) for row, mean in means.items()}
