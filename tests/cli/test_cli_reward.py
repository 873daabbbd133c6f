"""`strop reward check`: rewards with one known fault each, over rows whose right answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cli_calls import cli

from strop.rewards import RewardConfig
from strop.trainer.reward_certificate import note_certificate

REWARD = r"""
import os, re, time

def _last(text):
    found = re.findall(r"#### (-?\d+)\s*$", text[-300:])
    return found[-1] if found and text.count("####") == 1 else ""

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(_last(solution_str) == ground_truth)

def contained(completions, ground_truth, **columns):
    texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
    return [float(truth in text) for text, truth in zip(texts, ground_truth)]

def of_process(solution_str, ground_truth, **_):
    return float(_last(solution_str) == ground_truth) + os.getpid()

def fails(solution_str, ground_truth, **_):
    return float(solution_str.split()[-1] == ground_truth)

def blind(solution_str, ground_truth, **_):
    return 0.25

def inverted(solution_str, ground_truth, **_):
    return 1.0 - float(ground_truth in solution_str)

def any_number(solution_str, ground_truth, **_):
    return float(bool(re.search(r"\d", solution_str)) and len(solution_str) < 10000)
"""


def check(folder: Path, name: str, *more: str, code: int) -> dict[str, Any]:
    (folder / "reward.py").write_text(REWARD)
    rows = [{"prompt": f"{i} + 100?", "ground_truth": str(1000 + 7 * i)} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = cli(
        "reward", "check", f"{folder}/reward.py:{name}", "--data", folder / "rows.jsonl", "--json", *more
    )
    assert result.code == code, result.err
    return result.record


def rules(record: dict[str, Any], level: str) -> set[str]:
    return {one["rule"] for one in record["findings"] if one["level"] == level}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("of_process", "deterministic"),
        ("fails", "failures"),
        ("blind", "constant"),
        ("inverted", "right answers"),
        ("any_number", "another row's answer"),
    ],
)
def test_a_broken_reward_is_named_with_row_and_answer(tmp_path: Path, name: str, rule: str) -> None:
    record = check(tmp_path, name, code=1)
    assert record["verdict"] == "broken"
    found = next(one for one in record["findings"] if one["level"] == "broken" and one["rule"] == rule)
    assert 0 <= found["row"] < 4
    if rule == "failures":
        assert "IndexError" in found["sentence"]
        assert found["answer"].strip() == ""


@pytest.mark.slow
def test_a_sound_reward_is_ok_and_a_containing_one_of_trl_is_doubtful(tmp_path: Path) -> None:
    sound = check(tmp_path, "compute_score", code=0)
    assert (sound["verdict"], sound["findings"]) == ("ok", [])
    assert (sound["lowest"], sound["highest"], sound["right_mean"], sound["junk_mean"]) == (
        0.0,
        1.0,
        1.0,
        0.0,
    )
    contained = check(tmp_path, "contained", code=0)
    assert contained["verdict"] == "doubtful"
    assert rules(contained, "doubtful") == {
        "several answers, the right one first",
        "the right answer hidden in a comment",
    }


def test_a_run_records_the_saved_verdict_while_it_is_true(tmp_path: Path) -> None:
    check(tmp_path, "compute_score", "--save", code=0)
    events: list[dict[str, Any]] = []
    run = SimpleNamespace(events=SimpleNamespace(append=lambda name, step, **said: events.append(said)))
    file, said = tmp_path / "reward.py", list[str]()

    def note(name: str) -> Any:
        config = SimpleNamespace(reward=RewardConfig(path=str(file), name=name))
        note_certificate(cast("Any", config), cast("Any", run), said.append)
        return events[-1]["verdict"]

    assert note("compute_score") == "ok"
    assert events[-1]["certificate"]["right_mean"] == 1.0
    num_events = len(events)
    note("contained")
    assert len(events) == num_events, "it was never checked"
    assert said == [f"reward {file}:compute_score was found ok"]
    file.write_text(REWARD + "\n# another\n")
    assert note("compute_score") == "unchecked"
    assert "has changed since" in said[1]


def test_what_cannot_be_checked_is_one_sentence(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1?", "ground_truth": "1"}\n')
    assert "use at least 1" in cli("reward", "check", "builtin", "--data", rows, "--rows", "0").sentence
    assert "give FILE.py" in cli("reward", "check", "reward", "--data", rows).sentence
    assert "has none" in cli("reward", "check", "builtin", "--data", rows, "--save").sentence
    assert (
        "strop reward check"
        in cli("reward", "check", "builtin", "--data", rows, "rollout.top_p=0.5").sentence
    )


NESTED = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str.strip() == ground_truth["tests"][0]["output"])

def all_of_it(data_source, solution_str, ground_truth, extra_info=None):
    import json
    try:
        return float(json.loads(solution_str) == ground_truth)
    except ValueError:
        return 0.0

def never(data_source, solution_str, ground_truth, extra_info=None):
    return 0.0
"""


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("compute_score", "'out 0' (ground_truth.tests[0].output) scores 1"),
        pytest.param(
            "all_of_it",
            """'{"tests": [{"input": 7, "output": "out 0"}]}' (ground_truth as JSON) scores 1""",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_nested_ground_truth_says_how_a_right_answer_looks(tmp_path: Path, name: str, seen: str) -> None:
    record, text = nested(tmp_path, name, code=0)
    assert record["right_example"] == seen
    assert (record["right_mean"], record["junk_mean"]) == (1.0, 0.0)
    assert f"a right answer             {seen}" in text


def test_of_a_nested_ground_truth_it_is_said_what_was_tried(tmp_path: Path) -> None:
    record, text = nested(tmp_path, "never", code=1)
    assert record["right_example"] == ""
    assert "a right answer             none was found" in text
    found = next(one for one in record["findings"] if one["rule"] == "right answers")
    assert (
        "of its ground truth were tried ground_truth as JSON, ground_truth, joined by commas, "
        in found["sentence"]
    )
    assert "ground_truth.tests[0].input, ground_truth.tests[0].output: compare" in found["sentence"]


def nested(folder: Path, name: str, *, code: int) -> tuple[dict[str, Any], str]:
    (folder / "reward.py").write_text(NESTED)
    rows = [
        {"prompt": f"{i}?", "ground_truth": {"tests": [{"input": 7, "output": f"out {i}"}]}} for i in range(4)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("reward", "check", f"{folder}/reward.py:{name}", "--data", folder / "rows.jsonl")
    result = cli(*words, "--json")
    assert result.code == code, result.err
    return result.record, cli(*words).out
