"""Traces of episodes, as a collector receives them over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from agent_cases import ScriptedModel, prompt_of, sampling_of, setup_with
from http_server import LocalServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from template_family import family_tokenizer

from strop.agents.tools.calculator import CalculatorTool
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome
from strop.rewards.config import RewardConfig
from strop.rollout.config import RolloutConfig
from strop.rollout.tracing_config import TraceConfig
from strop.workers.episodes import Episode
from strop.workers.player import EpisodeRunner
from strop.workers.tracing.observer import check_observers, episode_observers

TOKENIZER = family_tokenizer("qwen25")
END = TOKENIZER.eos_token_id
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'


@dataclass
class Collector:
    """Spans that came in."""

    address: str
    spans: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def named(self, beginning: str) -> list[Any]:
        return [span for span in self.spans if span.name.startswith(beginning)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            made.headers.append(dict(self.headers))
            made.spans += [
                span
                for group in request.resource_spans
                for scope in group.scope_spans
                for span in scope.spans
            ]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = LocalServer(("127.0.0.1", 0), Handler)
    made = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


class Pool:
    """Scores an answer with 0.5."""

    config = RewardConfig()
    compares = False

    async def score(self, prompt: Prompt, trajectory: Trajectory, text: str) -> Outcome:
        await asyncio.sleep(0.01)
        return Outcome(kind="score", score=0.5, parts={"acc": 1.0})


class Comparing(Pool):
    """Knows nothing of an answer alone; of a group, the first is the best."""

    compares = True

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str, *, in_group: bool = False
    ) -> Outcome:
        assert in_group
        return Outcome(kind="score", score=0.0)

    async def compare(self, prompt: Prompt, answers: Any, trajectories: Any = ()) -> list[Outcome]:
        return [Outcome(kind="score", score=float(number == 0)) for number in range(len(answers))]


def played(trace: TraceConfig, *, samples: int = 1, pool: Pool | None = None, **fields: Any) -> list[Episode]:
    """Episodes that call a tool once, listened to as `trace` says."""
    answers = [[*TOKENIZER(text)["input_ids"], END] for text in (CALL, "It is 3.")]
    model = ScriptedModel(answers)
    player = EpisodeRunner(
        model,  # type: ignore[arg-type]
        TOKENIZER,
        pool or Pool(),  # type: ignore[arg-type]
        seed=0,
        setup=setup_with(TOKENIZER, [CalculatorTool()]),
        observers=episode_observers(RolloutConfig(trace=trace), TOKENIZER),  # type: ignore[call-arg]
    )
    prompt = prompt_of(TOKENIZER, extra_info={}, **fields)
    made = asyncio.run(player.run([prompt], samples_per_prompt=samples, sampling=sampling_of(TOKENIZER)))
    player.close()
    return made


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_an_episode_is_a_span_with_its_answers_calls_and_score(collector: Collector) -> None:
    before = time.time_ns()
    (episode,) = played(TraceConfig(backend="otlp", endpoint=collector.address))
    (root,) = collector.named("episode")
    parts = [span for span in collector.spans if span is not root]
    assert [span.name for span in sorted(parts, key=lambda span: span.end_time_unix_nano)] == [
        "answer 0",
        "tool calculator",
        "answer 1",
        "reward",
    ]
    assert {span.parent_span_id for span in parts} == {root.span_id}
    assert {span.trace_id for span in parts} == {root.trace_id}
    for span in parts:
        assert before <= root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= root.end_time_unix_nano
    assert root.name == f"episode {episode.id}"
    told = attributes(root)
    assert json.loads(told["gen_ai.input.messages"]) == [{"role": "user", "content": "How much is it?"}]
    assert (told["strop.score"], told["strop.stop_reason"], told["strop.num_turns"]) == (0.5, "stop", 4)
    assert (told["strop.version.first"], told["strop.version.last"]) == (0, 1)
    (tool,) = collector.named("tool")
    told = attributes(tool)
    assert json.loads(told["gen_ai.tool.call.arguments"]) == {"expression": "1+2"}
    assert told["gen_ai.tool.call.result"] == "3"
    told = attributes(collector.named("answer 1")[0])
    assert told["gen_ai.usage.output_tokens"] == len(TOKENIZER("It is 3.")["input_ids"]) + 1
    assert json.loads(told["gen_ai.output.messages"])[0]["content"] == "It is 3.<|im_end|>"
    (scored,) = collector.named("reward")
    assert scored.end_time_unix_nano - scored.start_time_unix_nano >= 9_000_000, "it took 10 ms"


@pytest.mark.parametrize(("uid", "validate"), [("e1-000007", False), ("val-000007", True)])
def test_an_episode_of_a_validation_is_told_from_one_of_training(
    collector: Collector, uid: str, validate: bool
) -> None:
    played(TraceConfig(backend="otlp", endpoint=collector.address), uid=uid, row=7)
    told = attributes(collector.named("episode")[0])
    assert (told["strop.row"], told["strop.validate"], told["strop.uid"]) == (7, validate, uid)


def test_so_many_episodes_are_traced_as_are_asked_for(collector: Collector) -> None:
    assert len(played(TraceConfig(backend="otlp", endpoint=collector.address, max_samples=2), samples=5)) == 5
    assert len(collector.named("episode")) == 2


def test_answers_that_are_compared_are_traced_with_what_came_of_it(collector: Collector) -> None:
    made = played(TraceConfig(backend="otlp", endpoint=collector.address), samples=2, pool=Comparing())
    assert [one.outcome and one.outcome.score for one in made] == [1.0, 0.0]
    told = [attributes(span) for span in collector.named("episode")]
    assert {one["strop.sample_index"]: one["strop.score"] for one in told} == {0: 1.0, 1: 0.0}
    scores = [attributes(span).get("strop.score") for span in collector.named("reward comparison")]
    assert sorted(scores) == [0.0, 1.0]
    alone = [span for span in collector.named("reward") if span.name == "reward"]
    assert [attributes(span).get("strop.score") for span in alone] == [None, None]


@pytest.mark.slow
def test_a_collector_that_is_gone_ends_nothing() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = time.monotonic()
    (episode,) = played(TraceConfig(backend="otlp", endpoint=f"http://127.0.0.1:{port}/v1/traces"))
    assert episode.failure == ""
    assert time.monotonic() - start < 15


def test_what_cannot_be_traced_is_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ValueError, match=r"the address of its server is '': set rollout\.trace\.endpoint"):
        check_observers(RolloutConfig(trace=TraceConfig(backend="mlflow")))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"no rollout\.trace\.backend is set"):
        TraceConfig(endpoint="http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ValueError, match=r"pip install 'strop\[trace\]'"):
        check_observers(RolloutConfig(trace=TraceConfig(backend="otlp")))  # type: ignore[call-arg]


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[str]:
    """A server of MLflow."""
    program = os.environ.get("STROP_MLFLOW", "")
    if not program:
        pytest.skip("STROP_MLFLOW names no `mlflow`, which lives in an environment of its own")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = f"sqlite:///{tmp_path}/mlflow.db"
    server = subprocess.Popen(
        [program, *words, "--backend-store-uri", store], cwd=tmp_path, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(server.pid, 15)
        server.wait(30)


@pytest.mark.slow
def test_a_server_of_mlflow_shows_the_traces(mlflow: str) -> None:
    (episode,) = played(TraceConfig(backend="mlflow", endpoint=mlflow, experiment="tools"))
    found = _asked(f"{mlflow}/api/2.0/mlflow/experiments/get-by-name?experiment_name=tools")
    place = {
        "type": "MLFLOW_EXPERIMENT",
        "mlflow_experiment": {"experiment_id": found["experiment"]["experiment_id"]},
    }
    (one,) = _asked(f"{mlflow}/api/3.0/mlflow/traces/search", {"locations": [place]})["traces"]
    assert "How much is it?" in one["request_preview"]
    assert episode.text[-8:] in one["response_preview"]


def _asked(address: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data=data, headers={"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=30).read())
