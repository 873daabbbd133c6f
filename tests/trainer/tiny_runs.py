"""Runs of seconds: a random model, and a reward of the first letter, so that every group has something to teach."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from strop.cli.quickstart.task import TaskFiles
from strop.observability.trackers.setup import read_metrics
from strop.protocol import DataProto
from strop.run import Fingerprint, RunFolder
from strop.trainer.config import Config
from strop.trainer.early_stopping import TrainResult
from strop.trainer.loading import load
from strop.trainer.loop import Trainer
from strop.trainer.records import StepRecord
from strop.trainer.start import resume_run, start_run
from strop.trainer.timing import Stages

REWARD = '''\
"""Rewards that a random model can tell apart."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """By the first character, and 1 for the right answer."""
    right = solution_str.strip() == ground_truth
    return {"score": 1.0 if right else ord((solution_str or " ")[0]) % 8 / 10, "acc": right}


def picky(data_source, solution_str, ground_truth, extra_info=None):
    """Fails on the answers that begin with a character of an odd code."""
    if solution_str != ground_truth and ord((solution_str or " ")[0]) % 2:
        raise ZeroDivisionError("an odd beginning")
    return compute_score(data_source, solution_str, ground_truth)["score"]


def only_right(data_source, solution_str, ground_truth, extra_info=None):
    """Fails on every answer but the right one."""
    if solution_str != ground_truth:
        raise ZeroDivisionError("a wrong answer")
    return 1.0
'''


@dataclass
class Project:
    """The files of runs."""

    folder: Path
    model: Path
    task: TaskFiles

    def settings(self) -> list[str]:
        """What all runs have in common, as overrides of the defaults."""
        return [
            f"model.path='{self.model}'",
            f"data.train_files=['{self.task.train}']",
            f"data.val_files=['{self.task.val}']",
            "data.prompts_per_step=4",
            "data.max_prompt_tokens=24",
            "data.max_response_tokens=5",
            f"sft.data.train_files=['{self.task.sft}']",
            "sft.data.max_tokens=32",
            "sft.examples_per_update=5",
            "sft.num_epochs=3",
            "sft.optim.lr=1e-3",
            "rollout.samples_per_prompt=4",
            "actor.optim.lr=1e-3",
            f"reward.path='{self.folder / 'reward.py'}'",
            "reward.num_workers=1",
            "trainer.num_epochs=4",
            "trainer.max_steps=3",
            "trainer.trackers=[jsonl]",
            "trainer.preflight=false",
            "eval.every=0",
            "run.save_every=0",
            "resources.num_threads=1",
        ]

    def config(self, *overrides: str) -> Config:
        """A configuration."""
        return load(overrides=[*self.settings(), *overrides])


def make_project(folder: Path, model: Path, task: TaskFiles) -> Project:
    """Write the reward file."""
    (folder / "reward.py").write_text(REWARD)
    return Project(folder, model, task)


@dataclass(frozen=True, kw_only=True)
class SeenStep(StepRecord):
    """A step with its rows fetched, which the controller itself never does."""

    fetched: DataProto | None


class RecordingTrainer(Trainer):
    """Keeps the record of every step."""

    def keep(self, records: list[SeenStep]) -> RecordingTrainer:
        self.records = records
        return self

    def step(self, step: int, stages: Stages) -> StepRecord:
        record = super().step(step, stages)
        rows = None if record.learned is None else record.learned.batch.rows.get()
        self.records.append(SeenStep(**vars(record), fetched=rows))
        return record


@dataclass
class Done:
    """A run that ended, and what it left."""

    folder: Path
    result: TrainResult
    records: list[SeenStep]
    said: list[str]
    metrics: list[dict[str, float]] = field(init=False)
    """By step, from metrics.jsonl; the first is the validation before training."""

    def __post_init__(self) -> None:
        self.metrics = read_metrics(self.folder / "metrics.jsonl")

    @property
    def steps(self) -> list[dict[str, float]]:
        """Metrics of the training steps."""
        return [numbers for numbers in self.metrics if numbers["step"] > 0]

    @property
    def chain(self) -> list[Fingerprint]:
        return chain_of(self.folder)


def train_in(folder: Path, config: Config) -> Done:
    """Train in a fresh folder in this process."""
    said: list[str] = []
    records: list[SeenStep] = []
    start = start_run(folder, config, command=["strop", "train"])
    with start.run as run:
        trainer = RecordingTrainer(config, run, checkpoint=None, say=said.append)
        result = trainer.keep(records).fit()
    return Done(folder, result, records, said)


def resume_in(folder: Path, *overrides: str, accept_changes: bool = False) -> Done:
    """Continue a run with this process as its controller, perhaps on other resources."""
    said: list[str] = []
    records: list[SeenStep] = []
    start = resume_run(folder, overrides=overrides, say=said.append, accept_changes=accept_changes)
    with start.run as run:
        trainer = RecordingTrainer(start.config, run, checkpoint=start.checkpoint, say=said.append)
        result = trainer.keep(records).fit()
    return Done(folder, result, records, said)


def chain_of(folder: Path) -> list[Fingerprint]:
    """The hash chain of a run."""
    with RunFolder.open(folder, read_only=True) as run:
        return run.fingerprints.read()


def check_records(folder: Path, *, num_steps: int, first_step: int = 1) -> None:
    """The ledger adds up, and each step is in metrics.jsonl once."""
    with RunFolder.open(folder, read_only=True) as run:
        run.ledger.check()
        counts = run.ledger.counts()
        assert counts["in_flight"] == 0
        assert counts["issued"] == sum(n for name, n in counts.items() if name != "issued")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    logged = [line["step"] for line in lines if "training/global_step" in line or "train/loss" in line]
    assert logged == list(range(first_step, num_steps + 1))


def with_reward(config: Config, **changes: object) -> Config:
    """The configuration with other reward settings."""
    return dataclasses.replace(config, reward=dataclasses.replace(config.reward, **changes))


def stages_that_differ(a: Sequence[Fingerprint], b: Sequence[Fingerprint]) -> list[str]:
    """Stages of the first step in which two runs differ."""
    return [name for name in a[0].stages if a[0].stages[name] != b[0].stages.get(name)]


def to_reward_model(folder: Path) -> None:
    """Make a classifier with one score of a causal language model."""
    from transformers import AutoModelForSequenceClassification  # takes a second

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, pad_token_id=0)
    model.save_pretrained(folder)
