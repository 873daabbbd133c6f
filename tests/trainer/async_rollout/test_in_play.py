"""What a checkpoint keeps of prompts that no step has had."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.rewards import Outcome
from strop.run import CheckpointError
from strop.workers.async_rollout.generation_cache import RequestState
from strop.workers.async_rollout.in_play import GroupState, in_play_text, read_in_play
from strop.workers.async_rollout.saved_group import SavedGroup
from strop.workers.async_rollout.score_cache import SavedScore


def test_what_is_written_is_read(tmp_path: Path) -> None:
    notes = {
        "e0-7/0#0": RequestState(
            asked="a", token_ids=[1, 2], log_probs=[-0.1, -1 / 3], versions=[4, 5], stop_reason="stop"
        ),
        "e0-7/1#0": RequestState(asked="b", token_ids=[3], log_probs=[-1e-300], versions=[5]),
    }
    parts: dict[str, float | str | bool] = {"acc": True, "format": 1e-300, "why": "é"}
    scored = Outcome(kind="score", score=1 / 3, parts=parts, seconds=0.5, usage={"judge/requests": 2})
    failed = Outcome(kind="timeout", error="reward.py took longer than 3 s", fallback_score=-1.0)
    scores = {"0": SavedScore(scored="c", outcome=scored), "1": SavedScore(scored="d", outcome=failed)}
    kept = SavedGroup(requests=notes, scores=scores)
    file = tmp_path / "in_play.jsonl"
    file.write_text(in_play_text({"e0-9": 5, "e0-7": 4, "e0-1": 4}, {"e0-7": kept}, ["e0-1", "e0-9"]))
    assert list(read_in_play(file).values()) == [
        GroupState(uid="e0-9", version=5, place=1),
        GroupState(uid="e0-7", version=4, place=None, kept=kept),
        GroupState(uid="e0-1", version=4, place=0),
    ]
    assert read_in_play(tmp_path / "none") == {}


def test_a_line_with_times_of_a_virtual_clock_is_read_without_them(tmp_path: Path) -> None:
    line = '{"uid":"e0-1","version":2,"place":0,"is_looked_at":true,"requests":{},"scores":{},"steps_left":{"0":7}}'
    (tmp_path / "in_play.jsonl").write_text(f"{line}\n")
    [group] = read_in_play(tmp_path / "in_play.jsonl").values()
    assert group == GroupState(uid="e0-1", version=2, place=0, is_looked_at=True)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"uid":"a","version":1,"place":null}',
        '{"uid":"a","version":1,"place":null,"requests":{"b":{}},"scores":{},"steps_left":{}}',
        '{"uid":"a","version":1,"place":null,"requests":{},"steps_left":{},"scores":{"0":{"scored":"","outcome":{}}}}',
        '{"uid":"a","version":1,"place":null,"requests":{"b":{"asked":"","token_ids":[1],"log_probs":[],"versions":[]}}}',
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "in_play.jsonl").write_text(f"{in_play_text({'e0-1': 1}, {}, [])}{line}\n")
    with pytest.raises(
        CheckpointError, match="in_play.jsonl is damaged: line 2 does not say what was in play"
    ):
        read_in_play(tmp_path / "in_play.jsonl")
