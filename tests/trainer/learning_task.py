"""A task that a small model learns in seconds, half-way by imitation and the rest from rewards."""

from __future__ import annotations

from pathlib import Path

from strop.cli.quickstart.task import write_task
from strop.config import load_config
from strop.data.tiny_model import make_tiny_model
from strop.trainer.config import Config
from strop.trainer.sft.result import SftResult
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import start_run

ALPHABET = "abcdefghijkl"


class LearningTask:
    """Words of three letters to write backwards, and a model of 0.1 million weights that was shown some."""

    def __init__(self, folder: Path, *, head_dim: int = 16) -> None:
        """Write model and data, and fine-tune for 58 steps: about three seconds on one core."""
        self.folder = folder
        make_tiny_model(
            folder / "model",
            seed=0,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=head_dim,
            intermediate_size=192,
            max_position_embeddings=64,
        )
        self._task = write_task(
            folder / "data",
            seed=0,
            num_train=500,
            num_val=100,
            num_sft=700,
            min_letters=3,
            max_letters=3,
            alphabet=ALPHABET,
        )
        start = start_run(folder / "sft", self.config(folder / "model"), command=["strop", "sft"])
        with start.run:
            self.sft: SftResult = fine_tune(start.config, start.run, say=lambda line: None)

    def config(self, model: Path | None = None, *overrides: str) -> Config:
        """Settings of a training; by default of the fine-tuned model."""
        return load_config(
            Config,
            source="quickstart",
            overrides=[
                f"model.path='{self.sft.model if model is None else model}'",
                f"data.train_files=['{self._task.train}']",
                f"data.val_files=['{self._task.val}']",
                f"sft.data.train_files=['{self._task.sft}']",
                "sft.examples_per_update=32",
                "sft.num_epochs=3",
                "sft.max_steps=58",
                "sft.optim.lr=4e-3",
                "data.prompts_per_step=16",
                "rollout.samples_per_prompt=16",
                "actor.optim.lr=1e-3",
                "trainer.num_epochs=2",
                "trainer.max_steps=40",
                "trainer.trackers=[jsonl]",
                "trainer.preflight=false",
                "eval.every=0",
                "run.save_every=0",
                "reward.num_workers=1",
                "resources.num_threads=1",
                *overrides,
            ],
        )
