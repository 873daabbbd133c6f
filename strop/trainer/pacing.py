"""How far generation may run ahead of training, and which finished groups a step takes: rollout.max_staleness.

A group is the samples of one prompt. Before step s the weights hold version s - 1. With a bound of K versions, a group
that was begun at version v is trained at step v + K + 1 at the latest. Two rules keep the bound without throwing work
away:

    capacity   before step s, no more than (s + K) B groups are begun in the whole run, B those of a step: the sampler
               waits, not the trainer (AReaL, Fu et al. 2025, eq. 3);
    deadline   a step takes groups in the order in which they finished, except that it waits for those that would not
               find room in a later step before they are too old.

K may be a fraction (0.5: half a batch ahead); a group is then never older than the next whole number. K = 0 is the
synchronous trainer: B groups are begun, and the step takes all of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The rules for one run."""

    groups_per_step: int
    """B."""
    max_staleness: float
    """K."""
    num_steps: int
    """Steps of the run: nothing is begun that no step would take."""

    def room(self, step: int, num_begun: int) -> int:
        """How many groups may be begun before this step.

        Args:
            step: from 1.
            num_begun: groups of the run that were begun and not given up, trained ones included.
        """
        ahead = math.floor((step + self.max_staleness) * self.groups_per_step)
        return max(0, min(ahead, self.num_steps * self.groups_per_step) - num_begun)

    def last_step(self, version: int) -> int:
        """The last step that may train a group that was begun at this version."""
        return version + math.ceil(self.max_staleness) + 1

    def due(self, step: int, begun: Mapping[str, int]) -> frozenset[str]:
        """The groups that this step has to take.

        Args:
            step: that is to be filled.
            begun: of every group that is not trained, finished or not, the version at which it was begun.
        """
        return frozenset(uid for uid, version in begun.items() if self.last_step(version) <= step)

    def choose(self, step: int, begun: Mapping[str, int], finished: Sequence[str]) -> tuple[str, ...] | None:
        """The groups of this step, in the order in which they were begun; None while it has to wait for more.

        Of the groups with the same or an earlier deadline, as many are taken as the steps until then have no room for.

        Args:
            step, begun: as for `due`.
            finished: those of `begun` that are finished, first the one that finished first.
        """
        size = min(self.groups_per_step, len(begun))
        last = {uid: self.last_step(version) for uid, version in begun.items()}
        taken: list[str] = []
        for deadline in sorted(set(last.values())):
            bound = sum(other <= deadline for other in last.values())
            needed = bound - (deadline - step) * self.groups_per_step
            among = [uid for uid in finished if last[uid] <= deadline and uid not in taken]
            missing = max(0, needed - sum(last[uid] <= deadline for uid in taken))
            if len(among) < missing:
                return None
            taken += among[:missing]
        taken += [uid for uid in finished if uid not in taken][: size - len(taken)]
        return _in_order(taken, begun) if len(taken) == size else None

    def missing(self, step: int, begun: Mapping[str, int], finished: Collection[str]) -> int:
        """How many more groups must finish at least before `choose` can have enough."""
        return max(0, min(self.groups_per_step, len(begun)) - len(finished))


def _in_order(chosen: Collection[str], begun: Mapping[str, int]) -> tuple[str, ...]:
    """These, in the order in which they were begun."""
    return tuple(uid for uid in begun if uid in chosen)
