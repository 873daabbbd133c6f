"""Runs in which something goes wrong: scorers, agents, and a step without any sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest
from tiny_runs import Project, check_records, train_in, with_reward

from strop.agents.registry import Agent, Generate, agents
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import RewardError
from strop.rewards.config import OnFailureConfig
from strop.run import Checkpoint, PendingCheckpoint, RunFolder
from strop.trainer.config import Config
from strop.workers.reports import EpisodesFailed


@pytest.fixture
def registered() -> Iterator[dict[str, Agent]]:
    """The registry, as it was before at the end."""
    before = dict(agents)
    yield agents
    agents.clear()
    agents.update(before)


def with_agent(project: Project, folder: Path, name: str) -> list[str]:
    """Training data in which every row names an agent."""
    rows = pyarrow.parquet.read_table(project.task.train).to_pylist()
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "agent_name": name}) + "\n" for row in rows))
    return [f"data.train_files=['{path}']", "data.val_files=[]"]


def picky(project: Project, *overrides: str, **changes: object) -> Config:
    """Half of the answers cannot be scored."""
    return with_reward(
        project.config("data.val_files=[]", *overrides), name="picky", max_failed_share=0.9, **changes
    )


def rows_of(folder: Path, step: int) -> list[dict[str, object]]:
    with RunFolder.open(folder, read_only=True) as run:
        return run.samples.read(step)


def test_samples_that_cannot_be_scored_are_dropped(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", picky(project))
    for record, numbers in zip(done.records, done.steps, strict=True):
        rows = rows_of(done.folder, record.step)
        failed = [row for row in rows if row["outcome"] == "error"]
        assert 0 < len(failed) < 16
        assert len(record.fetched) == 16 - len(failed)
        assert numbers["reward/error"] == len(failed)
        for row in failed:
            assert (row["fate"], row["score"], row["advantage"]) == ("failed", None, None)
            assert row["fate_reason"].startswith("reward error: ")
            assert "ZeroDivisionError: an odd beginning" in row["fate_reason"]
        assert {row["fate"] for row in rows if row["outcome"] == "score"} == {"trained"}
    assert any("ZeroDivisionError: an odd beginning" in line for line in done.said)
    check_records(done.folder, num_steps=3)


def test_samples_that_cannot_be_scored_can_count_as_zero(project: Project, tmp_path: Path) -> None:
    done = train_in(
        tmp_path / "run", picky(project, "trainer.max_steps=1", on_failure=OnFailureConfig(error="fixed"))
    )
    (record,) = done.records
    assert len(record.fetched) == 16
    rewards = [float(row.sum()) for row in record.fetched.tensors()["token_level_rewards"].unbind()]
    for row, reward in zip(rows_of(done.folder, 1), rewards, strict=True):
        assert row["fate"] == "trained"
        assert reward == pytest.approx(0.0 if row["outcome"] == "error" else row["score"])
        assert row["score"] is None or row["outcome"] == "score", "a failure is never recorded as a score"


def test_too_many_failed_scores_stop_the_run_with_one_sentence(project: Project, tmp_path: Path) -> None:
    config = with_reward(project.config("data.val_files=[]"), name="picky", max_failed_share=0.1)
    with pytest.raises(RewardError) as caught:
        train_in(tmp_path / "run", config)
    sentence = str(caught.value)
    assert "of 16 samples could not be scored, more than reward.max_failed_share = 0.1 allows" in sentence
    assert "ZeroDivisionError: an odd beginning" in sentence
    assert "\n" not in sentence
    with RunFolder.open(tmp_path / "run", read_only=True) as run:
        (crash,) = run.events.read("crashed")
        assert run.ledger.counts()["in_flight"] == 16
    assert crash["error"] == f"RewardError: {sentence}"


def test_a_step_without_any_sample_is_no_crash(project: Project, tmp_path: Path) -> None:
    config = with_reward(
        project.config("data.val_files=[]", "run.save_every=1"), name="only_right", max_failed_share=1.0
    )
    done = train_in(tmp_path / "run", config)
    assert [record.fetched for record in done.records] == [None] * 3
    with RunFolder.open(done.folder, read_only=True) as run:
        assert run.ledger.counts()["failed"] == 48
        weights = {one.stages["weights"] for one in run.fingerprints.read()}
    assert len(weights) == 1, "nothing was learned"
    assert [numbers["reward/error"] for numbers in done.steps] == [16.0] * 3
    assert all("actor/loss" not in numbers for numbers in done.steps)
    check_records(done.folder, num_steps=3)
    # The version is the step all the same, as it would be after a resume.
    versions = [{report.versions for report in record.reports} for record in done.records]
    assert versions == [{(0, 0)}, {(1, 1)}, {(2, 2)}]


@pytest.mark.usefixtures("registered")
def test_a_failed_agent_gets_the_fate_failed(project: Project, tmp_path: Path) -> None:
    @agents.register("clumsy")
    async def clumsy(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        if trajectory.sample_index == 3 and asked.row % 2:
            raise ConnectionError("the tool server does not answer")
        return await agents["single_turn_agent"](asked, trajectory, generate)

    # Four prompts of four samples: at most four of 16 could fail, and three are allowed to.
    config = project.config(*with_agent(project, tmp_path, "clumsy"), "data.sampler=in_order")
    done = train_in(tmp_path / "run", config)
    for step in (1, 2, 3):
        rows = rows_of(done.folder, step)
        failed = [row for row in rows if row["fate"] == "failed"]
        assert len(failed) == 2
        assert {row["error"] for row in failed} == {"ConnectionError: the tool server does not answer"}
        assert {row["response_ids"] for row in failed} == {None}
    assert [numbers["rollout/failed"] for numbers in done.steps] == [2.0] * 3
    assert any(
        "2 of 16 episodes failed; the first one, e0-000001/3: ConnectionError" in line for line in done.said
    )
    check_records(done.folder, num_steps=3)


@pytest.mark.usefixtures("registered")
def test_samples_without_a_token_of_the_model_are_told(project: Project, tmp_path: Path) -> None:
    @agents.register("silent")
    async def silent(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory | None:
        if trajectory.sample_index:
            return await agents["single_turn_agent"](asked, trajectory, generate)
        return None

    config = project.config(*with_agent(project, tmp_path, "silent"), "trainer.max_steps=1")
    done = train_in(tmp_path / "run", config)
    (line,) = [line for line in done.said if "no token" in line]
    assert line.startswith(
        "step 1: 4 of 16 samples have no token of the model and are not trained; the first one, e0-"
    )
    assert line.endswith("/0: the agent gave no sequence")


@pytest.mark.usefixtures("registered")
def test_too_many_failed_agents_stop_the_run(project: Project, tmp_path: Path) -> None:
    @agents.register("broken")
    async def broken(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        raise ConnectionError("the tool server does not answer")

    with pytest.raises(EpisodesFailed, match="16 of 16 episodes failed; the first one, .*: ConnectionError"):
        train_in(tmp_path / "run", project.config(*with_agent(project, tmp_path, "broken")))


def test_an_unknown_agent_is_found_before_anything_starts(project: Project, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="train row 0 has agent_name 'tool_loop', but no agent has that name; known"
    ):
        train_in(tmp_path / "run", project.config(*with_agent(project, tmp_path, "tool_loop")))


@pytest.mark.usefixtures("registered")
def test_given_tokens_are_not_trained(project: Project, tmp_path: Path) -> None:
    @agents.register("polite")
    async def polite(asked: Prompt, trajectory: Trajectory, generate: Generate) -> Trajectory:
        trajectory = trajectory.with_given((20, 21))
        output = await generate(trajectory.token_ids, max_tokens=3)
        trajectory = trajectory.with_sampled(output.token_ids, output.log_probs, output.versions)
        return trajectory.with_given((22,)).finish(output.stop_reason)

    # The limit counts given tokens too: two, at most three sampled ones, and one.
    config = project.config(*with_agent(project, tmp_path, "polite"), "data.max_response_tokens=6")
    done = train_in(tmp_path / "run", config)
    for record, numbers in zip(done.records, done.steps, strict=True):
        tensors = record.fetched.tensors()
        for name in ("response_mask", "advantages", "responses"):
            assert all(len(row) >= 4 for row in tensors[name].unbind())
        for mask, advantages in zip(
            tensors["response_mask"].unbind(), tensors["advantages"].unbind(), strict=True
        ):
            assert mask.tolist() == [False, False] + [True] * (len(mask) - 3) + [False]
            assert advantages[~mask].abs().max() == 0
        assert numbers["actor/ratio"] == 1.0
        assert numbers["training/rollout_log_probs_diff_max"] <= 1e-4


def test_at_every_checkpoint_issued_is_the_sum_of_fates(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    seal = PendingCheckpoint.seal

    def seal_and_look(pending: PendingCheckpoint) -> Checkpoint:
        checkpoint = seal(pending)
        seen.append(checkpoint.manifest.facts["ledger"]["counts"])
        return checkpoint

    monkeypatch.setattr(PendingCheckpoint, "seal", seal_and_look)
    train_in(tmp_path / "run", picky(project, "run.save_every=1"))
    assert [counts["issued"] for counts in seen] == [16, 32, 48]
    for counts in seen:
        assert counts["issued"] == counts["trained"] + counts["failed"]
        assert counts["failed"] > 0
        assert counts["in_flight"] == counts["stale"] == counts["filtered"] == 0
