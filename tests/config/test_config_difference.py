"""Overrides between two configurations: given on top of the first, they lead to the second."""

from __future__ import annotations

from config_settings import (
    AlgorithmSettings,
    DataSettings,
    OptimSettings,
    RewardSettings,
    RolloutSettings,
    Settings,
)

from strop.config import load_config
from strop.config.difference import overrides_between


def test_overrides_lead_from_one_configuration_to_another() -> None:
    before = Settings(
        rollout=RolloutSettings(stop=("a",)), optim=OptimSettings(lr=0.5, max_grad_norm=1.0), steps=3
    )
    after = Settings(
        data=DataSettings(train_files=("x, y.jsonl", "null"), shuffle=False),
        rollout=RolloutSettings(stop=(), seed="1"),
        optim=OptimSettings(lr=2e-5, max_grad_norm=None),
        algorithm=AlgorithmSettings(mode="sum"),
        reward=RewardSettings(path="null", kwargs={"strict": False, "names": ["a b", 2]}, weights={"x": 0.5}),
        steps=3,
    )
    given = overrides_between(Settings(), before)
    assert load_config(Settings, overrides=given) == before
    changes = overrides_between(before, after)
    assert load_config(Settings, overrides=[*given, *changes]) == after
    assert "algorithm.mode=sum" in changes
    assert not any(change.startswith("steps=") for change in changes)
    assert overrides_between(after, after) == ()
