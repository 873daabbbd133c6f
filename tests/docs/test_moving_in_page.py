"""docs/moving-in.md: the file that asks a reward server of OpenRLHF, as it stands there."""

from __future__ import annotations

from pathlib import Path

import pytest
from doc_pages import ROOT, blocks
from judge_cases import Handler, serve
from trainer.tiny_runs import Project, make_project, train_in

from strop.cli.quickstart.task import TaskFiles
from strop.rewards import RewardError
from strop.run import RunFolder

PAGE, FILE, ADDRESS = ROOT / "docs" / "moving-in.md", "asks_server.py", "http://127.0.0.1:5000"


@pytest.fixture
def project(tmp_path: Path, tiny_model: Path, tiny_task: TaskFiles) -> Project:
    """Settings and files of a run that takes a second."""
    return make_project(tmp_path, tiny_model, tiny_task)


def file_of_page(folder: Path, address: str) -> Path:
    """The file, which asks another address than the page's: that port may be taken."""
    (text,) = [block.text for block in blocks(PAGE) if block.notes.get("file") == FILE]
    assert text.count(f"{ADDRESS}/get_reward") == 1
    path = folder / FILE
    path.write_text(text.replace(ADDRESS, address))
    return path


def play(handler: Handler, body: dict[str, list[str]], number: int) -> None:
    """Answers as OpenRLHF's servers do: one number for each query."""
    assert handler.path == "/get_reward"
    rewards = [len(query) % 5 / 5 for query in body["query"]]
    lengths = [float(len(query)) for query in body["query"]]
    handler.send({"rewards": rewards, "scores": rewards, "extra_logs": {"length": lengths}})


def settings(project: Project, file: Path) -> list[str]:
    return [
        f"reward.path='{file}'",
        "reward.name=reward_func",
        "trainer.max_steps=2",
        "data.val_files=[]",
    ]


def test_a_server_of_openrlhf_rewards_a_run(project: Project, tmp_path: Path) -> None:
    with serve(play) as service:
        config = project.config(*settings(project, file_of_page(tmp_path, service.url)))
        done = train_in(tmp_path / "run", config)
    with RunFolder.open(done.folder, read_only=True) as run:
        rows = [row for step in (1, 2) for row in run.samples.read(step)]
    assert len(rows) == 2 * 4 * 4
    assert {row["outcome"] for row in rows} == {"score"}
    for body in service.requests:
        assert set(body) == {"query", "prompts", "labels"}
        assert len(body["query"]) == len(body["prompts"]) == len(body["labels"])
        for query, prompt, label in zip(body["query"], body["prompts"], body["labels"], strict=True):
            assert query.startswith(prompt)
            assert label in prompt[::-1], "the task is to write a word backwards"
    asked = [body for body in service.requests if len(body["query"]) == 4]
    assert len(asked) >= 8, "all answers to a prompt are in one request"
    lengths = {row["reward_parts"]["length"] for row in rows}
    assert {row["score"] for row in rows} == {length % 5 / 5 for length in lengths}
    assert len({row["score"] for row in rows}) > 1


def test_without_the_server_the_run_says_what_to_start(project: Project, tmp_path: Path) -> None:
    with serve(play) as service:
        address = service.url
    config = project.config(*settings(project, file_of_page(tmp_path, address)))
    with pytest.raises(RewardError) as caught:
        train_in(tmp_path / "run", config)
    assert "reward_func in asks_server.py could not score: URLError" in str(caught.value)
    assert "a service that runs and is reached from here" in str(caught.value)
