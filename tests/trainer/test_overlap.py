"""Columns that are made while other samples are generated."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from test_ahead_runs import AHEAD, FEW, trained
from test_ray_runs import RAY, cut_after
from tiny_runs import Done, Project, check_records, resume_in, train_in

from strop.controller import as_list
from strop.trainer.async_rollout.overlap import GroupColumns
from strop.trainer.rollout_batch import Experience
from strop.trainer.timing import Stages

OVERLAP = ["rollout.overlap_log_probs=true"]
SYNCHRONOUS = ["algorithm.correction.weights=token", "trainer.max_steps=2", "data.val_files=[]"]
VIRTUAL = [*AHEAD, *FEW, "trainer.clock=virtual", "run.save_every=1", "run.keep_last=9", "data.val_files=[]"]
PPO = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "actor.samples_per_update=8"]


def columns_of(done: Done, step: int) -> dict[str, torch.Tensor]:
    batch = done.records[step - 1].batch
    assert batch is not None
    return {
        name: column.to_padded_tensor(0.0) if column.is_nested else column
        for name, column in batch.tensors().items()
        if column.is_floating_point()
    }


@pytest.mark.parametrize(
    "settings", [pytest.param([], marks=pytest.mark.slow), [*PPO, "algorithm.correction.weights=none"]]
)
def test_the_columns_are_those_that_are_made_at_once(
    project: Project, tmp_path: Path, settings: list[str]
) -> None:
    plain = train_in(tmp_path / "plain", project.config(*SYNCHRONOUS, *settings))
    early = train_in(tmp_path / "early", project.config(*SYNCHRONOUS, *settings, *OVERLAP))
    check_records(early.folder, num_steps=2)
    expected, found = columns_of(plain, 1), columns_of(early, 1)
    assert {"old_log_probs", "advantages"} <= expected.keys() == found.keys()
    assert ("values" in found) == bool(settings)
    for name, column in expected.items():
        torch.testing.assert_close(found[name], column, rtol=1e-4, atol=1e-5, msg=name)
    for one, two in zip(plain.steps, early.steps, strict=True):
        assert two["actor/loss"] == pytest.approx(one["actor/loss"], rel=1e-3, abs=1e-5)


def test_they_are_made_of_a_group_before_the_others_have_ended(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    playing: dict[str, int] = {}
    make = GroupColumns._make

    def spied(self: GroupColumns, groups: Mapping[str, Experience], stages: Stages) -> None:
        [(notes, ended)] = as_list(self._roles.rollout.call.kept())
        playing.update(dict.fromkeys(groups, len(notes.keys() - {*playing, *groups, *ended})))
        make(self, groups, stages)

    monkeypatch.setattr(GroupColumns, "_make", spied)
    settings = [*SYNCHRONOUS, *FEW, *OVERLAP, "trainer.clock=virtual", "trainer.max_steps=1"]
    done = train_in(tmp_path / "run", project.config(*settings))
    assert len(playing) == 4
    assert max(playing.values()) > 0, "others were in play"
    assert done.steps[0]["timing_s/old_log_prob"] > 0
    assert done.steps[0]["fully_async/trainer/idle_ratio"] < 1


@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_interrupted_run_is_the_one_that_was_not(project: Project, tmp_path: Path, step: int) -> None:
    settings = [*VIRTUAL, *OVERLAP, "algorithm.use_kl_loss=true"]
    whole = train_in(tmp_path / "whole", project.config(*settings))
    rest = resume_in(cut_after(whole.folder, tmp_path / "cut", step=step))
    assert [print_.chain for print_ in rest.chain] == [print_.chain for print_ in whole.chain]
    assert set(trained(rest.folder).values()) == {1}


def test_with_a_group_filter_what_is_left_out_is_not_looked_at(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    make = GroupColumns._make

    def counted(self: GroupColumns, groups: Mapping[str, Experience], stages: Stages) -> None:
        made.extend(groups)
        make(self, groups, stages)

    monkeypatch.setattr(GroupColumns, "_make", counted)
    filtered = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"]
    done = train_in(
        tmp_path / "run", project.config(*SYNCHRONOUS, *OVERLAP, *filtered, "rollout.samples_per_prompt=2")
    )
    left_out = {uid for record in done.records for uid in record.dropped}
    assert left_out, "some were"
    assert not left_out & set(made)
    assert len(made) == 8


def test_a_stage_inside_another_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr("strop.trainer.timing.time.perf_counter", lambda: float(next(now)))
    stages = Stages()  # 0
    with stages.stage("gen"):  # 1
        with stages.stage("old_log_prob"):  # 2 to 3
            pass
        with stages.stage("ref"):  # 4 to 5
            pass
    assert stages.seconds == {"old_log_prob": 1.0, "ref": 1.0, "gen": 3.0}  # until 6
    assert stages.current == ""


@pytest.mark.dist
@pytest.mark.parametrize(
    "placed",
    [
        ["resources.ranks=2"],
        ["resources.apart={rollout: 1}"],
        ["resources.apart={rollout: 2}", "resources.cpus_per_rank=0.5"],
    ],
)
def test_several_processes_do_the_same(project: Project, tmp_path: Path, placed: list[str]) -> None:
    done = train_in(tmp_path / "run", project.config(*AHEAD, *FEW, *OVERLAP, *RAY, *placed))
    check_records(done.folder, num_steps=5)
    assert [len(record.reports) for record in done.records] == [16] * 5
    assert set(trained(done.folder).values()) == {1}
