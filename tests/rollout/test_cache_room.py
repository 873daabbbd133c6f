"""Whether an engine on an accelerator keeps its memory while others work."""

from __future__ import annotations

import pytest
import torch

from strop.rollout.native.batch import DecodeBatch
from strop.rollout.native.engine import NativeEngine


@pytest.mark.parametrize(
    ("held", "free", "stays"),
    [(9, 51, True), (11, 80, False), (9, 49, False)],
    ids=["small", "large", "crowded"],
)
def test_an_engine_stays_awake_where_it_is_small_and_memory_is_plenty(
    monkeypatch: pytest.MonkeyPatch, held: int, free: int, stays: bool
) -> None:
    engine = object.__new__(NativeEngine)
    engine._batch = object.__new__(DecodeBatch)
    monkeypatch.setattr(DecodeBatch, "held_bytes", property(lambda self: held))
    monkeypatch.setattr(DecodeBatch, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr("strop.rollout.native.engine.device_bytes", lambda device: 100)
    monkeypatch.setattr("strop.rollout.native.engine.free_bytes", lambda device: free)
    assert engine.leaves_room == stays
    monkeypatch.setattr(DecodeBatch, "device", property(lambda self: torch.device("cpu")))
    assert not engine.leaves_room
