"""`strop data check` and `strop data prepare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import cli

from strop.data import read_rows
from strop.data.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, seed=0, hidden_size=16, num_layers=1, head_dim=8, intermediate_size=16)
    return folder


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(text: str, **changes: Any) -> dict[str, Any]:
    return {"prompt": text, "answer": "x", "data_source": "strop/exact", **changes}


MAPPED = "data.ground_truth_key=answer"


def test_good_files_are_described(tmp_path: Path, model: Path) -> None:
    train = write(tmp_path / "train.jsonl", row("2+2?"), row("13+4?"), row("2+2?", data_source="mine"))
    val = write(tmp_path / "val.jsonl", row("13+4?"), row("5?"))
    result = cli("data", "check", train, "--val", val, "--model", model, MAPPED, "data.max_prompt_tokens=7")
    assert (result.code, result.err) == (0, "")
    # The tiny template adds a token for the role, one for the end of the turn and one for the answer's role.
    for line in (
        "train: 3 rows",
        "    data_source  3 of 3",
        "    strop/exact  2 rows, has a scorer",
        "    mine         1 row, has no built-in scorer: set reward.path",
        "  tokens after the chat template: 7 to 8, median 7; 1 over data.max_prompt_tokens=7",
        f"    7 to 7  {'#' * 40} 2  the limit lies here",
        f"    8 to 8  {'#' * 20:<40} 1  over the limit",
        "  rows that repeat the prompt of an earlier one: 1; row (the same as): 2 (0)",
        "  prompt of row 0 (first; 7 tokens):",
        "    | <|user|>2+2?<|im_end|><|assistant|>",
        "val: 2 rows",
        "val rows whose prompt is also a train row: 1; row (the same as): 0 (1)",
    ):
        assert line in result.out.splitlines(), result.out


def test_what_a_run_would_refuse_ends_with_code_2_and_every_reason(tmp_path: Path, model: Path) -> None:
    train = write(tmp_path / "train.jsonl", row("a"), row("b", answer=None), row("c", prompt=3))
    result = cli("data", "check", train, "--model", model, MAPPED)
    assert result.code == 2
    assert "answer       2 of 3, the first without is row 1" in result.out
    assert "row 2: column 'prompt' holds int 3" in result.out
    first, second = result.err.splitlines()
    assert first.startswith(
        "train: 1 of 3 rows have no value for 'answer', the first is row 1 (the right answer;"
    )
    assert second.startswith("train: row 2: column 'prompt' holds int 3")
    record = cli("data", "check", train, "--model", model, MAPPED, "--json").record
    assert record["train"]["columns"]["answer"] == {"missing": 1, "first_missing": 1}
    assert record["train"]["malformed"] == 1
    assert len(record["problems"]) == 2


def test_the_json_of_a_check(tmp_path: Path, model: Path) -> None:
    train = write(tmp_path / "train.jsonl", row("2+2?"), row("1?", data_source="mine"))
    result = cli("data", "check", train, "--val", train, "--model", model, MAPPED, "--json")
    assert result.code == 0
    assert len(result.out.splitlines()) == 1
    record = result.record
    assert (record["train"]["rows"], record["overlap"], record["problems"]) == (2, {"0": 0, "1": 1}, [])
    assert record["train"]["sources"] == {
        "mine": {"rows": 1, "has_scorer": False},
        "strop/exact": {"rows": 1, "has_scorer": True},
    }
    assert record["train"]["lengths"][0] == {"low": 5, "high": 5, "count": 1}
    assert record["val"]["prompts"][0]["text"] == "<|user|>2+2?<|im_end|><|assistant|>"


def test_agents_that_do_not_exist_are_named(tmp_path: Path, model: Path) -> None:
    rows = [
        row("a", agent_name="single_turn_agent"),
        row("b", agent_name="nobody"),
        row("c", agent_name="nobody"),
    ]
    train = write(tmp_path / "train.jsonl", *rows, row("d", agent_name=None))
    result = cli("data", "check", train, "--model", model, MAPPED)
    assert (
        "train: 2 rows, the first is row 1, with agent_name 'nobody', but no agent has that name"
        in result.sentence
    )
    assert "single_turn_agent" in result.sentence


def test_files_and_model_of_a_configuration(tmp_path: Path, model: Path) -> None:
    train = write(tmp_path / "train.jsonl", row("a", data_source="mine"))
    reward = tmp_path / "reward.py"
    reward.write_text("def compute_score(**row): return 1.0\n")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{path: {model}}}\nreward: {{path: {reward}}}\n"
        f"data: {{train_files: [{train}], val_files: [{train}], ground_truth_key: answer}}\n"
    )
    result = cli("data", "check", "--config", config)
    assert result.code == 0
    assert "mine  1 row, has a scorer" in result.out
    assert "val: 1 row" in result.out.splitlines()


def test_text_of_the_data_cannot_act_on_the_terminal(tmp_path: Path, model: Path) -> None:
    train = write(tmp_path / "train.jsonl", row("hi", data_source="\x1b[2J\n\u202e"))
    result = cli("data", "check", train, "--model", model, MAPPED)
    assert result.code == 0
    assert not set("\x1b\u202e") & set(result.out)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["check"], "name the files to check, or a configuration with data.train_files"),
        (["check", "x.jsonl"], "name it with --model MODEL"),
        (["check", "x.jsonl", "--with-tool"], "--with-tool belongs to prepare"),
        (["check", "x.jsonl", "data.promt_key=q"], "unknown key data.promt_key"),
        (["prepare", "gsm8k"], "prepare takes NAME SRC --out OUT, got gsm8k"),
        (["prepare", "gsm9k", "a", "b.parquet"], "there is no recipe for 'gsm9k'; known: gsm8k, math"),
        (["prepare", "gsm8k", "nowhere.jsonl", "b.parquet"], "data file nowhere.jsonl does not exist"),
        (["prepare", "gsm8k", "a", "b", "--model", "m"], "--model belongs to check"),
        (["check", "x.jsonl", "--out", "y"], "--out belongs to prepare and index"),
        (["mend", "x"], "invalid choice: 'mend'"),
        (
            ["index", "corpus.jsonl", "data.cache_dir=x", "--out", "y"],
            "index takes one corpus and --out FILE",
        ),
    ],
)
def test_command_lines_that_cannot_be_carried_out(words: list[str], expected: str) -> None:
    assert expected in cli("data", *words).sentence


def test_the_help_lists_every_action_once_on_a_line_of_its_own() -> None:
    lines = cli("data", "--help").out.split("examples:")[0].splitlines()
    actions = lines[lines.index("actions:") + 1 :][:4]
    assert sorted(line.split()[0] for line in actions) == ["cache", "check", "index", "prepare"]
    assert all(len(line.split()) > 4 for line in actions)


def test_a_prepared_file_passes_the_check(tmp_path: Path, model: Path) -> None:
    raw = write(
        tmp_path / "raw.jsonl",
        {"question": "2+2?", "answer": "4\n#### 4"},
        {"question": "1?", "answer": "#### 1"},
    )
    out = tmp_path / "gsm8k" / "train.parquet"
    result = cli("data", "prepare", "gsm8k", raw, "--out", out)
    assert (result.code, result.out) == (0, f"2 rows written to {out}\n")
    assert read_rows([out])[1]["extra_info"]["split"] == "train"
    checked = cli("data", "check", out, "--model", model)
    assert checked.code == 0
    assert "openai/gsm8k  2 rows, has a scorer" in checked.out
    with_tool = cli("data", "prepare", "gsm8k", raw, out, "--with-tool", "--json")
    assert with_tool.record == {"out": str(out), "rows": 2, "repeated": 0}
    assert read_rows([out])[0]["agent_name"] == "tool_agent"


def test_rows_of_a_class_of_ones_own_are_checked(tmp_path: Path, model: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):\n"
        "        self.text = config.prompt_key\n"
        "    def __len__(self):\n        return 3\n"
        "    def __getitem__(self, i):\n"
        "        return {'raw_prompt': self.text * (i + 1), 'answer': 'x', 'data_source': 'strop/exact'}\n"
    )
    mine = f"data.dataset_class={{path: '{tmp_path / 'mine.py'}', name: Mine}}"
    streamed = ["data.streaming=true", "trainer.max_steps=1"]
    result = cli("data", "check", "any.bin", "--model", model, MAPPED, mine, *streamed)
    assert (result.code, result.err) == (0, "")
    assert "train: 3 rows" in result.out
    assert "    | <|user|>promptprompt<|im_end|><|assistant|>" in result.out
    broken = cli("data", "check", "any.bin", "--model", model, mine.replace("Mine}", "Yours}"))
    assert broken.code == 2
    assert "mine.py has no class of that name; it has Mine" in broken.err


def test_the_cache_is_shown_and_cleared(tmp_path: Path) -> None:
    kept = tmp_path / "cache" / "prompts" / "a.npz"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"x" * 2**20)
    where = f"data.cache_dir='{tmp_path / 'cache'}'"
    shown = cli("data", "cache", where)
    assert shown.code == 0
    first, last = shown.out.splitlines()
    assert first.split()[:2] == ["1.0", "MiB"]
    assert first.endswith("prompts/a.npz")
    assert last.startswith("1 entry of 1.0 MiB in ")
    record = cli("data", "cache", "--json", where).record
    assert (record["bytes"], record["entries"][0]["path"]) == (2**20, str(kept))
    assert cli("data", "cache", "--clear", where).out.startswith("1 entry of 1.0 MiB removed from ")
    assert not kept.exists()
    assert cli("data", "cache", where).out.startswith("0 entries of 0.0 MiB in ")
    assert "--clear belongs to cache" in cli("data", "check", "--clear", "a.jsonl").err
    assert "cache takes settings" in cli("data", "cache", "a.jsonl").err
