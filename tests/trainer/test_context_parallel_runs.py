"""Runs whose sequences lie on two ranks that exchange keys and values: those of one process, with a critic."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import Project, train_in

EXACT = ("model.dtype=float64", "resources.num_threads=1", "algorithm.adv_estimator=gae")
ON_TWO = (
    "resources.runtime=ray", "resources.ranks=2", "resources.cpus_per_rank=0.5",
    "actor.engine.context_parallel=2", "critic.engine.context_parallel=2",
)  # fmt: skip
COMPARED = ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "actor/entropy")


@pytest.mark.dist
def test_a_run_on_two_ranks_is_the_run_of_one_process(project: Project, tmp_path: Path) -> None:
    """The second step samples with what the first has taught."""
    settings = (*EXACT, "trainer.max_steps=2")
    alone = train_in(tmp_path / "alone", project.config(*settings))
    on_two = train_in(tmp_path / "on_two", project.config(*settings, *ON_TWO))
    assert len(alone.steps) == len(on_two.steps) == 2
    for ours, expected in zip(on_two.steps, alone.steps, strict=True):
        assert [ours[name] for name in COMPARED] == pytest.approx(
            [expected[name] for name in COMPARED], abs=1e-9, rel=1e-9
        )
