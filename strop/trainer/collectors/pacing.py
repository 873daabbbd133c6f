"""Staleness bound of generation ahead of training, and selection of finished groups: rollout.max_staleness.

A group is the samples of one prompt. Before step s the weights hold version s - 1. With a bound of K versions, a group
that was begun at version v is trained at step v + K + 1 at the latest. Two rules keep the bound without throwing work
away:

    capacity   before step s, no more than (s + K) B groups are begun in the whole run, B those of a step: the sampler
               waits, not the trainer (AReaL, Fu et al. 2025, eq. 3);
    deadline   a step takes groups in the order in which they finished, except that it waits for those that would not
               find room in a later step before they are too old.

K may be a fraction (0.5: half a batch ahead); a group is then never older than the next whole number. K = 0 is the
synchronous trainer: B groups are begun, and the step takes all of them.

Where some groups turn out unable to teach (algorithm.filter_groups), more are begun than are needed, by the share of
groups that can. If more can than that, those that were begun last find no room before they are too old: they are
surplus, whatever their length.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StalenessBound:
    """The rules for one run."""

    groups_per_step: int
    """B."""
    max_staleness: float
    """K."""
    num_steps: int
    """Steps of the run: nothing is begun that no step would take."""

    def capacity(
        self,
        step: int,
        num_begun: int,
        *,
        num_in_flight: int = 0,
        share: float = 1.0,
        num_more: int = 0,
        num_beyond: int = 0,
    ) -> int:
        """Number of groups that may be started before this step.

        So many are in play that the bound is reached if this share of them can teach; but never more than the bound
        allows where all can, and none is there yet.

        Args:
            step: from 1.
            num_begun: groups of the run that were begun and not given up, trained ones included.
            num_in_flight: those of them of which it is not known whether they can teach.
            share: of groups that is expected to.
            num_more: how many may be in play beyond those that are needed, because of that share.
            num_beyond: how many more than above may be in play; below 0: fewer.
        """
        size = self.groups_per_step
        bound = min(math.floor((step + self.max_staleness) * size), self.num_steps * size)
        needed = bound - (num_begun - num_in_flight)
        at_once = bound - (step - 1) * size + num_beyond
        return max(0, min(math.ceil(needed / share), needed + num_more, at_once) - num_in_flight)

    def last_step(self, version: int) -> int:
        """The last step that may train a group that was begun at this version."""
        return min(version + math.ceil(self.max_staleness) + 1, self.num_steps)

    def with_room(self, step: int, begun: Mapping[str, int]) -> dict[str, int]:
        """Groups that this step or a later one has room for, if all that were begun before them can teach; by
        uid, the last step that may train it. Arguments are those of `must_train`."""
        room: dict[str, int] = {}
        for uid, version in begun.items():  # an earlier one has no later deadline
            last = self.last_step(version)
            if len(room) < (last - step + 1) * self.groups_per_step:
                room[uid] = last
        return room

    def too_old(self, step: int, left: Mapping[str, int]) -> tuple[str, ...]:
        """The groups that are too old after this step.

        Args:
            step: that has its groups.
            left: the others, as `begun` of `must_train`.
        """
        return tuple(uid for uid, version in left.items() if self.last_step(version) <= step)

    def must_train(self, step: int, begun: Mapping[str, int]) -> frozenset[str]:
        """The groups that this step has to take.

        Args:
            step: that is to be filled.
            begun: of every group that is not trained, finished or not, the version at which it was begun.
        """
        return frozenset(uid for uid, last in self.with_room(step, begun).items() if last <= step)

    def select(self, step: int, begun: Mapping[str, int], finished: Sequence[str]) -> tuple[str, ...] | None:
        """The groups of this step, in the order in which they were begun; None while it has to wait for more.

        Of the groups with the same or an earlier deadline, as many are taken as the steps until then have no room for.

        Args:
            step, begun: as for `must_train`.
            finished: those of `begun` that are finished, first the one that finished first.
        """
        last = self.with_room(step, begun)
        size = min(self.groups_per_step, len(last))
        finished = [uid for uid in finished if uid in last]
        selected: list[str] = []
        for deadline in sorted(set(last.values())):
            bound = sum(other <= deadline for other in last.values())
            needed = bound - (deadline - step) * self.groups_per_step
            among = [uid for uid in finished if last[uid] <= deadline and uid not in selected]
            missing = max(0, needed - sum(last[uid] <= deadline for uid in selected))
            if len(among) < missing:
                return None
            selected += among[:missing]
        selected += [uid for uid in finished if uid not in selected][: size - len(selected)]
        return _in_order(selected, begun) if len(selected) == size else None

    def missing(self, begun: Mapping[str, int], finished: Collection[str]) -> int:
        """Least number of further groups that must finish before `select` can have enough."""
        return max(0, min(self.groups_per_step, len(begun)) - len(finished))


def _in_order(chosen: Collection[str], begun: Mapping[str, int]) -> tuple[str, ...]:
    """These, in the order in which they were begun."""
    return tuple(uid for uid in begun if uid in chosen)
