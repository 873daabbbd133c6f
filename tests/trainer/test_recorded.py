"""Training on recorded samples, trainer.skip_rollout: the same run again, other losses on equal data, and refusals."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_runs import Done, Project, train_in

from strop.config import ConfigError
from strop.protocol.trajectory import Prompt
from strop.rewards.config import OnFailureConfig, RewardConfig
from strop.rewards.outcome import Outcome, remedies, summarize
from strop.rollout.types import Sampling
from strop.run import RunError, RunFolder
from strop.workers.player import EpisodeRunner
from strop.workers.replayed_samples import Recording, open_recording

KL = ["algorithm.use_kl_loss=true", "algorithm.kl_loss_type=abs", "algorithm.kl_loss_coef=0.01"]
"""Of the run that is recorded."""


def never(*_: object, **__: object) -> None:
    raise AssertionError("a sample was played")


def test_the_recorded_run_is_the_same_run_again_without_an_answer_played(
    on_policy: Done, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strop.workers.player.play_episode", never)
    recorded = f"trainer.skip_rollout='{on_policy.folder}'"
    done = train_in(
        tmp_path / "run", project.config(*KL, recorded, "eval.before_train=false", "data.val_files=[]")
    )
    assert [one.chain for one in done.chain] == [one.chain for one in on_policy.chain]
    assert [step["actor/loss"] for step in done.steps] == [step["actor/loss"] for step in on_policy.steps]
    assert [step["critic/score/mean"] for step in done.steps] == [
        step["critic/score/mean"] for step in on_policy.steps
    ]


def test_another_loss_is_trained_on_equal_samples(on_policy: Done, project: Project, tmp_path: Path) -> None:
    recorded = f"trainer.skip_rollout='{on_policy.folder}'"
    done = train_in(
        tmp_path / "run", project.config(recorded, "algorithm.policy_loss=gspo", "actor.optim.lr=1e-2")
    )
    for step in (1, 2, 3):
        mine, theirs = (
            {row["id"]: (row["response_ids"], row["rollout_log_probs"], row["score"]) for row in rows}
            for rows in (samples(done.folder, step), samples(on_policy.folder, step))
        )
        assert mine == theirs
    ours, others = done.chain[-1].stages, on_policy.chain[-1].stages
    assert ours["weights"] != others["weights"]


def samples(run: Path, step: int) -> list[dict[str, object]]:
    with RunFolder.open(run, read_only=True) as folder:
        return folder.samples.read(step)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (["trainer.max_steps=4"], r"holds samples of 3 steps, and the run has 4: set trainer.max_steps=3"),
        (["trainer.seed=5"], r"has no sample e0-.*visits other rows"),
        (["rollout.samples_per_prompt=5"], r"has no sample e0-\d+/4"),
        (["rollout.temperature=0.7"], r"was sampled with rollout.temperature=1.0, and this run has 0.7"),
        (
            ["data.chat_template_kwargs={x: 1}", "model.chat_template='{{ messages[0].content }}!'"],
            r"another tokenizer",
        ),
    ],
)
def test_samples_that_do_not_fit_are_refused_before_a_model_is_loaded(
    settings: list[str],
    sentence: str,
    on_policy: Done,
    project: Project,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("strop.trainer.loop.make_worker_groups", never)
    recorded = f"trainer.skip_rollout='{on_policy.folder}'"
    with pytest.raises(RunError, match=sentence):
        train_in(tmp_path / "run", project.config(recorded, *settings))


def test_a_folder_without_samples_and_an_estimator_of_greedy_answers_are_refused(
    project: Project, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match="holds no training samples"):
        train_in(tmp_path / "run", project.config(f"trainer.skip_rollout='{tmp_path}'"))
    with pytest.raises(ConfigError, match="compares them with greedy answers, which are not recorded"):
        project.config(f"trainer.skip_rollout='{tmp_path}'", "algorithm.adv_estimator=remax")


def test_all_that_is_trained_on_is_recorded(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "run", config={}, command=["strop"]) as run:
        sequence = {
            "prompt_ids": [1, 2], "response_ids": [3, 4], "response_mask": [True, False],
            "rollout_log_probs": [-0.5, 0.0], "versions": [2, -1], "stop_reason": "stop",
        }  # fmt: skip
        run.samples.write(
            3,
            [
                {
                    "id": "e0-000007/0", "uid": "e0-000007", "sample_index": 0, **sequence, "turn_rewards": [[0, 0.25]],
                    "stands_alone": True, "num_turns": 4, "outcome": "timeout", "error": "late", "response": "text",
                    "earlier_sequences": [{**sequence, "turn_rewards": [[0, 1.5]]}],
                },
                {"id": "e0-000007/1", "uid": "e0-000007", "sample_index": 1, "prompt_ids": [1, 2], "error": "broke"},
            ],
        )  # fmt: skip
    reward = RewardConfig(failed_score=-1.0, on_failure=OnFailureConfig(timeout="fixed"))
    recording = open_recording(tmp_path / "run", reward)
    prompt = Prompt(uid="e0-000007", row=7, token_ids=(1, 2), messages=(), data_source="x", ground_truth="")
    episode = recording.episode(prompt, 0)
    assert episode.trajectory is not None
    assert episode.trajectory.turn_rewards == ((0, 0.25),)
    assert (episode.trajectory.stands_alone, episode.trajectory.num_turns) == (True, 4)
    assert (episode.trajectory.sampled, episode.trajectory.versions) == ((True, False), (2, -1))
    assert [one.turn_rewards for one in episode.earlier] == [((0, 1.5),)]
    assert episode.outcome is not None
    assert (episode.outcome.kind, episode.outcome.fallback_score, episode.text) == ("timeout", -1.0, "text")
    assert recording.episode(prompt, 1).failure == "broke"


SEQUENCE = {
    "prompt_ids": [1, 2], "response_ids": [3, 4], "response_mask": [True, True], "rollout_log_probs": [-0.5, -0.5],
    "versions": [2, 2], "stop_reason": "stop", "num_turns": 2, "outcome": "score", "score": 1.0,
}  # fmt: skip


def recorded(folder: Path, *rows: dict[str, object]) -> Recording:
    with RunFolder.create(folder, config={}, command=["strop"]) as run:
        run.samples.write(
            1,
            [
                {"id": f"e0-000007/{number}", "uid": "e0-000007", "sample_index": number, **row}
                for number, row in enumerate(rows)
            ],
        )
    return open_recording(folder, RewardConfig())


def prompt_of(*token_ids: int, agent: str = "single_turn_agent") -> Prompt:
    return Prompt(
        uid="e0-000007",
        row=7,
        token_ids=token_ids,
        messages=(),
        data_source="x",
        ground_truth="",
        agent_name=agent,
    )


def test_what_an_environment_showed_first_is_no_other_prompt(tmp_path: Path) -> None:
    seen = {**SEQUENCE, "prompt_ids": [1, 8, 9]}
    recording = recorded(tmp_path / "run", {**seen, "row_prompt_ids": [1]}, seen)
    episode = recording.read_episode(prompt_of(1, agent="env_agent"), 0)
    assert episode.trajectory is not None
    assert episode.trajectory.prompt_ids == (1, 8, 9)
    assert (
        recording.read_episode(prompt_of(1, agent="env_agent"), 1).trajectory is not None
    )  # as older versions wrote it
    for index in (0, 1):
        with pytest.raises(RunError, match="it was recorded with another tokenizer"):
            recording.read_episode(prompt_of(2), index)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({**SEQUENCE, "score": None}, "damaged: TypeError: float"),
        ({**SEQUENCE, "versions": [2]}, "damaged: ValueError: "),
        ({**SEQUENCE, "prompt_ids": [5]}, "it was recorded with another tokenizer"),
    ],
)
def test_a_recorded_sample_that_cannot_be_used_has_failed(
    tmp_path: Path, row: dict[str, object], sentence: str
) -> None:
    recording = recorded(tmp_path / "run", row, SEQUENCE)
    failed = recording.episode(prompt_of(1, 2), 0)
    assert failed.trajectory is None
    assert sentence in str(failed.failure)
    assert recording.episode(prompt_of(1, 2), 1).failure == ""
    assert "has no sample e0-000007/2" in str(recording.episode(prompt_of(1, 2), 2).failure)


def test_a_recorded_sample_without_a_needed_part_could_not_be_scored(tmp_path: Path) -> None:
    rows = [{**SEQUENCE, "reward_parts": parts} for parts in ({"style": 0.5}, {})]
    recording = recorded(tmp_path / "run", *rows)
    scorers: Any = SimpleNamespace(config=RewardConfig())
    client: Any = None
    player = EpisodeRunner(client, None, scorers, seed=0, recording=recording, reward_keys=["style"])

    def outcome(index: int) -> Outcome | None:
        return asyncio.run(player.run_episode(prompt_of(1, 2), index, Sampling(key=0, max_tokens=4))).outcome

    good, lacking = outcome(0), outcome(1)
    assert good is not None
    assert (good.kind, good.score) == ("score", 1.0)
    assert lacking is not None
    assert (lacking.kind, lacking.score) == ("error", None)
    assert "algorithm.reward_keys names 'style'" in lacking.error


def test_a_judge_that_was_too_slow_is_no_function_now(tmp_path: Path) -> None:
    slow = {**SEQUENCE, "score": None, "outcome": "timeout", "error": "the judge did not answer in 60 s"}
    outcome = recorded(tmp_path / "run", slow).episode(prompt_of(1, 2), 0).outcome
    assert outcome is not None
    assert summarize([outcome], timeout_s=1.0) == "reward: 0 ok, 1 timeout (the judge did not answer in 60 s)"
    assert "another (trainer.skip_rollout)" in remedies([outcome], repair="mend it")
