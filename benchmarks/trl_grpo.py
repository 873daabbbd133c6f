"""One GRPO run of TRL, timed step by step; started by grpo_vs_trl.py in TRL's own environment.

    trl_grpo.py MODEL DATA.jsonl --steps N --batch B --accumulate A

prints one JSON line: seconds and mean response length of every step, seconds of its phases, and the versions used. A
step lasts from the end of the one before to its own. `update_actor` is what the trainer spends between the callbacks
`on_step_begin` and `on_step_end` and not on samples: forward and backward passes and the optimizer; `other` is what
lies before `on_step_begin`: the log of the step before, and the data loader.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from importlib import metadata
from itertools import pairwise
from pathlib import Path

import bench_rewards
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def timed(name):
    """Method of the trainer whose seconds count as a phase of the step."""

    def method(self, *args, **kwargs):
        start = time.perf_counter()
        result = getattr(super(TimedTrainer, self), name)(*args, **kwargs)
        self.clock.add(name, time.perf_counter() - start)
        return result

    return method


class TimedTrainer(GRPOTrainer):
    """The trainer, with the time that it spends on samples."""

    _generate = timed("_generate")
    _generate_and_score_completions = timed("_generate_and_score_completions")


class Clock(TrainerCallback):
    """When each optimizer step began and ended, and how long its phases took."""

    def __init__(self):
        self.start = self._begin = 0.0
        self.ends = []
        self.phases = []
        self._current = defaultdict(float)

    def add(self, name, seconds):
        self._current[name] += seconds

    def on_step_begin(self, *_, **__):
        self._begin = time.perf_counter()

    def on_step_end(self, *_, **__):
        before = self.ends[-1] if self.ends else self.start
        self.ends.append(time.perf_counter())
        generation = self._current["_generate"]
        samples = self._current["_generate_and_score_completions"]
        self.phases.append(
            {
                "gen": generation,
                "adv": samples - generation,
                "update_actor": self.ends[-1] - self._begin - samples,
                "other": self._begin - before,
            }
        )
        self._current.clear()


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
    parser.add_argument("--reward", choices=("position", "letters"), required=True)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in Path(arguments.data).read_text().splitlines()]
    score = getattr(bench_rewards, arguments.reward)

    def reward(completions, answer, **_):
        texts = [completion[0]["content"] for completion in completions]
        return [score("", text, right) for text, right in zip(texts, answer, strict=True)]

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
        trainer = TimedTrainer(
            model=arguments.model,
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
            callbacks=[clock],
        )
        trainer.clock = clock
        clock.start = time.perf_counter()
        trainer.train()
    key = "completions/mean_length"
    lengths = [entry[key] for entry in trainer.state.log_history if key in entry]
    result = {
        "seconds": [round(end - begin, 4) for begin, end in pairwise([clock.start, *clock.ends])],
        "phases": clock.phases,
        "mean_lengths": lengths,
        "versions": {name: metadata.version(name) for name in ("trl", "torch", "transformers", "accelerate")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
