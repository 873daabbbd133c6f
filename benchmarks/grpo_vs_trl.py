"""A whole GRPO step of strop beside TRL's: same model, prompts, reward and sampling, in one run.

    make bench BENCH=grpo_vs_trl          (makes TRL's own environment .venv-trl the first time)

prints one JSON line, and that of each workload, when it is done, on stderr. Both sides are tried in float32 and
bfloat16, TRL where the processor multiplies in that, and also with other cuts of its batch. `ratio_trl` is strop's
samples per second over TRL's, either side at the fastest of its settings; `ratio_float32`, in each workload, is the
same of the fastest in float32. (Figures in which `mean_response_tokens` is one number are older: their ratios have
strop in float32 alone.) Both sides take the median over the steps after a warm-up, and their runs alternate. Everything
a step does by default counts: sampling, scoring, the update, and on strop's side sample store, ledger and fingerprint.
Both have `threads` threads, as many as torch takes here (OMP_NUM_THREADS, else the cores), and so has the ceiling.

Work is equal: both visit the prompts in the order of the file, the learning rate leaves the policy as it is, and
lengths are means over the counted steps, of each setting. Where those of the two settings of either ratio differ by
more than a tenth, `is_equal_work` is false, and no ratio should be quoted.

Four workloads. `words` is the task: a model that was fine-tuned by `strop sft` writes words of 2 to 28 letters
backwards, so answers have different lengths. `full` (`ratio_trl_full`) is the worst case for strop: a model with
random weights, whose answers nearly all run into the limit, so that there is no padding to save. `2to1` and `8to1`
(`ratio_trl_2to1`, `ratio_trl_8to1`) have prompts of two and eight times as many tokens as answers, as tasks with a
context have them. Their prompts have random letters, of lengths that both sides read from one list, a half to one and
a half of the mean; their model is the one of random weights, changed so that an answer cannot end before the limit.

Other shapes are workloads of your own: `--workloads 300:48` has prompts of 300 tokens on average and answers of 48
(`ratio_trl_300:48`), otherwise as `2to1`; `--prompts` and `--samples` set the size of a step, of which TRL's settings
follow.

`phases_s` are medians of generation, of what is between, of the update, and of what else a step does (`other`), of
either side at its fastest setting; `phases_s_strop` has those of each precision of strop.

`ceiling_share_update` is the time that the necessary work of an update in float32 would take at the fastest product of
matrices in float32 of this machine (ceiling.py, update.py) over the update's. The product is measured before and after
each workload, and the faster one counts. The share is that of `2to1`, `8to1` and shapes of your own alone, and at the
top level the least: there the reward gives nearly every answer an advantage, and random answers part too early to share
what strop computes once. In `words` and `full` a row without an advantage gets a forward pass alone, and answers begin
alike, so that the work that counts as necessary is not all done: their share is null, as is that of a run without the
other two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch
from ceiling import product_ceiling
from machine import machine, multiplies_in_bfloat16
from safetensors.torch import load_file, save_file
from sizes import SIZES
from transformers import AutoModelForCausalLM
from update import Group, work_of

from strop.cli.quickstart.task import write_task
from strop.data.tiny_model import make_tiny_model, make_tiny_tokenizer
from strop.engines.config import EngineConfig
from strop.observability.trackers.setup import read_metrics

HERE = Path(__file__).resolve().parent
STROP = (sys.executable, "-m", "strop.cli.main")
SAMPLES, MAX_TOKENS = 8, 32
LR = 1e-8
"""So small that both sides sample from the model they began with: a policy that learns to write longer words has more
to do, and the two would learn different things."""
PRECISIONS = ("float32", "bfloat16")
"""Settings of strop that are tried: model.dtype."""
MAX_LENGTH_GAP = 0.1
"""Largest relative difference of the mean response lengths at which the work counts as equal."""
TEMPLATE_TOKENS = 3
"""Of the chat template, around the text of a prompt."""
LEAST_PROMPT = 2 * (TEMPLATE_TOKENS + 1)
"""Tokens of prompts on average, of which the shortest have half."""
DEFAULT_POSITIONS = 1024
"""Of the models, at least."""
PHASES = ("gen", "adv", "update_actor")
OTHER = "other"
"""Phase of the rest of a step."""
WORKLOADS = ("words", "2to1", "8to1", "full")


@dataclass(frozen=True)
class Scale:
    """Size of the runs with a model, so that all of them end within ten minutes."""

    prompts: int
    """Of a step."""
    steps: int
    """Counted ones of each run."""
    warm_up: int
    """Steps of each run that are not counted."""
    trl_cuts: tuple[int, ...]
    """Forward passes of a step of TRL in float32, each a setting."""
    workloads: tuple[str, ...]
    samples: int = SAMPLES
    """Of a prompt."""

    @property
    def trl_settings(self) -> tuple[str, ...]:
        """Samples per forward pass x gradient accumulation, and bf16 where that is meant."""
        batch = self.prompts * self.samples
        cuts = [cut for cut in self.trl_cuts if batch % cut == 0]
        return (*(f"{batch // cut}x{cut}" for cut in cuts), f"{batch}x1-bf16")


SCALES = {
    "small": Scale(8, 8, 2, (1, 2), WORKLOADS),
    "large": Scale(2, 2, 2, (1,), ("2to1", "8to1", "full")),
}


@dataclass(frozen=True)
class Workload:
    """Model, prompts and reward of both sides."""

    name: str
    model: Path
    data: Path
    reward: str
    """Of bench_rewards.py."""
    max_prompt_tokens: int
    max_response_tokens: int = MAX_TOKENS

    @property
    def has_whole_updates(self) -> bool:
        """Whether every row has a gradient and answers part early: an update does the work that counts as necessary."""
        return self.reward == "letters"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="small", help="about 4 or 100 million parameters")
    parser.add_argument(
        "--workloads",
        default="",
        help=f"of {', '.join(WORKLOADS)} and P:R, with commas; empty: all of the size",
    )
    parser.add_argument("--prompts", type=_at_least(1), help="of a step; not given: as the size has them")
    parser.add_argument("--samples", type=_at_least(2), default=SAMPLES, help="of a prompt")
    parser.add_argument("--steps", type=_at_least(1), help="counted ones of each run; not given: likewise")
    parser.add_argument("--rounds", type=_at_least(1), default=1, help="alternating runs of each side")
    parser.add_argument("--trl-python", type=Path, default=HERE.parent / ".venv-trl/bin/python")
    arguments = parser.parse_args()
    scale = SCALES[arguments.size]
    scale = replace(
        scale,
        prompts=arguments.prompts or scale.prompts,
        samples=arguments.samples,
        steps=arguments.steps or scale.steps,
    )
    names = arguments.workloads.split(",") if arguments.workloads else scale.workloads
    try:
        lengths = [lengths_of(name) for name in names]
        if len({*names}) < len(names):
            raise ValueError("a workload is given twice: its numbers have one place in the result")
    except ValueError as error:
        parser.error(str(error))
    if not arguments.trl_python.is_file():
        sys.exit(f"{arguments.trl_python} is missing: `make bench BENCH=grpo_vs_trl` makes it")
    where = machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        positions = max(DEFAULT_POSITIONS, *(2 * prompt + response for prompt, response in lengths))
        make_tiny_model(folder / "raw", seed=0, **SIZES[arguments.size], max_position_embeddings=positions)
        results = {}
        for name in names:
            results[name] = _measure(arguments, scale, folder, _workload(name, folder), where)
            print(json.dumps({name: results[name]}), file=sys.stderr, flush=True)
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder / "raw").parameters())
    shares = [workload["ceiling_share_update"] for workload in results.values()]
    result = {
        "name": "grpo_vs_trl",
        **{ratio_name(name): workload["ratio"] for name, workload in results.items()},
        "ceiling_share_update": min((share for share in shares if share is not None), default=None),
        **results,
        "threads": torch.get_num_threads(),
        "size": arguments.size,
        "parameters": parameters,
        "samples_per_step": scale.prompts * scale.samples,
        **where,
    }
    print(json.dumps(result))


def _at_least(least: int) -> Callable[[str], int]:
    """Type of an argument."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return number


def ratio_name(workload: str) -> str:
    """Key of a workload's ratio."""
    return "ratio_trl" if workload == "words" else f"ratio_trl_{workload}"


def lengths_of(name: str) -> tuple[int, int]:
    """Tokens of the prompts of a workload, on average or at most, and of an answer, at most.

    Raises:
        ValueError: there is no such workload.
    """
    if name in WORKLOADS:
        return {"2to1": 2, "8to1": 8}.get(name, 1) * MAX_TOKENS, MAX_TOKENS
    if not (match := re.fullmatch(r"(\d+):(\d+)", name)):
        raise ValueError(
            f"there is no workload {name!r}: give {', '.join(WORKLOADS)}, or tokens of prompts and answers as 300:48"
        )
    prompt, response = int(match[1]), int(match[2])
    if prompt < LEAST_PROMPT or response < 2:
        raise ValueError(f"{name} is too short: prompts need {LEAST_PROMPT} tokens on average, and answers 2")
    most, longest = EngineConfig().max_tokens_per_device, prompt + prompt // 2 + response
    if longest > most:
        raise ValueError(
            f"{name} is too long: a prompt and its answer have up to {longest} tokens, a pass {most}"
        )
    return prompt, response


def _workload(name: str, folder: Path) -> Workload:
    if name in ("words", "full"):
        data = folder / "data.jsonl"
        if not data.is_file():
            write_task(folder, seed=0, num_train=512, num_val=1, num_sft=4096, min_letters=2, max_letters=28)
            _write_prompts(folder)
        model = _fine_tuned(folder) if name == "words" else folder / "raw"
        return Workload(name, model, data, "position", 64)
    if not (folder / "endless").is_dir():
        make_endless(folder / "raw", folder / "endless")
    mean, response = lengths_of(name)
    data = folder / f"{name.replace(':', '-')}.jsonl"
    write_prompts_of(prompt_lengths(mean, 256), data)
    return Workload(name, folder / "endless", data, "letters", 2 * mean, response)


def prompt_lengths(mean: int, count: int) -> list[int]:
    """Tokens of each prompt, between a half and one and a half of the mean, in pairs that have it."""
    generator = random.Random(0)
    offsets = [generator.randint(0, mean // 2) for _ in range(count // 2)]
    return [mean + sign * offset for offset in offsets for sign in (1, -1)]


def write_prompts_of(lengths: Sequence[int], path: Path) -> None:
    """Prompts of random letters that have so many tokens with the chat template."""
    generator = random.Random(1)
    with path.open("w") as file:
        for length in lengths:
            text = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz ", k=length - TEMPLATE_TOKENS))
            prompt = [{"role": "user", "content": text}]
            file.write(json.dumps({"data_source": "bench", "prompt": prompt, "answer": "-"}) + "\n")


def make_endless(source: Path, target: Path) -> None:
    """A copy of a tiny model whose answers cannot end: the end of a turn has a logit far below all others.

    The first number of the residual stream is the same for all tokens, since no layer writes to it; the end of a turn
    alone has a negative one there. Embeddings are tied to the head, so that of other tokens moves all logits alike.
    """
    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 1
    embedding[make_tiny_tokenizer().eos_token_id, 0] = -100
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _measure(
    arguments: argparse.Namespace, scale: Scale, folder: Path, workload: Workload, where: Mapping[str, Any]
) -> dict[str, Any]:
    """Alternating runs of both sides on one workload; the first round finds the fastest settings of each."""
    steps = scale.steps + scale.warm_up
    counted = slice(scale.warm_up, None)
    ours, theirs = Side(PRECISIONS, counted), Side(tried(scale.trl_settings, where), counted)
    before = product_ceiling(torch.float32)
    for number in range(arguments.rounds):
        for setting in ours.worth_running():
            run = _strop(folder, workload, f"{workload.name}-{setting}-{number}", steps, scale, setting)
            ours.runs[setting].append(run)
        for setting in theirs.worth_running():
            theirs.runs[setting].append(_trl(arguments.trl_python, workload, setting, steps, scale))
    ceiling = max(before, product_ceiling(torch.float32), key=lambda measured: measured.flops)
    samples = scale.prompts * scale.samples
    share = None
    if workload.has_whole_updates:
        runs = ours.runs[ours.fastest_in_float32]
        operations = [_operations(workload, arguments.size, run, counted, scale) for run in runs]
        at_ceiling = statistics.mean(operations) / ceiling.flops
        share = round(at_ceiling / ours.phases(ours.fastest_in_float32)["update_actor"], 3)
    return {
        "ratio": round(theirs.step_s(theirs.fastest) / ours.step_s(ours.fastest), 2),
        "ratio_float32": round(
            theirs.step_s(theirs.fastest_in_float32) / ours.step_s(ours.fastest_in_float32), 2
        ),
        "max_new_tokens": workload.max_response_tokens,
        "samples_per_s": round(samples / ours.step_s(ours.fastest), 1),
        "samples_per_s_trl": round(samples / theirs.step_s(theirs.fastest), 1),
        "step_s": round(ours.step_s(ours.fastest), 3),
        "step_s_strop": {setting: round(ours.step_s(setting), 3) for setting in ours.runs},
        "step_s_trl": {setting: round(theirs.step_s(setting), 3) for setting in theirs.runs},
        "setting": ours.fastest,
        "trl_setting": theirs.fastest,
        "phases_s": ours.phases(ours.fastest),
        "phases_s_strop": {setting: ours.phases(setting) for setting in ours.runs},
        "phases_s_trl": theirs.phases(theirs.fastest),
        "ceiling_share_update": share,
        "ceiling": ceiling.json(),
        "mean_response_tokens": {setting: round(ours.length(setting), 2) for setting in ours.runs},
        "mean_response_tokens_trl": {setting: round(theirs.length(setting), 2) for setting in theirs.runs},
        "is_equal_work": all(
            is_equal_work(ours.length(own), theirs.length(other))
            for own, other in (
                (ours.fastest, theirs.fastest),
                (ours.fastest_in_float32, theirs.fastest_in_float32),
            )
        ),
        "versions_trl": theirs.runs[theirs.fastest][-1]["versions"],
    }


def tried(settings: Sequence[str], where: Mapping[str, Any]) -> list[str]:
    """TRL's settings that the machine of these facts has instructions for."""
    takes_all = multiplies_in_bfloat16(where)
    return [setting for setting in settings if takes_all or not is_bfloat16(setting)]


def is_bfloat16(setting: str) -> bool:
    """Whether a setting of either side is in bfloat16."""
    return "bf" in setting


class Side:
    """Runs of one library in each of its settings."""

    def __init__(self, settings: Sequence[str], counted: slice) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {setting: [] for setting in settings}
        self._counted = counted

    def worth_running(self) -> list[str]:
        """All settings at first, then the fastest one and the fastest one in float32."""
        if not all(self.runs.values()):
            return list(self.runs)
        return list(dict.fromkeys([self.fastest, self.fastest_in_float32]))

    def step_s(self, setting: str) -> float:
        """Median of its steps."""
        return statistics.median(
            second for run in self.runs[setting] for second in run["seconds"][self._counted]
        )

    @property
    def fastest(self) -> str:
        """The setting of the shortest steps."""
        return min(self.runs, key=self.step_s)

    @property
    def fastest_in_float32(self) -> str:
        """The same of those in float32."""
        return min((setting for setting in self.runs if not is_bfloat16(setting)), key=self.step_s)

    def phases(self, setting: str) -> dict[str, float]:
        """Medians of the phases of its steps."""
        each = [phases for run in self.runs[setting] for phases in run["phases"][self._counted]]
        return {
            name: round(statistics.median(phases[name] for phases in each), 3) for name in (*PHASES, OTHER)
        }

    def length(self, setting: str) -> float:
        """Mean tokens of its answers."""
        return statistics.mean(
            length for run in self.runs[setting] for length in run["lengths"][self._counted]
        )


def is_equal_work(own_length: float, length: float) -> bool:
    """Whether the mean response lengths of two sides are near enough."""
    return abs(own_length - length) <= MAX_LENGTH_GAP * min(own_length, length)


def _operations(workload: Workload, size: str, run: dict[str, Any], counted: slice, scale: Scale) -> float:
    """Floating-point operations of an update in which every row has a gradient and answers share nothing, mean over the
    counted steps; answers of a step count as of their mean length."""
    rows = [json.loads(line) for line in workload.data.read_text().splitlines()]
    tokens = [len(row["prompt"][-1]["content"]) + TEMPLATE_TOKENS for row in rows]
    work = []
    for step in range(*counted.indices(len(run["lengths"]))):
        answers = (round(run["lengths"][step]),) * scale.samples
        first = step * scale.prompts
        visited = [tokens[(first + number) % len(tokens)] for number in range(scale.prompts)]
        groups = [Group(prompt, answers) for prompt in visited]
        work.append(3 * work_of(groups).forward(SIZES[size], len(make_tiny_tokenizer())))
    return statistics.mean(work)


def _write_prompts(folder: Path) -> None:
    """The training prompts as JSON lines that both libraries read: TRL passes plain columns to the reward."""
    rows = pyarrow.parquet.read_table(folder / "train.parquet").to_pylist()
    with (folder / "data.jsonl").open("w") as file:
        for row in rows:
            answer = row["reward_model"]["ground_truth"]
            file.write(json.dumps({"data_source": "bench", "prompt": row["prompt"], "answer": answer}) + "\n")


def _fine_tuned(folder: Path) -> Path:
    """The model after a short `strop sft`: it has learned when an answer ends, and not yet to be right."""
    run = folder / "sft"
    _run(
        [
            *STROP,
            "sft",
            "--out",
            str(run),
            f"model.path={folder / 'raw'}",
            "sft.max_steps=60",
            "sft.optim.lr=1e-3",
            f"sft.data.train_files=[{folder / 'sft.parquet'}]",
            "sft.examples_per_update=64",
            "trainer.trackers=[]",
            "sft.optim.warmup_steps=10",
        ]
    )
    return run / "checkpoints" / "global_step_60" / "model"


def _strop(
    folder: Path, workload: Workload, name: str, steps: int, scale: Scale, precision: str
) -> dict[str, Any]:
    run = folder / f"run-{name}"
    shutil.rmtree(run, ignore_errors=True)
    _run(
        [
            *STROP,
            "train",
            "--out",
            str(run),
            f"model.path={workload.model}",
            f"model.dtype={precision}",
            f"data.train_files=[{workload.data}]",
            "data.ground_truth_key=answer",
            "data.sampler=in_order",
            f"data.prompts_per_step={scale.prompts}",
            f"data.max_prompt_tokens={workload.max_prompt_tokens}",
            f"data.max_response_tokens={workload.max_response_tokens}",
            f"rollout.samples_per_prompt={scale.samples}",
            f"actor.optim.lr={LR}",
            f"reward.path={HERE / 'bench_rewards.py'}",
            f"reward.name={workload.reward}",
            f"trainer.max_steps={steps}",
            f"resources.num_threads={torch.get_num_threads()}",
            "run.save_every=0",
            "trainer.trackers=[jsonl]",
        ]
    )
    metrics = [row for row in read_metrics(run / "metrics.jsonl") if "timing_s/step" in row]
    return {
        "seconds": [row["timing_s/step"] for row in metrics],
        "phases": [_phases_of(row) for row in metrics],
        "lengths": [row["response_length/mean"] for row in metrics],
    }


def _phases_of(metrics: dict[str, float]) -> dict[str, float]:
    phases = {phase: metrics[f"timing_s/{phase}"] for phase in PHASES}
    return {**phases, OTHER: metrics["timing_s/step"] - sum(phases.values())}


def _trl(python: Path, workload: Workload, setting: str, steps: int, scale: Scale) -> dict[str, Any]:
    batch, accumulate, *precision = setting.replace("-", "x").split("x")
    command = [
        str(python), str(HERE / "trl_grpo.py"), str(workload.model), str(workload.data),
        "--steps", str(steps), "--batch", batch, "--accumulate", accumulate,
        "--samples", str(scale.samples), "--max-tokens", str(workload.max_response_tokens), "--lr", str(LR),
        "--reward", workload.reward,
        *(["--bf16"] if precision else []),
    ]  # fmt: skip
    result: dict[str, Any] = json.loads(_run(command).splitlines()[-1])
    return {**result, "lengths": result["mean_lengths"]}


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    main()
