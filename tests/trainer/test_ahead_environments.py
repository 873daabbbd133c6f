"""Episodes of several answers in an environment, interrupted half-way in a run ahead of training."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_ahead_runs import AHEAD, FEW, trained
from test_ray_runs import cut_after
from tiny_runs import Project, check_records, resume_in, train_in

from strop.run import RunFolder
from strop.run.samples import SampleStore
from strop.trainer.config import Config
from strop.workers.async_rollout.in_play import IN_PLAY, GroupState, read_in_play

WORLD = """
import os


class Echo:
    def reset(self, seed, row):
        self.seen = ""
        return "say something"

    def step(self, action):
        self.seen += action[:1]
        told = {told}
        return told, len(set(self.seen)) / 10, len(self.seen) > 3 or not action, {{"acc": bool(action)}}
"""


EXACT = ("data", "prompt_tokens", "sampled_tokens", "rewards", "advantages")
"""Stages without log-probs, and what follows from them."""


def config_of(project: Project, folder: Path, told: str) -> Config:
    (folder / "world.py").write_text(WORLD.format(told=told))
    return project.config(
        *AHEAD, *FEW, "run.save_every=1", "run.keep_last=9", "trainer.max_steps=3",
        "data.val_files=[]", "data.max_response_tokens=48", "agent.default_agent=env_agent", "reward.path=",
        f"agent.environment.name='{folder / 'world.py'}:Echo'",
        f"rollout.stop_token_ids={list(range(20, 50))}",  # a random model hardly ever ends its answer
    )  # fmt: skip


def log_probs(folder: Path) -> dict[tuple[int, str], list[float]]:
    """Of the sampled tokens of each step's samples, as they were generated."""
    return {
        (step, row["id"]): row["rollout_log_probs"]
        for step in (1, 2, 3)
        for row in SampleStore(folder / "samples").read(step=step)
    }


def half_finished(in_play: dict[str, GroupState]) -> list[str]:
    """Requests behind the first of an episode, of groups that have not ended."""
    return [
        request
        for one in in_play.values()
        if one.place is None
        for request in one.kept.requests
        if request.rpartition("#")[2] not in ("", "0")
    ]


@pytest.mark.usefixtures("engine_clock")
@pytest.mark.parametrize("is_repeatable", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_half_finished_episodes_go_on_or_are_played_afresh_and_the_log_says_so(
    project: Project, tmp_path: Path, is_repeatable: bool
) -> None:
    told = "self.seen" if is_repeatable else "self.seen + os.urandom(2).hex()"
    whole = train_in(tmp_path / "whole", config_of(project, tmp_path, told))
    folder = cut_after(whole.folder, tmp_path / "cut", step=1)
    kept = read_in_play(folder / "checkpoints" / "global_step_1" / IN_PLAY)
    assert half_finished(kept), "the checkpoint holds episodes that had answered more than once"
    rest = resume_in(folder)
    check_records(folder, num_steps=3)
    assert set(trained(folder).values()) == {1}
    assert trained(folder).keys() == trained(whole.folder).keys()
    with RunFolder.open(folder, read_only=True) as run:
        differing = [event["request"] for event in run.events.read("differing_request")]
    if is_repeatable:
        assert not differing
        # What was decoded token by token is computed at once after the interruption, which rounds otherwise.
        assert [[one.stages[stage] for stage in EXACT] for one in rest.chain] == [
            [one.stages[stage] for stage in EXACT] for one in whole.chain
        ]
        assert [one.chain for one in rest.chain[:1]] == [one.chain for one in whole.chain[:1]]
        found, wanted = log_probs(folder), log_probs(whole.folder)
        assert found.keys() == wanted.keys()
        for sample, expected in wanted.items():
            assert found[sample] == pytest.approx(expected, abs=1e-5), sample
    else:
        assert differing
        assert {name.partition("/")[0] for name in differing} <= {uid.partition("/")[0] for uid in kept}
