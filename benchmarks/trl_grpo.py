"""One GRPO run of TRL, timed step by step; started by grpo_vs_trl.py in TRL's own environment.

    trl_grpo.py MODEL DATA.jsonl --steps N --batch B --accumulate A

prints one JSON line: seconds and mean response length of every step, and the versions used.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib import metadata
from itertools import pairwise
from pathlib import Path

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def position_reward(completions, answer, **_):
    """Share of positions that are right: dense, so that nearly every group has different rewards."""
    texts = [completion[0]["content"] for completion in completions]
    return [
        sum(a == b for a, b in zip(text, right, strict=False)) / max(len(text), len(right))
        for text, right in zip(texts, answer, strict=True)
    ]


class Clock(TrainerCallback):
    """When each optimizer step ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, *_, **__):
        self.ends.append(time.perf_counter())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--accumulate", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in Path(arguments.data).read_text().splitlines()]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=arguments.bf16,
            seed=0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            max_steps=arguments.steps,
            shuffle_dataset=False,
            learning_rate=arguments.lr,
            lr_scheduler_type="constant",
            per_device_train_batch_size=arguments.batch,
            gradient_accumulation_steps=arguments.accumulate,
            num_generations=arguments.samples,
            max_completion_length=arguments.max_tokens,
            temperature=1.0,
            beta=0.0,
            num_iterations=1,
            gradient_checkpointing=False,
            loss_type="dapo",
            scale_rewards="group",
            dataloader_num_workers=0,
        )
        trainer = GRPOTrainer(
            model=arguments.model,
            args=config,
            reward_funcs=position_reward,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
            callbacks=[clock],
        )
        start = time.perf_counter()
        trainer.train()
    ends = [start, *clock.ends]
    key = "completions/mean_length"
    lengths = [entry[key] for entry in trainer.state.log_history if key in entry]
    result = {
        "seconds": [round(end - begin, 4) for begin, end in pairwise(ends)],
        "mean_lengths": lengths,
        "versions": {name: metadata.version(name) for name in ("trl", "torch", "transformers", "accelerate")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
