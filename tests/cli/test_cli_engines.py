"""Commands that answer with another engine: a server somewhere, and an engine in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_calls import Project, cli
from gateway_cases import Open, gateway
from judge_cases import Handler, completion, serve

from strop.engines.config import ModelConfig
from strop.engines.model import load_model
from strop.engines.tokenizer import load_tokenizer
from strop.rollout.native.engine import NativeEngine

pytestmark = pytest.mark.timeout(120)
REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)
"""


@pytest.fixture
def sums(tmp_path: Path) -> list[str]:
    """Settings of three sums, whose answers are compared with the truth."""
    rows = [{"prompt": f"{n} + 4 = ?", "data_source": "sums", "answer": str(n + 4)} for n in range(3)]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    return [
        f"data.val_files=[{tmp_path}/val.jsonl]",
        "data.ground_truth_key=answer", f"reward.path={tmp_path}/reward.py", "reward.num_workers=1",
    ]  # fmt: skip


def sum_up(handler: Handler, body: dict[str, Any], number: int) -> None:
    first, _, second, *_ = body["messages"][-1]["content"].split()
    handler.send(completion(str(int(first) + int(second))))


@contextlib.contextmanager
def served(model: Path) -> Iterator[Open]:
    """A gateway over a model, on a loop of its own."""
    config = ModelConfig(path=str(model), dtype="float32")
    engine, tokenizer = NativeEngine(load_model(config, device="cpu"), max_running=8), load_tokenizer(config)
    loop, ready, opened = asyncio.new_event_loop(), threading.Event(), []
    ended = asyncio.Event()

    async def whole() -> None:
        async with gateway(engine, tokenizer) as one:
            opened.append(one)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(whole(),))
    thread.start()
    try:
        assert ready.wait(30)
        yield opened[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
        loop.close()


def openai(url: str, *more: str) -> list[str]:
    named = [f"rollout.openai.base_url={url}/v1", "rollout.openai.model=m", "rollout.openai.backoff_s=0.01"]
    return ["rollout.engine=openai", *named, *more]


def test_eval_asks_a_server_and_needs_no_model(sums: list[str], tmp_path: Path) -> None:
    with serve(sum_up) as service:
        result = cli("eval", *openai(service.url), *sums, "--out", tmp_path / "answers.jsonl", "--json")
    record = result.record
    assert (record["model"], record["pass_rate"]) == ("m", 1.0)
    assert record["usage"] == {"requests": 3, "retries": 0, "input_tokens": 300, "output_tokens": 60}
    assert {one["temperature"] for one in service.requests} == {0.0}
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [one["response"] for one in answers] == ["4", "5", "6"]


def test_generate_asks_a_server(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("1 + 2 =\n3 + 4 =\n")
    with serve(sum_up) as service:
        words = ("--prompts", tmp_path / "prompts.txt", "--json", "--max-tokens", "5")
        result = cli("generate", *openai(service.url), *words)
    assert [json.loads(line)["response"] for line in result.out.splitlines()] == ["3", "7"]
    assert {one["max_tokens"] for one in service.requests} == {5}


def test_a_check_of_a_run_is_answered_by_a_server(sums: list[str], tmp_path: Path) -> None:
    def play(handler: Handler, body: dict[str, Any], number: int) -> None:
        first, _, second, *_ = body["messages"][-1]["content"].split()
        right = str(int(first) + int(second))
        handler.send(completion(right if body["seed"] % 2 else "no"))

    files = [one.replace("val_files", "train_files") for one in sums]
    (tmp_path / "run.yaml").write_text("trainer: {max_steps: 1}\n")
    with serve(play) as service:
        result = cli(
            "check",
            *openai(service.url, "rollout.samples_per_prompt=8"),
            *files,
            "--config",
            tmp_path / "run.yaml",
        )
    assert result.code == 0, result.err
    assert "data and rewards work with m; 24 samples" in result.out
    assert "prompts: 3 prompts, 24 samples" in result.out
    assert len(service.requests) == 24


def test_a_server_that_refuses_ends_eval_with_its_words(sums: list[str]) -> None:
    with serve(lambda handler, body, number: handler.send({"error": "who are you?"}, 401)) as service:
        sentence = cli("eval", *openai(service.url), *sums).sentence
    assert "refused with HTTP status 401" in sentence
    assert "who are you?" in sentence


def test_token_ids_of_our_own_server_give_the_answers_of_the_model(project: Project, tmp_path: Path) -> None:
    words = ["eval", project.model, "--config", project.config, "--json", "--out"]
    assert cli(*words, tmp_path / "native.jsonl").code == 0
    with served(project.model) as opened, pytest.MonkeyPatch.context() as environment:
        environment.setenv("KEY_OF_TEST", opened.token)
        exact = openai(
            opened.address, "rollout.openai.api=completions", "rollout.openai.api_key_env=KEY_OF_TEST"
        )
        assert cli(*words, tmp_path / "remote.jsonl", *exact).code == 0
    native, remote = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("native", "remote")
    )
    tokens = ("prompt_ids", "response_ids", "response_mask")  # of another server they are as it counts them
    assert [{name: value for name, value in one.items() if name not in tokens} for one in native] == remote
    assert len(native) == 4


def test_what_goes_with_no_server_is_refused(sums: list[str], project: Project) -> None:
    exact = openai("http://127.0.0.1:9", "rollout.openai.api=completions")
    assert "name MODEL_OR_RUN, whose tokenizer makes them" in cli("eval", *exact, *sums).sentence
    remote = [*openai("http://127.0.0.1:9"), *sums]
    train = cli("train", *remote, "model.path=nowhere", "data.train_files=[no.jsonl]", "--out", "no-run")
    assert "whose weights nobody here can train" in train.sentence
    serving = cli("serve", project.model, *openai("http://127.0.0.1:9"))
    assert "is a server already" in serving.sentence
    limit = cli("generate", project.model, "data.max_prompt_tokens=64")
    assert "does not read data.max_prompt_tokens" in limit.sentence or "reads" in limit.sentence


@pytest.mark.slow
def test_an_engine_in_a_process_of_its_own_gives_the_answers_of_the_native_one(
    project: Project, tmp_path: Path
) -> None:
    rollout = Path(__file__).parents[1] / "rollout"
    python = tmp_path / "python"
    root = f"{rollout / 'sglang_server'}:{rollout.parents[1]}"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{root}" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    sglang = ["rollout.engine=sglang", f"rollout.sglang.python={python}"]
    words = ["eval", project.model, "--config", project.config, "--json", "--out"]
    assert cli(*words, tmp_path / "native.jsonl").code == 0
    assert cli(*words, tmp_path / "sglang.jsonl", *sglang).code == 0
    assert (tmp_path / "native.jsonl").read_text() == (tmp_path / "sglang.jsonl").read_text()
    asked = ["generate", project.model, "--prompts", project.data("val"), "--max-tokens", "4", "--json"]
    limits = ["data.max_prompt_tokens=32", "model.dtype=float32"]
    assert cli(*asked, "model.dtype=float32").out == cli(*asked, *sglang, *limits).out


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm_gives_the_answers_of_the_native_engine(tmp_path: Path, sums: list[str]) -> None:
    from strop.data.tiny_model import make_tiny_model

    make_tiny_model(
        tmp_path / "model", seed=0, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32
    )
    vllm = ["rollout.engine=vllm", "rollout.vllm.cpu_cache_gib=0.25"]
    limits = ["data.max_prompt_tokens=64", "data.max_response_tokens=8"]
    words = ["eval", tmp_path / "model", *sums, *limits, "model.dtype=float32", "--json", "--out"]
    assert cli(*words, tmp_path / "native.jsonl").code == 0
    assert cli(*words, tmp_path / "vllm.jsonl", *vllm).code == 0
    assert (tmp_path / "native.jsonl").read_text() == (tmp_path / "vllm.jsonl").read_text()
    asked = ["generate", tmp_path / "model", "--prompts", tmp_path / "val.jsonl", "--json", *limits]
    data = [one for one in limits if not one.startswith("data.max_prompt")]
    native = cli(*asked[: -len(limits)], *data, "model.dtype=float32")
    assert native.out == cli(*asked, "model.dtype=float32", *vllm).out
    (tmp_path / "run.yaml").write_text(f"model: {{path: '{tmp_path}/model', dtype: float32}}\n")
    train = [one.replace("val_files", "train_files") for one in sums]
    checked = cli(
        "check",
        "--config",
        tmp_path / "run.yaml",
        "rollout.samples_per_prompt=2",
        *train,
        *limits,
        *vllm,
        "--json",
    )
    engine = next(one for one in checked.record["checks"] if one["name"] == "engine")
    assert engine["level"] == "ok", engine
    assert "log-probs differ by at most" in engine["text"]
