"""A model and a task small enough for tests, made once.

What is heavy is imported where it is used: the process that hands out tests to others reads this file first, and they
wait for it.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    from strop.cli.quickstart.task import TaskFiles

gc.disable()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs behind it so, and a command that a test interrupts would inherit it and never end.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """The processes of xdist compile the test files together, before each imports all of them."""
    if worker := getattr(config, "workerinput", None):
        from compiled_once import compile_share

        files = sorted(Path(__file__).parent.rglob("test_*.py"))
        compile_share(files, int(worker["workerid"].removeprefix("gw")), worker["workercount"])


def pytest_collection_finish() -> None:
    """What has been imported by now stays: looking for garbage in it was a seventh of the time of collecting tests."""
    from strop.utils import gc_freeze

    gc.freeze()
    gc_freeze._is_frozen = True  # each run would count a million frozen objects to find it out
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file has imported stays too: a look at all of it would cost a file of short tests more than they do. Last,
    so that what its fixtures made is gone by then."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With --dist loadfile, files that share a cluster or processes run in one worker, one after the other, and others
    by themselves."""
    if config.getvalue("dist") != "loadfile":
        return None
    from shared_starts import ByWhatIsShared

    return ByWhatIsShared(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked gpu are skipped where there is none, so that `make test-gpu` runs everywhere."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device on this machine")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where strop remembers which runs are the user's own (strop.trainer.untrusted_runs.own): a folder of the tests."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3 model of 14 thousand weights. Do not write into it."""
    from strop.data.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(
        folder,
        seed=0,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=48,
        max_position_embeddings=64,
    )
    return folder


@pytest.fixture(scope="session")
def tiny_task(tmp_path_factory: pytest.TempPathFactory) -> TaskFiles:
    """Words of three letters to write backwards: 24 rows for RL, 16 held out, 24 solved."""
    from strop.cli.quickstart.task import write_task

    folder = tmp_path_factory.mktemp("task")
    return write_task(folder, seed=0, num_train=24, num_val=16, num_sft=24, min_letters=3, max_letters=3)


@pytest.fixture
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference models whose norms compute in the precision of their input, as the engine's do in float64.

    Those of transformers compute in float32 whatever the model has, which rounds a difference of 1e-16 between
    two layouts of the same tokens up to one of 1e-8.
    """
    import torch
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def forward(self: Qwen3RMSNorm, hidden: torch.Tensor) -> torch.Tensor:
        variance = hidden.square().mean(-1, keepdim=True)
        return self.weight * hidden * torch.rsqrt(variance + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)
