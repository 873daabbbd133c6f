"""Whole runs that learn from a teacher: alone or beside the rewards, resumed, on Ray, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from learning_task import LearningTask
from test_ray_runs import RAY, cut_after
from tiny_runs import Project, check_records, resume_in, train_in

from strop.config import ConfigError, load_config
from strop.controller import Mesh
from strop.data.tiny_model import make_tiny_model
from strop.run import RunFolder
from strop.trainer.checks.models import check_models
from strop.trainer.config import Config
from strop.trainer.role_specs import role_specs
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run
from strop.trainer.worker_groups import rollout_settings

CONSTANT = '''\
"""A reward that tells nothing apart, and the truth beside it."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.0, "acc": solution_str.strip() == ground_truth}
'''


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of another model with the same tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    make_tiny_model(
        folder, seed=7, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    return folder


def taught(teacher: Path, kind: str, *more: str) -> list[str]:
    return [
        "data.val_files=[]",
        f"teacher.path='{teacher}'",
        f"algorithm.distillation.kind={kind}",
        *more,
    ]


def constant_reward(folder: Path) -> str:
    (folder / "constant.py").write_text(CONSTANT)
    return f"reward.path='{folder / 'constant.py'}'"


@pytest.mark.slow
def test_the_teacher_teaches_where_every_reward_is_the_same(
    project: Project, teacher: Path, tmp_path: Path
) -> None:
    settings = [
        *taught(teacher, "forward_kl", "algorithm.policy_coef=0", "algorithm.distillation.with_tail=true"),
        constant_reward(tmp_path),
        "trainer.preflight=true",
        "trainer.max_steps=6",
        "actor.optim.lr=4e-3",
        "actor.samples_per_update=8",
    ]
    done = train_in(tmp_path / "run", project.config(*settings))
    check_records(done.folder, num_steps=6)
    assert any("the teacher teaches on every sample" in line for line in done.said)
    assert not any("no learning signal" in line for line in done.said)
    losses = [numbers["distillation/loss"] for numbers in done.steps]
    assert losses[-1] < 0.5 * losses[0]
    assert all(numbers["distillation/loss_min"] >= 0 for numbers in done.steps), "a divergence"
    assert all(numbers["actor/loss"] == numbers["distillation/loss"] for numbers in done.steps)
    assert {numbers["critic/advantages/max"] for numbers in done.steps} == {0.0}
    with RunFolder.open(done.folder, read_only=True) as run:
        assert run.ledger.counts()["trained"] == 6 * 16


@pytest.mark.slow
def test_a_resumed_distillation_is_the_one_that_was_not_interrupted(
    project: Project, teacher: Path, tmp_path: Path
) -> None:
    config = project.config(
        *taught(teacher, "reverse_kl", "algorithm.distillation.coef=0.1"),
        "trainer.max_steps=3",
        "run.save_every=1",
        "run.keep_last=9",
    )
    whole = train_in(tmp_path / "whole", config)
    check_records(whole.folder, num_steps=3)
    for numbers in whole.steps:
        assert numbers["actor/loss"] == pytest.approx(
            numbers["actor/pg_loss"] + 0.1 * numbers["distillation/loss"], abs=1e-6
        )
    again = resume_in(cut_after(whole.folder, tmp_path / "cut", step=2))
    assert [one.chain for one in again.chain] == [one.chain for one in whole.chain]


def test_a_run_that_starts_at_its_teacher_has_nothing_to_learn_from_it(
    project: Project, tmp_path: Path
) -> None:
    preset = load_config(
        Config,
        overrides=[
            *project.settings(), "algorithm=on_policy_distillation", f"teacher.path='{project.model}'",
            "data.val_files=[]", "trainer.max_steps=1", "rollout.samples_per_prompt=1",
        ],
    )  # fmt: skip
    done = train_in(tmp_path / "run", preset)
    assert abs(done.steps[0]["distillation/loss"]) < 1e-6
    assert done.steps[0]["actor/grad_norm"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_distillation_on_ray_is_the_one_in_this_process(
    project: Project, teacher: Path, tmp_path: Path, kind: str
) -> None:
    settings = taught(teacher, kind, "trainer.max_steps=2")
    here = train_in(tmp_path / "here", project.config(*settings))
    there = train_in(
        tmp_path / "there",
        project.config(*settings, *RAY, "resources.apart={teacher: 1}", "resources.offload_idle=true"),
    )
    assert [one.chain for one in there.chain] == [one.chain for one in here.chain]


@pytest.mark.slow
def test_a_teacher_on_two_ranks_teaches_the_same(project: Project, teacher: Path, tmp_path: Path) -> None:
    settings = taught(
        teacher, "forward_kl", "trainer.max_steps=2", "model.dtype=float64", "teacher.dtype=float64"
    )
    one = train_in(tmp_path / "one", project.config(*settings))
    two = train_in(tmp_path / "two", project.config(*settings, *RAY, "resources.ranks=2"))
    for ours, theirs in zip(two.steps, one.steps, strict=True):
        for name in ("distillation/loss", "distillation/overlap_ratio", "actor/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl"])
def test_a_student_learns_the_task_from_a_teacher_that_solves_it(tmp_path: Path, kind: str) -> None:
    """The rewards are all 0; the teacher was shown the task for five times as long as the student."""
    task = LearningTask(tmp_path)
    start = start_run(
        tmp_path / "longer",
        task.config(tmp_path / "model", "sft.max_steps=300", "sft.num_epochs=20"),
        command=["strop", "sft"],
    )
    with start.run:
        solver = fine_tune(start.config, start.run, say=lambda line: None)
    config = task.config(
        None, "algorithm=on_policy_distillation", f"algorithm.distillation.kind={kind}",
        f"teacher.path='{solver.model}'", constant_reward(tmp_path), "rollout.samples_per_prompt=4",
    )  # fmt: skip
    done = train_in(tmp_path / "run", config)
    before, after = done.result.pass_rate_start, done.result.pass_rate_final
    assert before is not None
    assert after is not None
    assert after >= before + 0.2, (before, after)
    losses = [abs(numbers["distillation/loss"]) for numbers in done.steps]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


# --------------------------------------------------------------------------------------- configuration


def config(*overrides: str) -> Config:
    return load_config(Config, overrides=["model.path=somewhere", *overrides])


ON = ("algorithm.distillation.kind=reverse_kl", "teacher.path=there")


def test_a_teacher_is_a_role_with_a_place_of_its_own_choice() -> None:
    apart = ("resources.runtime=ray", "resources.apart={teacher: 4}", "teacher.engine.sequence_parallel=2")
    settings = config(*ON, *apart)
    specs = role_specs(settings, rollout_settings(settings), num_steps=1)
    assert list(specs) == ["actor", "teacher", "rollout"]
    assert specs["teacher"].mesh == Mesh(dp=2, sp=2)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["teacher.path=x"], "teacher.path is 'x', but algorithm.distillation.kind=none learns from nobody"),
        (["teacher.dtype=float32"], "a setting of teacher is given, but algorithm.distillation.kind=none"),
        (["algorithm.distillation.kind=forward_kl"], "kind is forward_kl, but teacher.path is empty"),
        (["algorithm=on_policy_distillation"], "kind is reverse_kl, but teacher.path is empty"),
        ([*ON, "algorithm.policy_coef=0", "algorithm.adv_estimator=gae"], "would train a critic for it"),
        ([*ON, "algorithm.policy_coef=0", "algorithm.use_kl_in_reward=true"], "use_kl_in_reward is set, but"),
        ([*ON, "algorithm.policy_coef=0", "algorithm.correction.weights=token"], "correction.weights is set"),
        (
            [*ON, "algorithm.policy_coef=0", "algorithm.filter_groups.enable=true", "trainer.max_steps=1"],
            "filter_groups.enable is set",
        ),
        ([*ON, "teacher.dtype=float8"], "teacher.dtype"),
        ([*ON, "teacher.engine.max_tokens_per_device=10"], "teacher.engine.max_tokens_per_device is 10"),
        (
            [*ON, "resources.runtime=ray", "resources.ranks=3", "teacher.engine.sequence_parallel=2"],
            "teacher.engine.sequence_parallel is 2, which does not divide the 3 ranks",
        ),
        (
            ["resources.runtime=ray", "resources.apart={teacher: 1}"],
            "names teacher, but this run has no such",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    assert sentence in str(caught.value)


def test_a_folder_that_is_no_teacher_is_refused_before_any_process_starts(
    project: Project, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^teacher.path: model.path .* is not a folder"):
        check_models(project.config(*taught(tmp_path / "nobody", "reverse_kl")))
