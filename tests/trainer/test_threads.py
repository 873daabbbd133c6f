"""Who decides the number of threads, and that a run keeps it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from strop.engines.config import ModelConfig
from strop.run import RunFolder
from strop.trainer.sections import ResourcesConfig
from strop.trainer.threads import fewest, measure, set_threads, set_threads_of_run
from strop.utils.machine_limits import usable_cores

AUTO, MODEL = ResourcesConfig(device="cpu"), ModelConfig(path="nowhere")


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder.create(tmp_path / "run", config={}, command=["strop", "train"]) as folder:
        yield folder


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({1: 1.0, 2: 0.5}, 2),  # twice as fast: worth it
        ({1: 1.0, 2: 0.9}, 1),  # a tenth: the first program beside it would take that away, and more
        ({1: 1.0, 2: 3.0}, 1),  # a core is busy
        ({1: 4.0, 8: 1.1, 16: 1.0}, 8),
    ],
)
def test_the_fewest_threads_that_are_not_much_slower_are_taken(
    seconds: dict[int, float], expected: int
) -> None:
    assert fewest(seconds) == expected


def test_a_measurement_leaves_the_number_as_it_was() -> None:
    torch.set_num_threads(3)
    took = measure([1, 2], 16, 32)
    assert list(took) == [1, 2]
    assert all(0 < seconds < 1 for seconds in took.values())
    assert torch.get_num_threads() == 3


def test_settings_come_before_the_variable_and_the_variable_before_a_measurement(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")
    assert set_threads(AUTO, MODEL).line() == "threads: 3 (OMP_NUM_THREADS)"
    assert torch.get_num_threads() == 3
    chosen = set_threads(ResourcesConfig(device="cpu", num_threads=2), MODEL)
    assert (chosen.line(), torch.get_num_threads()) == ("threads: 2 (resources.num_threads)", 2)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    (tmp_path / "config.json").write_text('{"text_config": {"hidden_size": 8, "intermediate_size": 16}}')
    measured = set_threads(AUTO, ModelConfig(path=str(tmp_path)))
    assert 1 <= measured.count == torch.get_num_threads() <= usable_cores()
    assert measured.why == "all cores" or measured.why.startswith("a pass of the model's sizes took ")


def test_a_run_goes_on_with_the_number_that_it_began_with(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = usable_cores()
    monkeypatch.setenv("OMP_NUM_THREADS", str(kept))
    assert set_threads_of_run(AUTO, MODEL, run, step=0).count == kept
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert set_threads_of_run(AUTO, MODEL, run, step=4).line() == f"threads: {kept} (as this run began)"
    assert torch.get_num_threads() == kept
    (event,) = run.events.read("threads")
    assert (event["count"], event["why"], event["step"]) == (kept, "OMP_NUM_THREADS", 0)
    # A setting wins, and stands in the settings.
    own = ResourcesConfig(device="cpu", num_threads=5)
    assert set_threads_of_run(own, MODEL, run, step=4).count == 5
    assert len(run.events.read("threads")) == 1


def test_a_run_that_moves_to_fewer_cores_has_another_number_and_says_so(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", str(usable_cores() + 1))
    set_threads_of_run(AUTO, MODEL, run, step=0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert set_threads_of_run(AUTO, MODEL, run, step=6).line() == "threads: 1 (OMP_NUM_THREADS)"
    assert [(event["step"], event["count"]) for event in run.events.read("threads")] == [
        (0, usable_cores() + 1),
        (6, 1),
    ]


PROGRAM = """
import os
os.environ.pop("OMP_NUM_THREADS", None)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from strop.engines.config import ModelConfig
from strop.trainer.sections import ResourcesConfig
from strop.trainer.threads import set_threads
print(set_threads(ResourcesConfig(device="cpu"), ModelConfig(path="nowhere")).line())
"""


@pytest.mark.slow
def test_one_core_is_one_thread_without_a_measurement() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout == "threads: 1 (all cores)\n"
