"""Which settings ask for samples that are played over several calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from strop.agents.config import AgentConfig
from strop.rollout.config import RolloutConfig
from strop.trainer.config import Config
from strop.trainer.sections import TrainerConfig
from strop.workers.player import agent_workers


@pytest.mark.parametrize(
    ("setting", "value"), [("max_staleness", 0.5), ("over_issue", 0.5), ("overlap_log_probs", True)]
)
def test_every_setting_that_asks_for_it_is_seen(setting: str, value: float) -> None:
    rollout = RolloutConfig(**{setting: value})
    seen = Config.ahead_by.fget(  # type: ignore[attr-defined]
        SimpleNamespace(rollout=rollout, trainer=TrainerConfig())
    )
    assert seen == f"rollout.{setting}"
    assert rollout.is_streamed


def test_agents_in_processes_are_refused_by_the_name_of_their_setting() -> None:
    setup = SimpleNamespace(config=AgentConfig(default_agent="mine", num_workers=2), images=None)
    with pytest.raises(
        ValueError, match=r"agent\.num_workers is 2, but the part of strop for that is missing"
    ):
        agent_workers(setup, None, None, None, seed=0)  # type: ignore[arg-type]
