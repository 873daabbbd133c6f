"""One side of benchmarks/quick.py: short pieces of fixed work, carried out on request in a process of its own.

    PYTHONPATH=TREE python benchmarks/workloads.py FOLDER

The strop of TREE is imported, and named where it lies (`strop`). Each line of stdin is the name of a workload; it is
answered with a line of JSON: `seconds` of processor time, of this process and its children, or the `error` of a tree
that does not have what the workload calls. The folder takes models and runs. What a workload needs of strop it imports
itself, so that a tree which lacks a module answers to the others.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from sizes import SMALL

import strop

if TYPE_CHECKING:
    from strop.controller import InlineWorkerGroup
    from strop.engines.tokens import Tokens
    from strop.engines.training import TrainEngine
    from strop.protocol import DataProto

STEPS = 4
"""Of the training run; the first one is not counted."""
DISPATCH_CALLS = 50
PACKS = 5
FAILURES = (
    AttributeError, ImportError, TypeError, ValueError, RuntimeError, OSError, subprocess.CalledProcessError,
)  # fmt: skip
"""Errors of a tree that does not have what a workload calls."""


def processor_s() -> float:
    """Processor time so far of this process and of its children, those that run and those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.NoSuchProcess:  # it has ended since it was listed
            continue
        total += times.user + times.system
    return total


class Workloads:
    """The work, by name; what it needs is made when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._generator = torch.Generator().manual_seed(0)
        self._numbers = itertools.count()
        self._work: dict[str, Callable[[], float | None]] = {
            "generation": self._generation,
            "log_probs": self._log_probs,
            "update": self._update,
            "packing": self._packing,
            "dispatch": self._dispatch,
            "start": self._start,
            "quickstart": self._quickstart,
        }

    def run(self, name: str) -> float:
        """Processor seconds of a workload."""
        if name not in self._work:
            raise ValueError(f"{name!r} is no workload; there are {', '.join(self._work)}")
        before = processor_s()
        seconds = self._work[name]()
        return processor_s() - before if seconds is None else seconds

    @functools.cached_property
    def _model(self) -> Any:
        from strop.data.tiny_model import make_tiny_model
        from strop.engines.config import ModelConfig
        from strop.engines.model import load_model

        make_tiny_model(self._folder / "model", seed=0, **SMALL)
        return load_model(ModelConfig(path=str(self._folder / "model"), dtype="float32"), device="cpu")

    @functools.cached_property
    def _engine(self) -> TrainEngine:
        from strop.engines.config import EngineConfig, OptimizerConfig
        from strop.engines.training import TrainEngine

        config = EngineConfig(max_tokens_per_device=2048)
        return TrainEngine(self._model, config, OptimizerConfig(lr=1e-6), total_steps=None)

    @functools.cached_property
    def _rows(self) -> DataProto:
        """2 groups of 8 answers of 8 to 40 tokens."""
        return self._groups(2, 8, num_prompt=48, fewest=8, most=40)

    @functools.cached_property
    def _tiny_rows(self) -> DataProto:
        """A step of the quickstart: 32 groups of 8 answers of at most 12 tokens."""
        return self._groups(32, 8, num_prompt=12, fewest=2, most=12)

    def _groups(self, num: int, size: int, *, num_prompt: int, fewest: int, most: int) -> DataProto:
        from strop.engines.packing import make_rows

        def ids(num_tokens: int) -> torch.Tensor:
            return torch.randint(7, 100, (num_tokens,), generator=self._generator)

        prompts = [prompt for prompt in (ids(num_prompt) for _ in range(num)) for _ in range(size)]
        lengths = torch.randint(fewest, most + 1, (num * size,), generator=self._generator).tolist()
        return make_rows(prompts, [ids(length) for length in lengths])

    def _generation(self) -> None:
        """16 answers of 32 tokens to 2 prompts by the native engine."""
        from strop.rollout.native.engine import NativeEngine
        from strop.rollout.types import Sampling
        from strop.utils.rng import random_key

        async def answers() -> None:
            engine = NativeEngine(self._model, max_running=256)
            prompts = [[7 + (place * 5 + row) % 90 for place in range(48)] for row in range(2)]
            await asyncio.gather(
                *(
                    engine.generate(
                        f"{i}", prompts[i % 2], Sampling(key=random_key(0, "quick", i), max_tokens=32)
                    )
                    for i in range(16)
                )
            )

        asyncio.run(answers())

    def _log_probs(self) -> None:
        """A pass without gradients."""

        def columns(tokens: Tokens) -> dict[str, torch.Tensor]:
            log_probs, entropies = tokens.log_probs(temperature=1.0)
            return {"log_probs": log_probs, "entropies": entropies}

        self._engine.map_tokens(self._rows, columns)

    def _update(self) -> None:
        """Gradient of a policy loss, and an optimizer step."""

        def loss(tokens: Tokens) -> torch.Tensor:
            log_probs, _ = tokens.log_probs(temperature=1.0)
            return torch.exp(log_probs - log_probs.detach()).sum() / 1000

        self._engine.accumulate(self._rows, loss)
        self._engine.step()

    def _packing(self) -> None:
        """Tiny rows cut into micro-batches and packed."""
        from strop.engines.micro_batch import pack
        from strop.engines.packing import micro_batches
        from strop.engines.parallel.ranks import alone

        parallel = alone(self._model.device)
        for _ in range(PACKS):
            for part in micro_batches(self._tiny_rows, max_tokens=4096, parallel=parallel):
                pack(self._tiny_rows, self._model, rows=part)

    @functools.cached_property
    def _group(self) -> InlineWorkerGroup[Any]:
        from strop.controller import Dispatch, InlineWorkerGroup, Mesh, Placement, Worker, placed, register

        class Echo(Worker):
            """Gives back what it gets."""

            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def echo(self, data: DataProto) -> DataProto:
                """The batch."""
                return data

        mesh = Mesh(dp=4)
        workers = []
        for rank in range(4):
            with placed(Placement(rank=rank, mesh=mesh, local_rank=rank, local_world_size=4)):
                workers.append(Echo())
        return InlineWorkerGroup(workers, mesh)

    @functools.cached_property
    def _batch(self) -> DataProto:
        from strop.protocol import DataProto, jagged

        rows = [torch.arange(100 + row % 50) for row in range(512)]
        names = [f"row {row}" for row in range(512)]
        return DataProto.from_dict({"tokens": jagged(rows)}, non_tensors={"uid": names})

    def _dispatch(self) -> None:
        """A batch cut for four workers of this process, and joined from what they give back."""
        for _ in range(DISPATCH_CALLS):
            assert len(self._group.call.echo(self._batch)) == len(self._batch)

    def _start(self) -> None:
        """`strop --help` and `import strop`."""
        for words in (("-m", "strop.cli.main", "--help"), ("-c", "import strop")):
            subprocess.run([sys.executable, *words], cwd=self._folder, capture_output=True, check=True)

    def _quickstart(self) -> float:
        """Steps of the quickstart's settings, with a model that has learned nothing."""
        from strop.cli.quickstart.task import write_task
        from strop.data.tiny_model import make_tiny_model
        from strop.trainer.loading import load
        from strop.trainer.loop import Trainer
        from strop.trainer.start import start_run

        taken: list[float] = []

        class TimedTrainer(Trainer):
            """Notes the processor time of every step."""

            def step(self, *args: Any, **kwargs: Any) -> Any:
                before = processor_s()
                record = super().step(*args, **kwargs)
                taken.append(processor_s() - before)
                return record

        folder = self._folder / "quickstart"
        if not folder.exists():
            make_tiny_model(folder / "model", seed=0)
            write_task(
                folder / "data", seed=0, num_train=256, num_val=8, num_sft=8, min_letters=4, max_letters=4
            )
        overrides = [
            f"model.path='{folder / 'model'}'", f"data.train_files=['{folder / 'data' / 'train.parquet'}']",
            f"trainer.max_steps={STEPS}", "trainer.preflight=false", "trainer.trackers=[jsonl]", "eval.every=0",
            "run.save_every=0", "reward.num_workers=1", "resources.num_threads=1", "resources.device=cpu",
        ]  # fmt: skip
        start = start_run(
            folder / f"run-{next(self._numbers)}", load("quickstart", overrides=overrides), command=["quick"]
        )
        with start.run as run:
            TimedTrainer(start.config, run, checkpoint=None, say=lambda line: None).fit()
        return sum(taken[1:])


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what strop prints is no answer
    torch.set_num_threads(1)
    print(json.dumps({"strop": str(Path(strop.__file__).parent)}), file=answers)
    with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
        workloads = Workloads(Path(folder))
        for line in sys.stdin:
            try:
                answer: dict[str, Any] = {"seconds": workloads.run(line.strip())}
            except FAILURES as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
