"""A run whose reward is the sum of a function and a judge on a real HTTP server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from http_server import LocalServer
from tiny_runs import Project, resume_in, train_in, with_reward

from strop.config import ConfigError
from strop.rewards import RewardConfig, RewardError
from strop.rewards.config import FunctionConfig, OnFailureConfig
from strop.rewards.judges.config import JudgeConfig
from strop.run import RunError, RunFolder
from strop.trainer.api_costs import CostTracker


class _Judge(BaseHTTPRequestHandler):
    lock = threading.Lock()
    count = most = under_way = 0
    seconds = 0.0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.lock:
            _Judge.count += 1
            _Judge.under_way += 1
            _Judge.most = max(_Judge.most, _Judge.under_way)
        time.sleep(self.seconds)
        with self.lock:
            _Judge.under_way -= 1
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
    _Judge.count = _Judge.most = _Judge.under_way = 0
    _Judge.seconds = 0.0
    server = LocalServer(("127.0.0.1", 0), _Judge)
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


def priced(url: str, **fields: Any) -> JudgeConfig:
    """A judge of whom every reply costs 10: 10 tokens at a price of 1."""
    return JudgeConfig(base_url=url, model="m", price_per_million_output_tokens=1e6, timeout_s=20.0, **fields)


def test_a_run_stops_at_its_spending_limit_and_remembers_it_when_it_goes_on(
    project: Project, tmp_path: Path, judge_url: str
) -> None:
    plain = project.config("data.val_files=[]", "trainer.max_steps=2", "run.save_every=1")
    # Before the run 4 answers are tried, the first step has 16: 200 is spent as the second begins, and 5 more can be.
    config = with_reward(plain, path="", judge=priced(judge_url, max_concurrent=1, max_cost=250.0))
    run = tmp_path / "run"
    with pytest.raises(
        RewardError, match="the run has spent 250 of reward.judge.max_cost=250; raise it to go on"
    ):
        train_in(run, config)
    assert _Judge.count == 25
    assert json.loads((run / "spending.json").read_text()) == {"judge": 250.0}
    with pytest.raises(RewardError, match="the run has spent 250 of reward.judge.max_cost=250"):
        resume_in(run)
    assert _Judge.count == 25, "the money of the step that was rolled back is gone all the same"
    done = resume_in(run, "reward.judge.max_cost=450")
    assert [record.step for record in done.records] == [2]
    assert _Judge.count == 25 + 4 + 16
    assert json.loads((run / "spending.json").read_text()) == {"judge": 450.0}
    with pytest.raises(ConfigError, match="reward.judge.model is 'm' in this run, and 'other' would"):
        resume_in(run, "reward.judge.model=other")


def test_a_run_may_go_on_without_the_judge_when_its_policy_says_so(
    project: Project, tmp_path: Path, judge_url: str
) -> None:
    plain = project.config("data.val_files=[]", "trainer.max_steps=2")
    config = with_reward(
        plain, path="", judge=priced(judge_url, max_concurrent=1, max_cost=250.0), max_failed_share=1.0,
        on_failure=OnFailureConfig(infrastructure="exclude"),
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    assert [numbers["reward/infrastructure"] for numbers in done.steps] == [0, 11]
    assert _Judge.count == 25


def test_a_damaged_record_of_what_was_spent_ends_the_start(project: Project, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"judge": -1}', '{"judge": true}'):
        (tmp_path / "spending.json").write_text(text)
        with pytest.raises(RunError, match=r"spending.json (cannot be read|says that the judge has cost)"):
            CostTracker(RewardConfig(judge=priced("http://a")), tmp_path)
    assert CostTracker(RewardConfig(), tmp_path).totals == {}, "without a judge nobody asks"


@pytest.mark.dist
def test_rollout_workers_on_ray_share_the_limits_of_the_run(
    project: Project, tmp_path: Path, judge_url: str
) -> None:
    _Judge.seconds = 0.1
    plain = project.config(
        "data.val_files=[]", "trainer.max_steps=2", "resources.runtime=ray", "resources.cpus_per_rank=0.25",
        "resources.apart={rollout: 2}",
    )  # fmt: skip
    config = with_reward(
        plain, path="", judge=priced(judge_url, max_concurrent=2, max_cost=260.0), max_failed_share=1.0,
        on_failure=OnFailureConfig(infrastructure="exclude"),
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    assert _Judge.most == 2, "one of each worker, and none more"
    # 4 answers are tried before the run, the first step has 16, and 60 is left for the second: 3 requests of each.
    assert _Judge.count == 4 + 16 + 6
    assert [numbers["reward/infrastructure"] for numbers in done.steps] == [0, 10]
    assert json.loads((done.folder / "spending.json").read_text()) == {"judge": 260.0}
