"""A run whose reward is the sum of a function and a judge on a real HTTP server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Project, train_in, with_reward

from strop.rewards.config import FunctionConfig
from strop.rewards.remote.config import JudgeConfig
from strop.run import RunFolder


class _Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        score = len(body["messages"][0]["content"]) % 2
        reply = {
            "choices": [{"message": {"content": json.dumps({"score": score})}}],
            "usage": {"prompt_tokens": 50, "completion_tokens": 10},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_parts_of_the_reward_are_in_metrics_and_samples(
    project: Project, tmp_path: Path, judge_url: str
) -> None:
    plain = project.config("data.val_files=[]", "trainer.max_steps=1")
    judge = JudgeConfig(
        base_url=judge_url, model="m", weight=0.5, timeout_s=20.0, price_per_million_output_tokens=1e6
    )
    functions = (FunctionConfig(path=plain.reward.path, key="own", weight=2.0),)
    done = train_in(tmp_path / "run", with_reward(plain, path="", functions=functions, judge=judge))
    (numbers,) = done.steps
    with RunFolder.open(done.folder, read_only=True) as run:
        rows = run.samples.read(1)
    assert len(rows) == 16
    for row in rows:
        parts = row["reward_parts"]
        assert row["score"] == pytest.approx(2.0 * parts["own"] + 0.5 * parts["judge"])
    for part in ("own", "judge"):
        mean = sum(row["reward_parts"][part] for row in rows) / 16
        assert numbers[f"reward/{part}/mean"] == pytest.approx(mean)
    assert {row["reward_parts"]["judge"] for row in rows} == {0.0, 1.0}
    assert numbers["reward/judge/requests"] == 16
    assert numbers["reward/judge/output_tokens"] == 160
    assert numbers["reward/judge/cost"] == pytest.approx(160.0)
    assert numbers["reward/ok_share"] == 1.0
