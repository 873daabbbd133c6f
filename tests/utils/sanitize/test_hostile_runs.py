"""Whole runs in which everybody returns hostile values: they end, they resume, and every command can read them."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from utils.sanitize.hostile import ESCAPES, LONE

from strop.cli.main import main
from strop.data.tiny_model import make_tiny_model
from strop.run import RunFolder
from strop.run.samples import SampleStore

REWARD = '''
import itertools
import sys
from pathlib import Path

sys.path.insert(0, TESTS)
from utils.sanitize.hostile import ESCAPES, LONE, MAKERS, Mute

numbers = itertools.count(8)  # the first calls are probes
made = {name: make() for name, make in MAKERS.items() if name not in ("doubling", "deep", "cycle", "long text")}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A different hostile answer for every call."""
    number = next(numbers)
    odd = ord((solution_str or " ")[0]) % 8 / 10
    match number % 12:
        case 0:
            raise ValueError(LONE + ESCAPES)
        case 1:
            raise Mute
        case 2:
            return 1e300
        case 3:
            return {"score": 10**400}
        case 4:
            return {"score": odd, "acc": 10**400, "note": LONE + ESCAPES, "size": 10**5000}
        case 5:
            return {"score": odd, "acc": 1e300, "\\ud800": -1e300, "nan": float("nan"), "inf": float("inf")}
        case 6:
            return {"score": odd, **{f"{ESCAPES} {name}": value for name, value in made.items()}}
    return {"score": odd, "acc": odd > 0.3}
'''
TOOLS = '''
import json

from strop.agents import FunctionCall, ToolParser, function_tool

numbers = iter(range(10**9))


@function_tool
def hostile(text: str, size: int = 0) -> tuple:
    """Answers with anything.

    Args:
        text: What to repeat.
        size: A number.
    """
    match next(numbers) % 4:
        case 0:
            raise RuntimeError(text + "\\x1b[2J\\ud83d")
        case 1:
            return {"said": text, "size": 10**5000, "\\ud800": float("inf")}
        case 2:
            return text + "\\ud83d\\x00\\x1b[31m", 0.5, {"\\ud800": 10**400, "more": {1, 2}}
    return "\\udfff" * 3, 1e300


@ToolParser.register("hostile_letters")
class HostileLetters(ToolParser):
    async def extract_tool_calls(self, ids, tools=None):
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        arguments = '{"text": ' + json.dumps(text) + ', "size": ' + "9" * 5000 + ', "x": "\\\\ud83d"}'
        whole = '{"text": "\\\\ud83d\\\\u001b[31m"}'
        call = [FunctionCall("hostile", arguments), FunctionCall("hostile", whole)][len(text) % 4 // 2]
        return text, [call] if len(text) % 2 else []
'''
WORLD = """
class World:
    def __init__(self):
        self.number = 0

    def reset(self, seed, row):
        return "begin \\ud83d\\x1b[2J"

    def step(self, action):
        self.number += 1
        facts = {"note": "\\ud83d\\x1b[31m", "acc": 10**400, "\\ud800": 1e300, "size": 10**5000, "list": [1]}
        return "next \\udc00\\x9b", 0.5 * (len(action) % 2), self.number == 2, facts
"""


def cli(*words: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return code, out.getvalue(), err.getvalue()


def check_stored(text: str) -> None:
    """It has no control characters, and UTF-8 can encode it."""
    assert not {"\x1b", "\x9b", "\x00", "\x07"} & set(text)
    text.encode()


def check_harmless(text: str) -> None:
    """A terminal acts on none of it."""
    assert "\u202e" not in text
    check_stored(text)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data, reward, tools and environment; a file's parser can be registered once per process."""
    folder = tmp_path_factory.mktemp("hostile")
    make_tiny_model(
        folder / "model", seed=0, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        intermediate_size=48, max_position_embeddings=256,
    )  # fmt: skip
    for name, source in (("reward", REWARD), ("tools", TOOLS), ("world", WORLD)):
        tests = repr(str(Path(__file__).parent.parent))
        (folder / f"{name}.py").write_text(source.replace("TESTS", tests))
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{number} {LONE}{ESCAPES}"}],
            "data_source": f"{ESCAPES}{LONE}/../{number % 2}",
            "reward_model": {"ground_truth": [LONE, 10**30, {"deep": ESCAPES}][number % 3]},
            "extra_info": {"note": LONE, "size": 10**30, "index": number},
            "agent_name": ["tool_agent", "env_agent", "single_turn_agent"][number % 3],
            LONE: LONE,
        }
        for number in range(6)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(files: Path, *overrides: str) -> list[str]:
    return [
        f"model.path='{files}/model'", f"data.train_files=['{files}/rows.jsonl']",
        f"data.val_files=['{files}/rows.jsonl']", "data.prompts_per_step=3", "data.max_prompt_tokens=100",
        "data.max_response_tokens=64", "rollout.samples_per_prompt=4", f"rollout.stop_token_ids={list(range(20, 50))}",
        f"reward.path='{files}/reward.py'", "reward.num_workers=1", "reward.max_failed_share=0.9",
        f"agent.function_tools='{files}/tools.py'", "agent.tool_format=hostile_letters",
        f"agent.environment.name='{files}/world.py:World'", "agent.max_assistant_turns=3", "trainer.max_steps=2",
        "trainer.num_epochs=9", "trainer.trackers=[console,jsonl,tensorboard]", "trainer.preflight=false",
        "run.save_every=1", "eval.every=1", "resources.num_threads=1", *overrides,
    ]  # fmt: skip


def samples_of(run: Path) -> list[Mapping[str, Any]]:
    with RunFolder.open(run, read_only=True) as opened:
        return [row for step in opened.samples.steps() for row in opened.samples.read(step)]


def check_readable(run: Path) -> None:
    """Every command reads the run, and what each prints is harmless."""
    for words in (
        ("samples", run, "--limit", 30), ("samples", run, "--why-dropped"), ("samples", run, "--limit", 9, "--json"),
        ("doctor", run), ("diff", run, run), ("score", "same", run, "--show", 30),
    ):  # fmt: skip
        code, out, err = cli(*words)
        assert code == 0, (words, err)
        check_harmless(out + err)


@pytest.mark.slow
def test_a_run_full_of_hostile_values_ends_and_can_be_read(files: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = cli("train", "--out", run, *settings(files))
    assert code == 0, err
    check_harmless(out + err)
    rows = samples_of(run)
    assert {row["agent_name"] for row in rows} == {"tool_agent", "env_agent", "single_turn_agent"}
    assert {row["outcome"] for row in rows} == {"score", "error"}
    for row in rows:
        check_stored(json.dumps(row, ensure_ascii=False))
    said = " ".join(row["error"] or "" for row in rows)
    assert "returned 1e+300; return a finite number from -1e+15 to 1e+15" in said
    assert "half a pair \ufffd\\x1b[31m" in said
    parts = [row["reward_parts"] for row in rows if row["reward_parts"]]
    assert any(part.get("acc") == "inf" and part.get("size") == "inf" for part in parts)
    for line in (run / "metrics.jsonl").read_text().split("\n")[:-1]:
        numbers = json.loads(line)
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in numbers.values()), (
            numbers
        )
        check_stored(line)
    check_stored((run / "events.jsonl").read_text())
    check_readable(run)
    other = tmp_path / "other"
    assert cli("train", "--out", other, *settings(files, "trainer.seed=1", "trainer.max_steps=1"))[0] == 0
    code, out, err = cli("diff", run, other)
    assert code == 1
    check_harmless(out + err)
    code, out, err = cli("eval", run)
    assert code == 0, err
    check_harmless(out + err)


@contextlib.contextmanager
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writing samples of the second step ends the run, as it did on half an emoji."""
    write = SampleStore.write

    def refuse(self: SampleStore, step: int, rows: Sequence[Mapping[str, Any]], **where: Any) -> Path:
        if step == 2:
            json.dumps([LONE], ensure_ascii=False).encode()
        return write(self, step, rows, **where)

    with monkeypatch.context() as patch:
        patch.setattr(SampleStore, "write", refuse)
        yield


@pytest.mark.slow
def test_a_run_that_a_lone_surrogate_once_ended_resumes(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with as_it_was(monkeypatch):
        code, _, err = cli("train", "--out", run, *settings(files))
    assert code == 2
    assert "surrogates not allowed" in err
    code, _, err = cli("train", "--resume", run)
    assert code == 0, err
    with RunFolder.open(run, read_only=True) as opened:
        opened.ledger.check()
        assert opened.samples.steps() == [1, 2]
        assert [one.step for one in opened.fingerprints.read()] == [1, 2]
    check_readable(run)


@pytest.mark.slow
def test_a_run_full_of_hostile_values_on_ray_ends_and_can_be_read(files: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code, out, err = cli(
        "train", "--out", run, *settings(files, "resources.runtime=ray", "resources.ranks=2")
    )
    assert code == 0, err
    check_harmless(out + err)
    check_readable(run)
