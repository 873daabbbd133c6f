"""What a checkpoint keeps of prompts that no step has had."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.rewards import Outcome
from strop.run import CheckpointError
from strop.workers.async_rollout.in_play import InPlay, in_play_text, read_in_play
from strop.workers.async_rollout.journal import Note
from strop.workers.async_rollout.kept import KeptGroup
from strop.workers.async_rollout.score_journal import ScoreNote


def test_what_is_written_is_read(tmp_path: Path) -> None:
    notes = {
        "e0-7/0#0": Note(
            asked="a", token_ids=[1, 2], log_probs=[-0.1, -1 / 3], versions=[4, 5], stop_reason="stop"
        ),
        "e0-7/1#0": Note(asked="b", token_ids=[3], log_probs=[-1e-300], versions=[5]),
    }
    parts: dict[str, float | str | bool] = {"acc": True, "format": 1e-300, "why": "é"}
    scored = Outcome(kind="score", score=1 / 3, parts=parts, seconds=0.5, usage={"judge/requests": 2})
    failed = Outcome(kind="timeout", error="reward.py took longer than 3 s", stand_in=-1.0)
    scores = {"0": ScoreNote(scored="c", outcome=scored), "1": ScoreNote(scored="d", outcome=failed)}
    kept = KeptGroup(requests=notes, scores=scores, steps_left={"0": 7, "1": 0})
    file = tmp_path / "in_play.jsonl"
    file.write_text(in_play_text({"e0-9": 5, "e0-7": 4, "e0-1": 4}, {"e0-7": kept}, ["e0-1", "e0-9"]))
    assert list(read_in_play(file).values()) == [
        InPlay(uid="e0-9", version=5, place=1),
        InPlay(uid="e0-7", version=4, place=None, kept=kept),
        InPlay(uid="e0-1", version=4, place=0),
    ]
    assert read_in_play(tmp_path / "none") == {}


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
