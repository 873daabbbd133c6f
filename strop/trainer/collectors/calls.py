"""Calls of rollout workers that play groups over several steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import cast

from strop.controller import WorkerGroup
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt
from strop.rollout.types import Sampling
from strop.run.replay_schedule import Spans
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.worker_groups import WorkerGroups
from strop.workers.async_rollout.saved_group import SavedGroup
from strop.workers.async_rollout.worker import AsyncRolloutWorker


def calls(roles: WorkerGroups) -> AsyncRolloutWorker:
    """The rollout workers of a run, whose role was made for this."""
    return cast(WorkerGroup[AsyncRolloutWorker], roles.rollout).call


def start_groups(
    roles: WorkerGroups,
    prompts: Sequence[Prompt],
    samples_per_prompt: int,
    sampling: Sampling,
    saved: Mapping[str, SavedGroup] = MappingProxyType({}),
    spans: Mapping[str, Spans] = MappingProxyType({}),
) -> None:
    """Start every sample of these prompts; `take_completed` gives them when they have ended.

    Args:
        roles: of the run.
        prompts, samples_per_prompt, sampling: as for `WorkerGroups.run_episodes`.
        saved: by uid, what some of them had before the run was interrupted.
        spans: by uid, which versions have to sample what, where a run is made again.
    """
    columns = {
        "prompt": prompts,
        "saved": [saved.get(prompt.uid, SavedGroup()) for prompt in prompts],
        "spans": [spans.get(prompt.uid, {}) for prompt in prompts],
    }
    rows = DataProto.from_dict({}, non_tensors=columns)
    calls(roles).start_groups(rows, samples_per_prompt, sampling)


def take_completed(
    roles: WorkerGroups, due: Sequence[str], at_least: int, within_s: float | None = None
) -> RolloutBatch:
    """Samples of prompts that were begun and have ended, each given once; those of a prompt together.

    Args:
        roles: of the run.
        due: uids that have to be among what was given until then.
        at_least: prompts that each rollout worker has to give; fewer only where it plays no more.
        within_s: seconds after which each gives what it has; None: it waits.

    Raises:
        RewardError: the scorers cannot go on.
    """
    played = calls(roles).take_completed(list(due), at_least, within_s)
    reports = played.select([], ["report"]).get().non_tensor_batch["report"]
    return RolloutBatch(rows=played.select([], ["episode"]), reports=tuple(reports))
