"""`strop score` with a judge that compares: who is shown with whom, from a file and from a run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from judge_cases import Handler, completion, serve

from strop.data import DataConfig
from strop.rewards import RewardConfig
from strop.rewards.judges.config import JudgeConfig
from strop.rewards.rescoring import rescore, samples_of_file, some_of

Row = dict[str, Any]


def prefers_longer(handler: Handler, body: dict[str, Any], _number: int) -> None:
    text = body["messages"][0]["content"]
    mark = re.findall(r'"id": "(\w+)"', text)[-1]
    first, second = re.findall(r"<answer-[A-Z]-\w+>\n(.*?)\n</answer-", text, flags=re.DOTALL)
    winner = "A" if len(first) > len(second) else "B"
    handler.send(completion(json.dumps({"id": mark, "reason": "so", "winner": winner})))


def rewards(url: str) -> RewardConfig:
    judge = JudgeConfig(base_url=f"{url}/v1", model="m", compare="pairs", retries=0, timeout_s=10.0)
    return RewardConfig(judge=judge)


def written(folder: Path, rows: list[Row]) -> Path:
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_answers_to_the_same_prompt_are_compared_and_no_others(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"prompt": "a?", "response": "1"},
        {"prompt": "b?", "response": "1234"},
        {"prompt": "a?", "response": "123"},
        {"prompt": "a?", "response": "12"},
        {"prompt": "a?", "response": "12345", "step": 2},  # of another step
        {"prompt": "a?", "response": "123456", "ground_truth": "7"},  # another question in the same words
    ]
    samples = samples_of_file(written(tmp_path, rows), DataConfig())
    with serve(prefers_longer) as service:
        done = rescore(samples, rewards(service.url))
        assert [one.outcome.score for one in done] == [0.0, 0.5, 1.0, 0.5, 0.5, 0.5]
        assert done[0].outcome.parts["judge/comparisons"] == 4
        assert len(service.requests) == 6, "three pairs of the first prompt, in both orders"


def test_a_limit_takes_whole_prompts(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"prompt": f"{number}?", "response": "1" * count} for number in range(4) for count in (1, 2, 3)
    ]
    samples = samples_of_file(written(tmp_path, rows), DataConfig())
    chosen = some_of(samples, 7, rewards("http://127.0.0.1:9"))
    assert [one.prompt.row for one in chosen] == [0, 1, 2, 6, 7, 8]
    assert len(some_of(samples, 1, rewards("http://127.0.0.1:9"))) == 3
    assert [one.prompt.row for one in some_of(samples, 2, RewardConfig())] == [0, 6]


def test_answers_to_nobody_knows_what_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    samples = samples_of_file(written(tmp_path, [{"id": "x", "response": "1"}]), DataConfig())
    with serve(prefers_longer) as service:
        with pytest.raises(
            ValueError, match=r"reward.judge.compare .* and x does not say what it answers: name"
        ):
            rescore(samples, rewards(service.url))
        assert service.requests == []
