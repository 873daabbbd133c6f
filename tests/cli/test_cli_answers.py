"""`strop eval` and `strop generate`."""

from __future__ import annotations

import builtins
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from cli_calls import Project, cli

from strop.run import RunFolder
from strop.utils.terminal import plain

BY_TRUTH = '''\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Pass or fail whatever the model says, so that the pass rate is known."""
    if ground_truth == "broken":
        raise RuntimeError("no score")
    return {"score": 0.25, "acc": ground_truth == "pass"}
'''


def prompts(folder: Path) -> Path:
    """Eight rows of two sources: 3 of 5 and 1 of 3 pass; one of the latter cannot be scored."""
    truths = [("a", "pass")] * 3 + [("a", "fail")] * 2 + [("b", "pass"), ("b", "fail"), ("b", "broken")]
    rows = [{"prompt": f"q{i}", "data_source": s, "answer": truth} for i, (s, truth) in enumerate(truths)]
    path = folder / "known.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_eval_gives_the_pass_rate_and_its_interval_per_source(project: Project, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(BY_TRUTH)
    words = [
        "eval", project.model, "--config", project.config, f"data.val_files=[{prompts(tmp_path)}]",
        "data.ground_truth_key=answer", f"reward.path={tmp_path / 'reward.py'}",
    ]  # fmt: skip
    record = cli(*words, "--json").record
    assert (record["pass_rate"], record["num_answers"], record["num_passed"]) == (0.5, 8, 4)
    # Wilson, z = 1.95996, p = 1/2, n = 8: 1/2 -+ z sqrt(1/32 + z^2/256) / (1 + z^2/8) = 1/2 -+ 0.284784
    assert record["low"] == pytest.approx(0.215216, abs=1e-5)
    assert record["high"] == pytest.approx(0.784784, abs=1e-5)
    assert (record["sources"]["a"]["pass_rate"], record["sources"]["b"]["num_unscored"]) == (0.6, 1)
    written = cli(*words, "--out", tmp_path / "answers.jsonl")
    assert f"8 answers written to {tmp_path / 'answers.jsonl'}" in written.err
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [one["passed"] for one in answers] == [True] * 3 + [False] * 2 + [True, False, False]
    assert answers[0]["prompt"] == [{"role": "user", "content": "q0"}]
    assert (answers[6]["score"], answers[7]["score"]) == (0.25, None)
    assert "no score" in answers[7]["error"]
    again = cli("score", tmp_path / "reward.py", tmp_path / "answers.jsonl", "--json").record
    assert again["num_samples"] == 8
    lines = written.out.splitlines()
    assert lines[0].startswith("a    pass rate 60.0 % (95 % interval 23.1 to 88.2) on 5 answers")
    assert "1 could not be scored" in lines[1]
    assert lines[2].startswith("all  pass rate 50.0 % (95 % interval 21.5 to 78.5) on 8 answers")
    # The score is the prompt's, so two answers to each say no more than one.
    twice = cli(*words, "eval.samples_per_prompt=2", "eval.temperature=1").out.splitlines()
    assert "(95 % interval 21.5 to 78.5) on 16 answers to 8 prompts" in twice[2]


WRITES_A_PROGRAM = '''
"""An agent whose model calls python, and then repeats what it reads."""
from strop.agents.registry import agents
from pathlib import Path

from strop.rollout.types import TokenOutput
from strop.agents.tools.agent import tool_agent
from strop.agents.tools.formats import ToolParser, formats
from strop.agents.tools.formats.parser import FormatParser

CALL = """<tool_call>
{"name": "python", "arguments": {"code": "print(3 * 4)"}}
</tool_call>"""


@agents.register("writes_a_program")
async def writes_a_program(prompt, trajectory, generate, context):
    async def say(token_ids, /, **options):
        shown = context.tokenizer.decode(list(token_ids))
        text = shown.rpartition("<|tool|>")[2].partition("<|im_end|>")[0] if "<|tool|>" in shown else CALL
        ids = tuple(context.tokenizer(text + "<|im_end|>", add_special_tokens=False)["input_ids"])
        return TokenOutput(
            token_ids=ids, log_probs=(-1.0,) * len(ids), versions=(0,) * len(ids), stop_reason="stop"
        )

    return await tool_agent(prompt, trajectory, say, context)


@ToolParser.register("counted")
class Counted(FormatParser):
    def __init__(self, tokenizer):
        super().__init__(formats["hermes"], tokenizer)
        with Path(__file__).with_name("made.txt").open("a") as file:
            file.write("once ")
'''


def test_eval_runs_the_programs_of_its_agents_in_the_sandbox(project: Project, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(WRITES_A_PROGRAM)
    entry = {"class_name": "strop.agents.tools.python_sandbox.PythonSandboxTool"}
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [entry]}))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str.endswith('12'))\n"
    )
    words = [
        "eval", project.model, "--config", project.config, f"agent.files=[{tmp_path / 'agent.py'}]",
        f"agent.tools={tmp_path / 'tools.yaml'}", "agent.tool_format=counted", "data.max_val_prompts=2",
        "agent.default_agent=writes_a_program", "data.max_response_tokens=900", "data.max_prompt_tokens=900",
        "model.override_config={max_position_embeddings: 2048}", f"reward.path={tmp_path / 'reward.py'}",
    ]  # fmt: skip
    result = cli(*words, "--json")
    assert result.code == 0, result.err
    assert (result.record["pass_rate"], result.record["num_answers"]) == (1.0, 2)
    assert (tmp_path / "made.txt").read_text() == "once ", (
        "tools show the prompts and are played: the same ones"
    )
    unisolated = cli(
        *words, "reward.sandbox.backend=sandbox_fusion", "reward.sandbox.url='http://127.0.0.1:9'"
    )
    assert "the SandboxFusion server at http://127.0.0.1:9 did not run a program" in unisolated.sentence


@pytest.mark.parametrize("inside", ["", "checkpoints/global_step_2", "model"])
def test_eval_of_a_run_gives_the_answers_of_its_last_validation(trained: Path, inside: str) -> None:
    result = cli("eval", trained / inside, "--json")
    assert result.code == 0, result.err
    with RunFolder.open(trained, read_only=True) as run:
        event = run.events.read("validation")[-1]
    assert event["metrics"].keys() == result.record["metrics"].keys()
    key = "val-aux/strop/exact/reward/mean@1"
    assert result.record["metrics"][key] == pytest.approx(event["metrics"][key])
    assert 0 < event["metrics"][key] < 1


def test_eval_with_a_broken_scorer_ends_before_the_model_answers(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text("def compute_score(**kwargs): return None")
    assert "failed on all 4 probes" in cli("eval", trained, f"reward.path={path}").sentence


def test_eval_takes_settings_on_top_of_the_run(trained: Path) -> None:
    record = cli(
        "eval",
        trained,
        "--json",
        "eval.temperature=1.0",
        "eval.samples_per_prompt=3",
        "data.max_val_prompts=2",
    ).record
    assert record["num_answers"] == 6


def test_eval_passes_over_a_damaged_checkpoint_of_a_run_but_not_a_named_one(
    trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run, symlinks=True)
    (run / "checkpoints" / "global_step_2" / "model" / "config.json").unlink()
    result = cli("eval", run)
    assert result.code == 0
    assert "ckpt 2 is damaged: model/config.json is missing - using 1" in result.err
    assert "is missing" in cli("eval", run / "checkpoints" / "global_step_2").sentence


def test_what_is_no_model_is_refused(project: Project, tmp_path: Path) -> None:
    assert "does not exist; give a run folder" in cli("eval", tmp_path / "none").sentence
    assert "holds no model (found: sft.parquet" in cli("eval", project.folder / "data").sentence
    assert "the model comes first" in cli("eval", "data.max_val_prompts=2").sentence
    assert "data.val_files is empty" in cli("eval", project.model).sentence
    assert "set MODEL_OR_RUN" in cli("eval", project.model, "model.path=x").sentence
    with RunFolder.create(tmp_path / "run", config={}, command=["strop", "train"]):
        pass
    assert "has no valid checkpoint yet" in cli("eval", tmp_path / "run").sentence


def test_generate_writes_answers_to_a_file(trained: Path, project: Project, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "answers.jsonl"
    result = cli(
        "generate", trained, "--prompts", project.data("val"), "--out", out, "--temperature", 1.0, "--samples", 2,
        "--max-tokens", 3,
    )  # fmt: skip
    assert (result.code, result.out) == (0, "")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["row"], row["sample_index"]) for row in rows] == [(i, j) for i in range(4) for j in range(2)]
    assert rows[0]["prompt"][0]["content"].startswith("reverse: ")
    assert len({row["response"] for row in rows}) > 4, "every sample has a random stream of its own"
    assert all(row["num_tokens"] <= 3 for row in rows)


def test_generate_reads_lines_and_its_seed_decides(trained: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("reverse: ab\n\nreverse: cd\n")
    words = ["generate", trained, "--prompts", path, "--temperature", 1.0, "--json"]
    first, again, other = cli(*words), cli(*words), cli(*words, "--seed", 1)
    assert [json.loads(line)["prompt"] for line in first.out.splitlines()] == ["reverse: ab", "reverse: cd"]
    assert first.out == again.out
    assert first.out != other.out


def test_generate_answers_standard_input(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("reverse: ab\n"))
    result = cli("generate", trained)
    assert result.code == 0
    assert result.out.startswith("> reverse: ab\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert "standard input has no prompts" in cli("generate", trained).sentence


def test_a_chat_keeps_its_turns_until_new(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: Iterator[str] = iter(["hello", "again", "", "x" * 200, "/new", "hello"])

    def read(prompt: str) -> str:
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", read)
    result = cli("generate", trained, "--max-tokens", 4)
    assert result.code == 0
    assert "the conversation has" in result.err, "a message that is too long does not end the chat"
    alone = cli("generate", trained, "--max-tokens", 4, "--json", "--prompts", _one_line(trained, "hello"))
    first = plain(alone.record["response"]) + "\n"
    assert result.out.startswith(first)
    assert result.out.endswith(first)
    second = result.out.removeprefix(first).removesuffix(first)
    assert second not in ("", first), "the second answer has the first turn before it"


def _one_line(folder: Path, text: str) -> Path:
    path = folder.parent / "one-line.txt"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--samples", "2"], "gives the same answer each time; add --temperature 1.0"),
        (["--samples", "0"], "--samples is 0; use at least 1"),
        (["--max-tokens", "200"], "more than the 128 positions of the model"),
        (["--max-tokens", "0"], "max_tokens is 0"),
        (["data.prompt_key=question"], "has no column 'question' (the prompt; map it with data.prompt_key)"),
        (["--out", "/proc/answers.jsonl"], "cannot write --out /proc/answers.jsonl"),
    ],
)
def test_bad_requests_for_answers(trained: Path, project: Project, words: list[str], expected: str) -> None:
    assert expected in cli("generate", trained, "--prompts", project.data("val"), *words).sentence


def test_prompt_files_that_do_not_exist(trained: Path, tmp_path: Path) -> None:
    for name in ("none.txt", "none.jsonl"):
        assert "does not exist" in cli("generate", trained, "--prompts", tmp_path / name).sentence
