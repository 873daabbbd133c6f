"""`--data NAME`: well-known sets in their original columns, with their prompts and their scorer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_calls import Project, cli

from strop.evaluation.sets import names
from strop.rewards.scorers.reasoning_gym_rows import rows_of_set

GSM8K = [
    {"question": "Two and two?", "answer": "2+2=4\n#### 4"},
    {"question": "One?", "answer": "#### 1,000"},
]
AIME = [{"problem": "How many?", "answer": 70, "id": "0"}]

ANSWERS_RIGHT = '''
"""An agent that knows what the sets ask."""
from strop.agents.registry import agents

SAYS = {
    "Two and two?": "It is 4.\\n#### 4",
    "One?": "#### 7",
    "How many?": "So.\\nAnswer: 70",
    "Half?": "\\\\boxed{1/2}",
}


async def knows(prompt, trajectory, generate, context):
    asked = prompt.messages[0]["content"].split("\\n")[0]
    ids = tuple(context.tokenizer(SAYS[asked], add_special_tokens=False)["input_ids"])
    return trajectory.with_sampled(ids, (-1.0,) * len(ids), (0,) * len(ids)).finish("stop")


if "knows" not in agents:
    agents.register("knows")(knows)
'''


def raw(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def words(project: Project, tmp_path: Path) -> list[str]:
    """A model that answers, with settings of a run that has rows and a reward of its own."""
    (tmp_path / "agent.py").write_text(ANSWERS_RIGHT)
    return [
        "eval", str(project.model), "--config", str(project.config), f"agent.files=[{tmp_path / 'agent.py'}]",
        "agent.default_agent=knows", "data.max_prompt_tokens=400", "data.max_response_tokens=30",
    ]  # fmt: skip


def test_a_set_has_its_own_prompts_and_scorer(words: list[str], tmp_path: Path) -> None:
    copy = raw(tmp_path / "gsm8k.jsonl", GSM8K)
    result = cli(*words, "--data", f"gsm8k={copy}", "--out", tmp_path / "out.jsonl", "--json")
    assert result.code == 0, result.err
    assert result.record["pass_rate"] == 0.5, "scored by GSM8K's rule, whatever reward.path the settings have"
    assert set(result.record["sources"]) == {"openai/gsm8k"}
    assert f"gsm8k: 2 prompts of {copy}, scored as openai/gsm8k" in result.err
    first = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    assert "on a line of its own after ####" in first["prompt"][0]["content"]
    assert first["reward_parts"]["pred"] == "4"


def test_several_sets_are_sources_of_one_evaluation(words: list[str], tmp_path: Path) -> None:
    aime = raw(tmp_path / "a.jsonl", AIME)
    half = raw(tmp_path / "m.jsonl", [{"problem": "Half?", "answer": r"\frac{1}{2}"}])
    record = cli(*words, "--data", f"aime25={aime}", "--data", f"math500={half}", "--json").record
    assert record["sources"]["aime25"]["pass_rate"] == 1.0
    assert record["sources"]["HuggingFaceH4/MATH-500"]["pass_rate"] == 1.0


def test_what_is_no_set_or_no_copy_of_one_is_said(words: list[str], tmp_path: Path) -> None:
    copy = raw(tmp_path / "gsm8k.jsonl", AIME)
    assert "Is this the raw data set?" in cli(*words, "--data", f"gsm8k={copy}").sentence
    assert "no set; the sets are gsm8k" in cli(*words, "--data", "gsm9k").sentence
    assert "files of your own with another command" in cli(
        *words, "--data", f"gsm8k={copy}", "--data", copy
    ).sentence  # fmt: skip
    wrong = raw(tmp_path / "a.jsonl", [{"problem": "How many?", "answer": "1/2"}])
    assert "whole numbers from 0 to 999" in cli(*words, "--data", f"aime24={wrong}").sentence
    assert {"gsm8k", "math500", "aime24", "aime25", "reasoning_gym/TASK"} == set(names())


def test_without_a_hub_the_sentence_says_how_to_use_a_copy(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from strop.data import hub_rows as rows

    def refuse(entry: str) -> None:
        raise ValueError(f"data entry {entry!r} cannot be read from the hub (no network)")

    monkeypatch.setattr(rows, "open_hub", refuse)
    sentence = cli(*words, "--data", "gsm8k").sentence
    assert "'hub:openai/gsm8k:main@test' cannot be read from the hub" in sentence
    assert "--data gsm8k=FILE reads your copy" in sentence


@pytest.mark.slow
def test_tasks_of_reasoning_gym_are_the_same_every_time() -> None:
    pytest.importorskip("reasoning_gym")
    make = rows_of_set
    rows = make("reasoning_gym/spell_backward", "5")
    assert rows == make("reasoning_gym/spell_backward", "5")
    assert len(make("reasoning_gym/spell_backward", "")) == 200
    from strop.rewards.scorers import default_compute_score

    row = rows[0]
    truth = row["reward_model"]["ground_truth"]
    found = default_compute_score(row["data_source"], f"<answer>{truth}</answer>", truth, row["extra_info"])
    assert found["acc"] is True
    with pytest.raises(ValueError, match="reasoning-gym has no task 'x'"):
        make("reasoning_gym/x", "")
    with pytest.raises(ValueError, match="give their number"):
        make("reasoning_gym/spell_backward", "file.jsonl")


def test_a_missing_package_is_named(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    assert (
        "pip install 'strop[reasoning-gym]'" in cli(*words, "--data", "reasoning_gym/spell_backward").sentence
    )
