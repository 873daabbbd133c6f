"""Steps of TRL on the task of examples/smollm2; started by real.py in TRL's own environment.

    real_trl.py MODEL DATA.jsonl MAX_STEPS RATE BATCH float32|bfloat16

prints one JSON line: seconds of every step, the rate of right samples and the mean length of answers, up to the first
step that reaches RATE, the second at least.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PROMPTS, SAMPLES, MAX_TOKENS, LR = 16, 8, 8, 1e-5
"""Of examples/smollm2/config.yaml."""


class Steps(TrainerCallback):
    """Ends of optimizer steps; rates come with the log, which follows each of them."""

    def __init__(self, rate):
        self.rate = rate
        self.ends = []
        self.rates = []
        self.lengths = []

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())

    def on_log(self, args, state, control, logs=None, **_):
        if "reward" in logs:
            self.rates.append(float(logs["reward"]))
            self.lengths.append(float(logs["completions/mean_length"]))
            if self.rates[-1] >= self.rate and len(self.rates) > 1:
                control.should_training_stop = True
        return control


def right(completions, answer, **_):
    """1 where the stripped text is the answer, as scorer strop/exact."""
    texts = [completion[0]["content"] for completion in completions]
    return [float(text.strip() == word) for text, word in zip(texts, answer, strict=True)]


def main():
    model, data, max_steps, rate, batch, precision = sys.argv[1:]
    rows = [json.loads(line) for line in Path(data).read_text().splitlines()]
    steps = Steps(float(rate))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=precision == "bfloat16",
            seed=0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            max_steps=int(max_steps),
            shuffle_dataset=False,
            learning_rate=LR,
            lr_scheduler_type="constant",
            per_device_train_batch_size=int(batch),
            gradient_accumulation_steps=PROMPTS * SAMPLES // int(batch),
            num_generations=SAMPLES,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
            loss_type="dapo",
            scale_rewards="group",
        )
        trainer = GRPOTrainer(
            model=model,
            args=config,
            reward_funcs=right,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            callbacks=[steps],
        )
        start = time.perf_counter()
        trainer.train()
    seconds = [round(end - begin, 3) for begin, end in pairwise([start, *steps.ends])]
    versions = {name: metadata.version(name) for name in ("trl", "torch", "transformers")}
    print(
        json.dumps(
            {
                "seconds": seconds,
                "rates": [round(rate, 3) for rate in steps.rates[: len(seconds)]],
                "lengths": [round(length, 3) for length in steps.lengths[: len(seconds)]],
                "versions": versions,
            }
        )
    )


if __name__ == "__main__":
    main()
