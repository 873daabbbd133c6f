"""Which settings ask for samples that are played over several calls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from strop.rollout.config import RolloutConfig
from strop.trainer.config import Config
from strop.trainer.sections import TrainerConfig


@pytest.mark.parametrize(("setting", "value"), [("max_staleness", 0.5), ("over_issue", 0.5)])
def test_every_setting_that_asks_for_it_is_seen(setting: str, value: float) -> None:
    rollout = RolloutConfig(**{setting: value})
    seen = Config.async_setting.fget(  # type: ignore[attr-defined]
        SimpleNamespace(rollout=rollout, trainer=TrainerConfig())
    )
    assert seen == f"rollout.{setting}"
    assert rollout.is_streamed
