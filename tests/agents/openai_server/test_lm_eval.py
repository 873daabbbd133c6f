"""lm-eval over `strop serve`, unmodified: its numbers are those of transformers, and its requests are served."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from program_path import python_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from strop.data.tiny_model import make_tiny_model

PACKAGES = os.environ.get("STROP_LM_EVAL", "")
"""Folder with lm_eval and what it needs; `make harness` makes one."""
pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]
ROWS = [
    {"question": "1 + 1 = ", "choices": ["2", "3", "17"], "answer": 0},
    {"question": "2 + 3 = ", "choices": ["4", "5"], "answer": 1},
    {"question": "4 + 4 = ", "choices": ["8", "12"], "answer": 0},
]
CHOICE = """\
task: sums_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
WRITTEN = """\
task: sums_written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and two tasks on a local file."""
    if not PACKAGES:
        pytest.skip("STROP_LM_EVAL names no folder with lm_eval; make harness installs it")
    made = tmp_path_factory.mktemp("harness")
    make_tiny_model(made / "model", seed=0, hidden_size=32, num_layers=2, head_dim=16, intermediate_size=64)
    (made / "tasks").mkdir()
    (made / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in {"choice": CHOICE, "written": WRITTEN}.items():
        (made / "tasks" / f"{name}.yaml").write_text(text.replace("FILE", str(made / "rows.jsonl")))
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[dict[str, str]]:
    """`strop serve` in a process of its own."""
    words = [sys.executable, "-m", "strop.cli.main", "serve", str(folder / "model"), "--json"]
    with (folder / "serve.log").open("w") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (folder / "serve.log").read_text()
    yield json.loads(line)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def lm_eval(
    folder: Path, server: dict[str, str], model: str, arguments: str, *words: str
) -> tuple[Any, dict[str, Any]]:
    """The results of its command, and its logged samples by task."""
    out = folder / f"out-{time.monotonic_ns()}"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments),
            *("--include_path", str(folder / "tasks"), "--output_path", str(out), "--log_samples", *words),
        ],
        env={
            **os.environ,
            "PYTHONPATH": python_path(PACKAGES),
            "OPENAI_API_KEY": server["api_key"],
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(folder / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = out.rglob("results_*.json")
    samples = {
        path.name.removeprefix("samples_").rpartition("_")[0]: [
            json.loads(line) for line in path.read_text().splitlines()
        ]
        for path in out.rglob("samples_*.jsonl")
    }
    return json.loads(results.read_text())["results"], samples


def test_loglikelihoods_are_those_of_transformers(folder: Path, server: dict[str, str]) -> None:
    arguments = f"base_url={server['base_url']}/completions,model=any,tokenizer={folder / 'model'}"
    arguments += ",tokenizer_backend=huggingface"
    results, samples = lm_eval(
        folder, server, "local-completions", arguments, "--tasks", "sums_choice,sums_written"
    )
    module = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    right = []
    for row, logged in zip(ROWS, sorted(samples["sums_choice"], key=lambda one: one["doc_id"]), strict=True):
        # The harness scores a space at the end of the question with the choice.
        begun = tokenizer(str(row["question"]).rstrip(), add_special_tokens=False)["input_ids"]
        sums = []
        for choice, answered in zip(row["choices"], logged["filtered_resps"], strict=True):  # type: ignore[call-overload]
            ids = tokenizer(f"{row['question']}{choice}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                log_probs = module(torch.tensor([ids])).logits[0].log_softmax(-1)
            own = [float(log_probs[place - 1, ids[place]]) for place in range(len(begun), len(ids))]
            is_greedy = all(
                int(log_probs[place - 1].argmax()) == ids[place] for place in range(len(begun), len(ids))
            )
            number, flag = answered
            assert float(number) == pytest.approx(sum(own), abs=1e-4)
            assert str(flag) == str(is_greedy)
            sums.append(sum(own))
        right.append(sums.index(max(sums)) == row["answer"])
    assert results["sums_choice"]["acc,none"] == pytest.approx(sum(right) / len(right))
    assert len(samples["sums_written"]) == 3
    batched, _ = lm_eval(
        folder, server, "local-completions", arguments, "--tasks", "sums_choice", "--batch_size", "2"
    )
    assert batched["sums_choice"]["acc,none"] == results["sums_choice"]["acc,none"]


def test_answers_are_generated_over_chats(folder: Path, server: dict[str, str]) -> None:
    results, samples = lm_eval(
        folder, server, "local-chat-completions",
        f"base_url={server['base_url']}/chat/completions,model=any,num_concurrent=3",
        "--apply_chat_template", "--tasks", "sums_written",
    )  # fmt: skip
    assert 0 <= results["sums_written"]["exact_match,none"] <= 1
    assert all(isinstance(one["resps"][0][0], str) for one in samples["sums_written"])
