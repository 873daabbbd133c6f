"""More processes than a machine has cores for are refused before a run begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from strop.config import load_config
from strop.controller.ray import cluster
from strop.trainer.checks.devices import check_cores
from strop.trainer.config import Config
from strop.trainer.start import start_run

ON_RAY = ("model.path=m", "resources.device=cpu", "resources.runtime=ray")


def test_too_many_processes_are_refused_before_the_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        cluster, "private_cores", lambda: 4
    )  # unknown where another test has connected to Ray
    config = load_config(Config, overrides=[*ON_RAY, "resources.ranks=999", "resources.apart={rollout: 1}"])
    sentence = (
        r"^1000 processes \(resources.ranks and resources.apart\) with resources.cpus_per_rank=1 need 1000 CPU cores, "
        r"and this machine has \d+: lower resources.ranks or resources.apart, lower resources.cpus_per_rank"
    )
    with pytest.raises(ValueError, match=sentence):
        start_run(tmp_path / "run", config, command=["strop", "train"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (["resources.ranks=4", "resources.apart={rollout: 1}"], True),
        (["resources.ranks=4"], False),
        (["resources.ranks=10", "resources.cpus_per_rank=0.4"], False),
        (["resources.ranks=64", "resources.address=10.0.0.1:6379"], False),  # a cluster says what it has
        (["resources.ranks=64", "resources.nodes=2", "resources.min_nodes=1"], False),  # fewer will do
    ],
)
def test_only_the_cores_of_this_machine_are_known(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], is_refused: bool
) -> None:
    monkeypatch.setattr(cluster, "private_cores", lambda: 4)
    resources = load_config(Config, overrides=[*ON_RAY, *overrides]).resources
    if is_refused:
        with pytest.raises(ValueError, match="5 processes .* need 5 CPU cores, and this machine has 4"):
            check_cores(resources)
    else:
        check_cores(resources)


def test_a_process_that_is_connected_leaves_it_to_its_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    check_cores(load_config(Config, overrides=[*ON_RAY, "resources.ranks=1000"]).resources)
