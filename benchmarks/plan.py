"""`strop plan` beside real runs on this machine: most memory of a process, and seconds of a step.

    make bench BENCH=plan ARGS=--json

prints one JSON line; without `--json` a line per case before it. Each case is a program of its own, `strop train` with
a random model whose answers all reach their limit (on Ray: one process per rank). Measured are VmHWM of the process
with the model, and the second of two steps, in seconds of the processor, which other programs do not lengthen.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine
from name_lists import names_of
from plan_cases import CASES, DRAWN, FURTHER, SECOND_DRAW, Case
from tokenizers import Regex, Tokenizer
from tokenizers.pre_tokenizers import Split
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    GPTNeoXConfig,
    PreTrainedTokenizerFast,
)

from strop.data.tiny_model import make_tiny_tokenizer
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.engines.multimodal.inputs import language_model_class
from strop.trainer.loading import load
from strop.trainer.plan.baseline import baseline
from strop.trainer.plan.meta_model import PassForm
from strop.trainer.plan.parameters import Axes, model_sizes, share_of
from strop.trainer.plan.plan import make_plan
from strop.trainer.plan.state_memory import optimizer_bytes
from strop.trainer.train import train  # noqa: F401  (imported before the forks)

STEPS = 2
LIMIT_S = 690.0
"""After which no further case is begun."""
CASE_LIMIT_S = 180.0
"""Of the run of a case."""
GRACE_S = 20.0
"""For a run that is asked to end."""
REWARD = '''\
import random


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """By chance: every group has something to teach, and every row a gradient."""
    return random.random()
'''


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line in place of a line per case")
    parser.add_argument(
        "--cases",
        type=names_of(CASES | FURTHER | DRAWN | SECOND_DRAW, separator="|"),
        default=list(CASES),
        help="names of cases (plan_cases.py): NAME|NAME (default: all of CASES)",
    )
    parser.add_argument("--published", action="store_true", help="compare with two papers; nothing is run")
    parser.add_argument("--folder", help="keep the runs here")
    arguments = parser.parse_args()
    if arguments.published:
        with tempfile.TemporaryDirectory() as temporary:
            print(json.dumps({"benchmark": "plan", "published": published(Path(temporary))}))
        return
    torch.set_num_threads(
        1
    )  # as the runs have; a forked child would wait for ever for threads of this process
    cases = CASES | FURTHER | DRAWN | SECOND_DRAW
    names: list[str] = arguments.cases
    for on_ray in {cases[name].ranks > 1 for name in names}:
        baseline(uses_ray=on_ray, is_one_of_several=on_ray)  # once for all children
    where, report, failed, end = machine(), {}, {}, time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        for name in names:
            if time.monotonic() > end:
                break
            try:
                report[name] = measured(cases[name], folder / name.replace(" ", "_").replace(",", ""))
            except CaseError as error:
                failed[name] = str(error)
            if not arguments.json:
                print(name, json.dumps(report.get(name, failed.get(name))), flush=True)
    ratios = {key: [case[key] for case in report.values()] for key in ("memory_ratio", "time_ratio")}
    worst = {key: max((abs(value - 1) for value in values), default=None) for key, values in ratios.items()}
    left = [name for name in names if name not in {*report, *failed}]
    whole = {"benchmark": "plan", "machine": where, "cases": report, "worst": worst, "not_run": left}
    print(json.dumps({**whole, "failed": failed}))
    if failed:
        raise SystemExit(1)


class CaseError(Exception):
    """A plan or a run of a case that failed, with the end of what it wrote."""


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """Prediction and measurement of a case."""
    folder.mkdir(parents=True, exist_ok=True)
    overrides = settings_of(case, folder)
    start = time.perf_counter()
    pid = forked(partial(predict, case, overrides, folder / "plan.json"), folder / "plan.log")
    ended(pid, folder / "plan.log")
    planned = json.loads((folder / "plan.json").read_text())
    peak_bytes, seconds = run(overrides, folder / "run", ranks=case.ranks)
    return {
        "peak_mib": round(peak_bytes / 2**20),
        "planned_mib": round(planned["peak_bytes"] / 2**20),
        "memory_ratio": round(planned["peak_bytes"] / peak_bytes, 3),
        "step_processor_s": round(seconds, 3),
        "step_wall_s": round(wall_seconds(folder / "run", "step"), 3),
        "stages_wall_s": {name: round(wall_seconds(folder / "run", name), 3) for name in planned["stages"]},
        "planned_s": round(planned["step_seconds"], 3),
        "time_ratio": round(planned["step_seconds"] / seconds, 3),
        **{name: planned[name] for name in ("baseline_mib", "peak_phase", "stages")},
        "wall_s": round(time.perf_counter() - start, 1),
    }


PUBLISHED = {
    # parameters: heads, hidden, layers, tensor, pipeline, GPUs, sequences, of a micro-batch, TFLOP/s of a GPU
    "1.7 B": (24, 2304, 24, 1, 1, 32, 512, 16, 137),
    "7.5 B": (32, 4096, 36, 4, 1, 128, 512, 16, 142),
    "18.4 B": (48, 6144, 40, 8, 1, 256, 1024, 8, 135),
    "145.6 B": (96, 12288, 80, 8, 8, 1536, 2304, 2, 148),
}
"""Of Narayanan et al. 2021, arXiv:2104.04473, table 1: GPT on A100-80GB, 2,048 tokens a sequence, vocabulary of 51,200,
activations computed again. Sizes, axes and batches are those of examples/sc21/run_table_1.sh of NVIDIA/Megatron-LM, and
the last column is what two texts that quote the table print; the paper itself was not at hand."""
ZERO_3_GB = 1.9
"""State of 7.5 B parameters on each of 64 devices, Rajbhandari et al. 2019, arXiv:1910.02054, figure 1; texts about the
paper print the same."""


def published(folder: Path) -> dict[str, Any]:
    """Plans beside what two papers print."""
    rows: dict[str, Any] = {
        "state of 7.5 B on 64 devices": {"published_gb": ZERO_3_GB, "planned_gb": zero_3_gb()}
    }
    for name, (
        heads,
        hidden,
        layers,
        tensor,
        pipeline,
        ranks,
        sequences,
        each,
        teraflops,
    ) in PUBLISHED.items():
        model = folder / name.replace(" ", "")
        GPTNeoXConfig(
            hidden_size=hidden, num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=4 * hidden,
            vocab_size=51200, max_position_embeddings=2048,
        ).save_pretrained(model)  # fmt: skip
        settings = [
            f"model.path='{model}'", "model.dtype=bfloat16", "model.gradient_checkpointing=true",
            "data.train_files=[x]", "reward.path=x", "data.max_prompt_tokens=8", "data.max_response_tokens=2040",
            f"data.prompts_per_step={sequences // 2}", "rollout.samples_per_prompt=2", "resources.runtime=ray",
            f"resources.ranks={ranks}", f"actor.engine.max_tokens_per_device={2048 * each}",
            f"actor.engine.tensor_parallel={tensor}", f"actor.engine.pipeline_parallel={pipeline}",
        ]  # fmt: skip
        config = load(None, overrides=settings)
        plan = make_plan(config, device="a100", mean_response_tokens=2040, prompt_tokens=8, advises=False)
        tokens = sequences * 2048
        attention, head = 1 + 2048 / (6 * hidden), 51200 / (16 * layers * hidden)
        seconds = 96 * tokens * layers * hidden**2 * (attention + head) / (teraflops * 1e12 * ranks)
        planned = plan.seconds_by_stage["update_actor"]
        rows[name] = {
            "published_s": round(seconds, 2),
            "planned_s": round(planned, 2),
            "ratio": round(planned / seconds, 3),
            "fits": plan.peak_bytes <= plan.memory_bytes,
        }
    return rows


def zero_3_gb() -> float:
    """Weights, gradients and AdamW's moments of 7.5 B parameters on one of 64 ranks."""
    form, engine = PassForm(compute_dtype=torch.bfloat16), EngineConfig()
    sizes = model_sizes(GPTNeoXConfig(hidden_size=4096, num_hidden_layers=36, intermediate_size=16384), form)
    held = share_of(sizes, Axes.of(engine, 64), engine, 0).held
    state = 4 * (held.total + held.trained) + optimizer_bytes(held, OptimizerConfig(), 4)
    return round(state / 1e9, 2)


def predict(case: Case, overrides: list[str], file: Path) -> int:
    """Write the plan of a run."""
    plan = make_plan(
        load(None, overrides=overrides), mean_response_tokens=case.response, prompt_tokens=case.prompt
    )
    record = {
        "peak_bytes": plan.peak_bytes,
        "step_seconds": plan.step_seconds,
        "baseline_mib": round(plan.baseline_bytes / 2**20),
        "peak_phase": plan.peak_phase,
        "stages": {name: round(value, 3) for name, value in plan.seconds_by_stage.items()},
    }
    file.write_text(json.dumps(record))
    return 0


def forked(function: Callable[[], int], log: Path) -> int:
    """Run a function in a child, which has the imports of this process; the child's id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.alarm(int(CASE_LIMIT_S))  # ends a child that waits for ever
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = function()
        sys.stdout.flush()
    finally:
        os._exit(code)


def ended(pid: int, log: Path) -> None:
    """Wait for a child, which must succeed.

    Raises:
        CaseError: it did not.
    """
    _, status = os.waitpid(pid, 0)
    if status:
        raise CaseError(f"it failed: {log.read_text()[-2000:]}")


def settings_of(case: Case, folder: Path) -> list[str]:
    """The run's settings, and its files."""
    make_model(folder / "model", case.model)
    if any("{reward_model}" in setting for setting in case.settings):
        make_reward_model(folder / "model", folder / "reward_model")
    (folder / "reward.py").write_text(REWARD)
    prompt = "a" * (case.prompt - 3)  # a header, an end of turn and a header are beside it
    rows = [
        {"prompt": [{"role": "user", "content": f"{number:03d}{prompt[3:]}"}], "ground_truth": "1"}
        for number in range(64)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"model.path='{folder / 'model'}'",
        f"data.train_files=['{folder / 'train.jsonl'}']",
        f"data.prompts_per_step={case.prompts}",
        "data.ground_truth_key=ground_truth",
        "data.default_data_source=plan",
        f"data.max_prompt_tokens={case.prompt}",
        f"data.max_response_tokens={case.response}",
        f"rollout.samples_per_prompt={case.samples}",
        f"reward.path='{folder / 'reward.py'}'",
        "reward.num_workers=1",
        f"trainer.max_steps={STEPS}",
        "trainer.trackers=[jsonl]",
        "trainer.preflight=false",
        "actor.optim.lr=1e-6",
        "eval.every=0",
        "eval.before_train=false",
        "run.hf_model=never",
        "run.save_samples=false",
        "resources.num_threads=1",
        *(
            setting.replace("{reward_model}", f"{folder}/reward_model").replace("{model}", f"{folder}/model")
            for setting in case.settings
        ),
    ]
    if case.ranks > 1:
        ranks = case.ranks - any("apart={" in setting for setting in case.settings)
        settings += ["resources.runtime=ray", f"resources.ranks={ranks}", "resources.cpus_per_rank=0.5"]
    return settings


def make_model(folder: Path, settings: Mapping[str, Any]) -> None:
    """A random model that never ends an answer, and never gives the same one twice: its tokens are nearly as likely as
    each other, but for the end, which points away from what all of them have in common."""
    tokenizer = tokenizer_of(settings["vocab_size"])
    heads = settings["hidden_size"] // 64
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    every: dict[str, Any] = {
        "model_type": "qwen3", "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2), "head_dim": 64,
        "tie_word_embeddings": True, "max_position_embeddings": 4096, "bos_token_id": None, "dtype": "float32", **ends,
        **settings,
    }  # fmt: skip
    if vision := every.pop("vision_config", None):
        kind, tied = every.pop("model_type"), every["tie_word_embeddings"]
        every = {
            "model_type": kind,
            "text_config": every,
            "vision_config": vision,
            "image_token_id": tokenizer.vocab_size - 1,
            "video_token_id": tokenizer.vocab_size - 2,
            "vision_start_token_id": tokenizer.vocab_size - 3,
            "vision_end_token_id": tokenizer.vocab_size - 4,
            "tie_word_embeddings": tied,
            **ends,
        }
    config = AutoConfig.for_model(**every)
    torch.manual_seed(0)
    model = language_model_class(config).from_config(config, dtype=torch.float32)
    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for table in tables[: 1 + (tables[0] is not tables[1])]:
            table.normal_(std=0.2 / settings["hidden_size"] ** 0.5)
            table[:, 0] += 1
        tables[1][tokenizer.eos_token_id, 0] = -1
    model.to(getattr(torch, settings.get("dtype", "float32")))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_reward_model(model: Path, folder: Path) -> None:
    """A random reward model of the form of a model."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(model, num_labels=1)
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def tokenizer_of(size: int) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with so many tokens: ids without a token would be banned, of which models have few. Text of
    some tokens is of as many for a reward model that reads it."""
    tiny = make_tiny_tokenizer()
    tiny.backend_tokenizer.pre_tokenizer = Split(Regex("<[0-9]+>"), "isolated")
    state = json.loads(tiny.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    state["model"]["ignore_merges"] = True  # a piece that is a token is taken whole
    vocabulary |= {f"<{number}>": number for number in range(len(vocabulary), size)}
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types here
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=tiny.eos_token,
        pad_token=tiny.pad_token, unk_token=tiny.unk_token,
    )  # fmt: skip
    tokenizer.chat_template = tiny.chat_template
    return tokenizer


def run(overrides: list[str], folder: Path, *, ranks: int) -> tuple[int, float]:
    """Carry out a run: the most memory that a process with a model took, and its processor seconds of a step.

    Raises:
        CaseError: it failed, or took too long.
    """
    log = folder.with_suffix(".log")
    program = [sys.executable, "-m", "strop", "train", "--out", str(folder), *overrides]
    with log.open("wb") as output:
        process = subprocess.Popen(program, stdout=output, stderr=output)
    seen = Seen(metrics=folder / "metrics.jsonl", ranks=ranks)
    end = time.monotonic() + CASE_LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < end:
            seen.look(process.pid)
            time.sleep(0.02)
        seen.look(process.pid)  # a last line, of a process that may be gone
    finally:
        stop(process)
    if process.returncode or not {STEPS - 1, STEPS} <= set(seen.at_step):
        raise CaseError(f"it failed, or took more than {CASE_LIMIT_S:.0f} s: {log.read_text()[-2000:]}")
    return max(seen.peaks.values()), seen.at_step[STEPS] - seen.at_step[STEPS - 1]


@dataclass(kw_only=True)
class Seen:
    """What is seen of a run."""

    metrics: Path
    ranks: int
    peaks: dict[int, int] = field(default_factory=dict)
    """Most bytes of each process with a model."""
    seconds: float = 0.0
    """Of the processor, as last seen, of the process that has taken most."""
    at_step: dict[int, float] = field(default_factory=dict)
    """The same when so many steps were first seen to have ended."""

    def look(self, pid: int) -> None:
        """Look at a run once."""
        pids = [pid] if self.ranks == 1 else ray_workers(pid)
        for one in pids:
            self.peaks[one] = max(self.peaks.get(one, 0), high_water(one))
            self.seconds = max(self.seconds, processor_seconds(one))
        if self.metrics.exists():
            self.at_step.setdefault(self.metrics.read_text().count("\n"), self.seconds)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a run that has not ended: it ends its own processes when it is asked to."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def high_water(pid: int) -> int:
    """VmHWM of a process in bytes; 0 of one that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def processor_seconds(pid: int) -> float:
    """Processor time of a process; 0 of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ray_workers(pid: int) -> list[int]:
    """Descendants of a process that Ray runs actors in."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
    found = []
    for child in parents:
        at = child
        while at in parents and at != pid:
            at = parents[at]
        if at == pid:
            try:
                name = Path(f"/proc/{child}/cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::"):
                found.append(child)
    return found


def rows_of(folder: Path) -> list[dict[str, float]]:
    """The metrics of the steps behind the first."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("step", 0) > 1]


def wall_seconds(folder: Path, stage: str) -> float:
    """Median seconds of a stage of the steps behind the first; 0 where none is timed."""
    key = f"timing_s/{stage}"
    return statistics.median([row[key] for row in rows_of(folder) if key in row] or [0.0])


if __name__ == "__main__":
    main()
