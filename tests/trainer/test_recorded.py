"""Training on recorded samples, trainer.skip_rollout: the same run again, other losses on equal data, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import Done, Project, train_in

from strop.config import ConfigError
from strop.replay.samples import open_recording
from strop.rewards.config import OnFailureConfig, RewardConfig
from strop.run import RunError, RunFolder
from strop.trajectory import Prompt

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
    monkeypatch.setattr("strop.trainer.loop.make_roles", never)
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
    assert (episode.outcome.kind, episode.outcome.stand_in, episode.text) == ("timeout", -1.0, "text")
    assert recording.episode(prompt, 1).failure == "broke"
