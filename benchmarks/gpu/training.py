"""Step grpo: whole steps of `strop train`, in this process: the second one watched for waits, the third profiled."""

from __future__ import annotations

from typing import Any
from unittest import mock

from benchmarks.gpu.checks import note_metrics
from benchmarks.gpu.look import Facts, Look
from benchmarks.gpu.profiling import profiled, waits_by_line
from benchmarks.gpu.workload import training_words
from strop.cli.main import main
from strop.trainer.loop import Trainer
from strop.trainer.records import StepRecord
from strop.trainer.timing import Stages


def grpo(look: Look) -> None:
    """8 prompts, 8 samples of each, 512 tokens; then steps of 96 tokens under a profiler."""
    look.measure("strop train, phases of a step", lambda facts: _phases(look, facts))
    look.measure("a step, profiled", lambda facts: _profiled_step(look, facts), needs_s=25)


def _phases(look: Look, facts: Facts) -> None:
    folder = look.work / "grpo"
    tokens = look.size(512, 16)
    _train(training_words(look, folder, steps=look.size(4, 2), name="phases", max_tokens=tokens))
    note_metrics(folder / "phases" / "metrics.jsonl", facts)
    facts["response_tokens"] = tokens


def _profiled_step(look: Look, facts: Facts) -> None:
    plain = Trainer.step

    def watched(self: Trainer, step: int, stages: Stages) -> StepRecord:
        records: list[StepRecord] = []

        def call() -> None:
            records.append(plain(self, step, stages))

        if step == 2:
            facts["waits"] = waits_by_line(look, call)
        elif step == 3:
            facts["profile"] = profiled(look, call)
            facts["stages_s"] = {name: round(value, 3) for name, value in stages.seconds.items()}
        else:
            call()
        return records[0]

    words = training_words(look, look.work / "grpo", steps=3, name="profiled", max_tokens=look.size(96, 16))
    with mock.patch.object(Trainer, "step", watched):
        _train(words)
    if "profile" not in facts:
        raise RuntimeError("there was no third step to profile")


def _train(words: list[str]) -> Any:
    """Run the command in this process.

    Raises:
        RuntimeError: it did not succeed.
    """
    code = main(words)
    if code:
        raise RuntimeError(f"strop {words[0]} ended with {code}; the log of this step has its sentence")
