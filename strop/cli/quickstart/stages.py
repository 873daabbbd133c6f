"""The stages of `strop quickstart`: the same fine-tuning, training and validation as `strop sft`, `strop train` and
`strop eval`, with the preset strop/config/presets/quickstart.yaml.

Every stage is found finished, continued or started, so the command can be interrupted and given again.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from strop.cli.launching import carrying_out
from strop.cli.quickstart.task import write_task
from strop.compat.key_aliases import key_aliases
from strop.data.tiny_model import make_tiny_model
from strop.observability.reward_curve import run_series, save_curve, text_curve
from strop.observability.trackers.setup import read_metrics
from strop.run import RunError, RunFolder, is_run
from strop.run.folder import CONFIG_FILE
from strop.run.paths import with_absolute_paths
from strop.trainer.callbacks import Reporter
from strop.trainer.config import Config
from strop.trainer.loading import load, read
from strop.trainer.sft.trainer import fine_tune
from strop.trainer.start import Start, resume_run, start_run
from strop.trainer.train import train
from strop.utils import trust
from strop.utils.shell_words import shell_word
from strop.utils.terminal import plain, print_json, say

NUM_LETTERS = 4
NUM_TRAIN, NUM_VAL, NUM_SFT = 4000, 200, 5120
FINE_TUNING = ("sft.num_epochs=2", "sft.max_steps=null", "sft.target_loss=0.6")
"""Settings of fine-tuning, in place of a number of steps: how many it takes differs by seed. 24 to 60 % of the held-out
words are right at this loss, of 0.6 nats per token."""
OFTEN = "eval.every=2"
"""The same: the pass rate rises from a quarter to a half within six steps."""
NUM_SHOWN = 5
"""Prompts shown before and after."""


def carry_out(folder: Path, *, seed: int, overrides: Sequence[str], wants_json: bool) -> None:
    """All stages, and the report of what was learned.

    Args:
        folder: of this quickstart, which exists.
        seed: of model, task and sampling.
        overrides: settings on top of the preset.
        wants_json: end with one line of JSON.
    """
    console = Console()
    start = time.perf_counter()
    model, data = folder / "model", folder / "data"
    console.print(
        f"[bold]1/4[/] a tiny Qwen3 model and a task: write a word of {NUM_LETTERS} letters backwards"
    )
    _make_once(model, lambda path: make_tiny_model(path, seed=seed))
    _make_once(data, lambda path: _write_task(path, seed))

    console.print("[bold]2/4[/] strop sft: solved examples, so that there is something to reinforce")
    sft_model = _sft(folder / "sft", _config(folder, model, seed, [*FINE_TUNING, *overrides, OFTEN]))
    console.print("[bold]3/4[/] strop train: GRPO, rewarded for right answers alone")
    _train(folder / "train", _config(folder, sft_model, seed, overrides))
    seconds = time.perf_counter() - start

    console.print("[bold]4/4[/] what it learned")
    report = _Report(folder)
    report.show(console)
    if wants_json:
        print_json(
            {
                "seconds": round(seconds, 2),
                "pass_rate_sft": report.rates[0],
                "pass_rate_final": report.rates[1],
                "run": str(report.run),
            }
        )


def _make_once(folder: Path, make: Callable[[Path], object]) -> None:
    """Make a folder whole or not at all."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    make(unfinished)
    unfinished.rename(folder)


def _write_task(folder: Path, seed: int) -> None:
    write_task(
        folder,
        seed=seed,
        num_train=NUM_TRAIN,
        num_val=NUM_VAL,
        num_sft=NUM_SFT,
        min_letters=NUM_LETTERS,
        max_letters=NUM_LETTERS,
    )


def _config(folder: Path, model: Path, seed: int, overrides: Sequence[str]) -> Config:
    data = folder / "data"
    paths = [
        f"model.path='{model}'",
        f"data.train_files=['{data / 'train.parquet'}']",
        f"data.val_files=['{data / 'val.parquet'}']",
        f"sft.data.train_files=['{data / 'sft.parquet'}']",
        f"sft.data.val_files=['{data / 'sft_val.parquet'}']",
        f"trainer.seed={seed}",
    ]
    return load("quickstart", overrides=[*paths, *overrides], aliases=key_aliases)


def _sft(folder: Path, config: Config) -> Path:
    """The fine-tuned model, made now or before."""
    start = _start(folder, config)
    with carrying_out(start, kind="sft"):
        if not start.is_finished:
            return fine_tune(config, start.run, checkpoint=start.checkpoint, say=say).model
        checkpoint, reasons = start.run.checkpoints.latest_valid()
        if checkpoint is None:
            reason = f" ({'; '.join(reasons)})" if reasons else ""
            raise RunError(
                f"{folder} is finished and has no valid checkpoint left{reason}; remove it, and it is made again"
            )
        return checkpoint.path / "model"


def _train(folder: Path, config: Config) -> None:
    start = _start(folder, config)
    with carrying_out(start, kind="train"):
        if not start.is_finished:
            train(config, start.run, checkpoint=start.checkpoint, say=say)


def _start(folder: Path, config: Config) -> Start:
    return start_or_resume(folder, config, command=["strop", "quickstart"], say=say)


@dataclass(frozen=True)
class _Answer:
    """One held-out prompt, before and after."""

    prompt: str
    ground_truth: str
    before: str
    after: str


class _Report:
    """Closing report of a quickstart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder / "train"
        with RunFolder.open(self.run, read_only=True) as run:
            validations = run.events.read("validation")
            ends = (validations[0], validations[-1])
            self.rates = tuple(end["pass_rate"] for end in ends)
            self.rewards = tuple(end["reward"] or 0.0 for end in ends)
            self.answers = _answers(
                run.samples.read(validations[0]["step"], split="val"),
                run.samples.read(validations[-1]["step"], split="val"),
            )
            self.series = run_series(read_metrics(self.run / "metrics.jsonl"))

    def show(self, console: Console) -> None:
        """Curve, answers, numbers, and what to do next."""
        picture = save_curve(
            self.folder / "curve.png", self.series, title="strop quickstart: reward and pass rate"
        )
        console.print(text_curve(self.series), markup=False, highlight=False)
        table = Table("prompt", "right answer", "before RL", "after RL")
        for answer in self.answers:
            table.add_row(
                Text(answer.prompt),
                Text(answer.ground_truth),
                _marked(answer.before, answer.ground_truth),
                _marked(answer.after, answer.ground_truth),
            )
        console.print(table)
        numbers, name = [f"{rate:.1%}" for rate in self.rates if rate is not None], "greedy pass rate"
        if len(numbers) < len(self.rates):  # with a reward of the user's own
            numbers, name = [f"{reward:.4g}" for reward in self.rewards], "mean reward of greedy answers"
        console.print(
            f"{name} on held-out words: [bold]{numbers[0]}[/] after SFT, [bold]{numbers[1]}[/] after GRPO"
        )
        console.print(f"run folder: {self.run}\ncurve:      {picture}", highlight=False, soft_wrap=True)
        for line in (
            "try next:",
            *_activation_lines(),
            f"  strop samples {shell_word(self.run)} --limit 5",
            f"  strop eval {shell_word(self.run)} eval.temperature=1 eval.samples_per_prompt=4",
            f"  strop generate {shell_word(self.run)}      (type: reverse: abcd)",
        ):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def _activation_lines() -> list[str]:
    """Shell line that puts the command on the PATH, where it is not: `make quickstart` calls it by its path."""
    activate = Path(sys.prefix, "bin", "activate")
    if shutil.which("strop") or not activate.is_file():
        return []
    folder = Path.cwd()
    return [f"  source {activate.relative_to(folder) if activate.is_relative_to(folder) else activate}"]


def _answers(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> list[_Answer]:
    """Five prompts: those that changed first, so that the table shows what was learned."""
    first = {row["id"]: row for row in before}
    rows = sorted(after, key=lambda row: (first[row["id"]]["response"] == row["response"], row["id"]))[
        :NUM_SHOWN
    ]
    return [
        _Answer(
            _question(row["prompt"]),
            str(row["ground_truth"]),
            plain(first[row["id"]]["response"], is_one_line=True),
            plain(row["response"], is_one_line=True),
        )
        for row in rows
    ]


def _question(prompt: str) -> str:
    """The user's words in a rendered prompt."""
    return prompt.replace("<|user|>", "").replace("<|im_end|>", "").replace("<|assistant|>", "").strip()


def _marked(answer: str, ground_truth: str) -> Text:
    is_right = answer.strip() == ground_truth
    return Text(f"{answer} {'✓' if is_right else '✗'}", style="green" if is_right else "red")


def start_or_resume(folder: Path, config: Config, *, command: Sequence[str], say: Reporter) -> Start:
    """Start in an absent folder, continue in one that holds a run of this very configuration.

    Raises:
        RunError: the folder holds a run of another configuration.
    """
    if not is_run(folder) or not (folder / CONFIG_FILE).is_file():
        if is_run(folder):  # it died between its first two files; nothing is lost with them
            (folder / "run.json").unlink()
        return start_run(folder, config, command=command, say=say)

    def refuse_others(text: str) -> None:
        with trust.door():  # to compare settings runs nothing of what they name
            trust.close(str(folder))
            there = with_absolute_paths(read(folder / CONFIG_FILE, text=text))
            is_same = there == with_absolute_paths(config)
        if not is_same:
            raise RunError(
                f"{folder} holds a run with other settings (see "
                f"`strop config show --config {shell_word(folder / CONFIG_FILE)}`); continue that one with "
                f"--resume, or choose another folder with --out"
            )

    return resume_run(folder, say=say, admit=refuse_others)
