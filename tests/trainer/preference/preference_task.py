"""What tiny runs on preferences learn."""

from __future__ import annotations

import json
import random
from pathlib import Path

from strop.config import load_config
from strop.trainer.config import Config


class Task:
    """Small letters to write in large ones; the small ones themselves are the worse answer."""

    def __init__(self, folder: Path, model: Path) -> None:
        draw = random.Random(0)
        words = ["".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, 5))) for _ in range(24)]
        self.folder, self.model = folder, model
        self.pairs, self.rated = folder / "pairs.jsonl", folder / "rated.jsonl"
        self.pairs.write_text("".join(
            json.dumps({"prompt": word, "chosen": word.upper(), "rejected": word}) + "\n" for word in words
        ))  # fmt: skip
        self.rated.write_text("".join(
            json.dumps({"prompt": word, "completion": word.upper() if n % 2 else word, "label": bool(n % 2)}) + "\n"
            for n, word in enumerate(words)
        ))  # fmt: skip

    def config(self, loss: str, *more: str) -> Config:
        """Six steps of eight rows."""
        file = self.rated if loss == "kto" else self.pairs
        return load_config(Config, overrides=[
            f"model.path='{self.model}'", f"prefer.loss={loss}", f"prefer.data.train_files=['{file}']",
            f"prefer.data.val_files=['{file}']", "prefer.data.max_tokens=48", "prefer.examples_per_update=8",
            "prefer.num_epochs=2", "prefer.optim.lr=3e-3", "trainer.trackers=[jsonl]", "eval.every=3",
            "resources.num_threads=1", "run.save_every=2", *more,
        ])  # fmt: skip
