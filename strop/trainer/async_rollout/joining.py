"""What the trainer is given where samples are played over several calls."""

from __future__ import annotations

from collections.abc import Mapping

from strop.controller import RoleSpec, role
from strop.rollout.types import Sampling
from strop.run import RunFolder
from strop.run.replay_schedule import StepSchedule
from strop.trainer.async_rollout.clocked import ClockedCollector
from strop.trainer.async_rollout.collector import AheadCollector
from strop.trainer.async_rollout.over_issue import OverIssueCollector
from strop.trainer.async_rollout.virtual_time import virtual_time
from strop.trainer.collecting import RolloutCollector
from strop.trainer.config import Config
from strop.trainer.setup import TrainingData
from strop.trainer.worker_groups import Roles
from strop.workers.async_rollout.worker import AheadWorker
from strop.workers.rollout import Playing


def role_of(config: Config, playing: Playing) -> RoleSpec[AheadWorker]:
    """The rollout role of a run."""
    time = virtual_time(config.trainer)
    return role(AheadWorker, config.model, config.rollout, config.reward, playing, time=time)


def collector_of(
    config: Config,
    run: RunFolder,
    data: TrainingData,
    roles: Roles,
    sampling: Sampling,
    *,
    start_step: int,
    recorded: Mapping[int, StepSchedule],
) -> RolloutCollector:
    """What fills the steps of a run; arguments as for AheadCollector."""
    parts = config, run, data, roles, sampling
    if not config.rollout.is_streamed:
        return ClockedCollector(*parts)
    made = OverIssueCollector if config.rollout.over_issue else AheadCollector
    return made(*parts, start_step=start_step, recorded=recorded)
