"""PRIME in whole runs: a process reward model learns beside the policy, on any ranks and after a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_ray_runs import cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.config.errors import ConfigError
from strop.protocol import columns

SHORT = [
    "algorithm.adv_estimator=prime", "trainer.max_steps=2", "data.val_files=[]", "prm.optim.lr=1e-3", "prm.beta=0.5",
    "prm.samples_per_update=8",
]  # fmt: skip


def process_rewards(done: Done, step: int) -> torch.Tensor:
    batch = done.records[step - 1].fetched
    assert batch is not None
    return columns.flat(batch.tensors()["process_rewards"])


def test_a_step_is_rewarded_by_the_model_that_learned_from_it(project: Project, tmp_path: Path) -> None:
    done = train_in(tmp_path / "run", project.config(*SHORT, "run.save_every=1", "run.keep_last=9"))
    check_records(done.folder, num_steps=2)
    for numbers in done.steps:
        assert numbers["prm/grad_norm"] > 0
        assert numbers["timing_s/update_prm"] > 0
    assert done.steps[0]["prm/lr"] == 1e-3
    assert process_rewards(done, 1).abs().max() > 0
    assert done.steps[0]["prm/reward/max"] >= done.steps[0]["prm/reward/mean"]
    weights = [one.stages["prm_weights"] for one in done.chain]
    assert len({*weights, done.chain[0].stages["weights"]}) == 3
    again = resume_in(cut_after(done.folder, tmp_path / "cut", step=1))
    assert [one.chain for one in again.chain] == [one.chain for one in done.chain]


def test_the_update_may_come_after_the_rewards(project: Project, tmp_path: Path) -> None:
    done = train_in(
        tmp_path / "run", project.config(*SHORT, "prm.update=after", "prm.samples_per_update=all")
    )
    assert process_rewards(done, 1).abs().max() < 1e-4, "it is still what it began as"
    assert process_rewards(done, 2).abs().max() > 1e-3
    assert done.steps[0]["prm/loss"] == pytest.approx(0.6931, abs=1e-3)  # ln 2: it knows nothing
    assert done.steps[0]["prm/acc"] == 0.5


def test_settings_of_a_model_that_nobody_asks_for_are_refused(project: Project) -> None:
    with pytest.raises(ConfigError, match=r"a setting of prm is given, but .*=grpo uses no process rewards"):
        project.config("prm.beta=0.1")
    with pytest.raises(ConfigError, match=r"resources.apart names prm, but this run has no such role"):
        project.config("resources.runtime=ray", "resources.apart={prm: 1}")


@pytest.mark.dist
def test_two_ranks_learn_what_one_learns(project: Project, tmp_path: Path) -> None:
    settings = [*SHORT, "model.dtype=float64"]
    one = train_in(tmp_path / "one", project.config(*settings))
    ranks = ["resources.runtime=ray", "resources.ranks=2", "resources.cpus_per_rank=0.25"]
    two = train_in(tmp_path / "two", project.config(*settings, *ranks))
    apart = [*ranks[:1], *ranks[2:], "resources.apart={prm: 2}"]
    other = train_in(tmp_path / "apart", project.config(*settings, *apart))
    for done in (two, other):
        for step in (1, 2):
            torch.testing.assert_close(
                process_rewards(done, step), process_rewards(one, step), rtol=0, atol=1e-6
            )
            for name in ("prm/loss", "prm/grad_norm", "prm/acc", "prm/score_mean", "prm/reward/mean"):
                assert done.steps[step - 1][name] == pytest.approx(one.steps[step - 1][name], abs=1e-6), name
        check_records(done.folder, num_steps=2)
