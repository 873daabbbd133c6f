"""How many of our functions one prompt passes on its way from the file to the weights, and in how many forms.

    python benchmarks/prompt_path.py [--list]

One step of GRPO with a tiny model, in one process, with the native engine, a reward function and single turns. Counted
is every function of strop that hands the prompt on in one of FORMS, until the optimizer has taken its step: it gives
it, or gives it to a function that does; also in the process that scores. Left out are what a step does beside that
(what begins in one of BESIDE: records, metrics, checks), what the forms do with themselves (their own methods, and
strop/protocol, which is how batches are cut and joined), arithmetic on tensors, and functions inside of others.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from machine import machine

import strop
from strop.cli.quickstart.task import write_task
from strop.controller.partition import Partition
from strop.data.chat import Chat
from strop.data.tiny_model import make_tiny_model
from strop.engines.tokens import Tokens
from strop.protocol import DataProto
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rollout.native.request import Request
from strop.rollout.types import TokenOutput
from strop.trainer.loading import load
from strop.trainer.loop import Trainer
from strop.trainer.records import StepRecord
from strop.trainer.rollout_batch import RolloutBatch
from strop.trainer.start import start_run
from strop.workers.episodes import Episode
from strop.workers.reports import EpisodeReport

PACKAGE = str(Path(strop.__file__).parent)
FORMS: dict[type, str] = {
    kind: kind.__name__
    for kind in (
        Prompt, Chat, Request, TokenOutput, Trajectory, Episode, EpisodeReport, RolloutBatch, StepRecord,
        Partition, Tokens,
    )
}  # fmt: skip
"""Values that are the prompt, or what was made of it; rows of files, batches and tensors are told apart below."""
CHILD = """\
import atexit, sys

def _has(value, depth=2):
    if isinstance(value, (bytes, str)):
        mark = '"ground_truth":'  # of a line, not of the source of a function
        return (mark if isinstance(value, str) else mark.encode()) in value
    if isinstance(value, dict):
        return "solution_str" in value or "ground_truth" in value
    return depth > 0 and isinstance(value, (list, tuple)) and any(_has(one, depth - 1) for one in value[:4])

_seen = {{}}

def _hear(frame, event, arg):
    code = frame.f_code
    if event not in ("call", "return") or not code.co_filename.startswith({package!r}) or "<" in code.co_qualname:
        return
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if any(_has(one) for one in ([frame.f_locals.get(name) for name in names] if event == "call" else [arg])):
        handing = frame if event == "return" else frame.f_back
        code = handing.f_code
        if code.co_filename.startswith({package!r}) and "<" not in code.co_qualname and "__init__" not in code.co_name:
            _seen[code.co_filename[len({package!r}) + 1 :] + ":" + code.co_qualname] = None

def _write():
    sys.setprofile(None)
    with open({out!r}, "w") as file:
        file.write("\\n".join(_seen))

if "strop.rewards.worker_main" in " ".join(sys.orig_argv):
    sys.setprofile(_hear)
    atexit.register(_write)
"""
"""Follows the prompt in the process that scores; Python imports it there as it starts."""
BESIDE = {
    "_record", "_metrics", "step_metrics", "log_failures", "_note", "summarize_batch", "_summary", "row_results",
    "check_versions", "_check", "episode_metrics", "digests", "checksums", "save", "on_step_end", "observe", "log",
    "report", "arithmetic", "record_loss", "add", "_count", "read_models", "check_models", "try_reward", "begin",
}  # fmt: skip
"""Where functions begin that the weights do not depend on."""


class Way:
    """The functions that were passed, and the forms that were seen."""

    def __init__(self) -> None:
        self.functions: dict[str, None] = {}
        self.forms: dict[str, None] = {}

    def hear(self, frame: FrameType, event: str, arg: Any) -> None:
        """For sys.setprofile."""
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        values = _arguments(frame) if event == "call" else [arg]
        found = [form for value in values for form in _forms(value, 3)]
        if not found or _is_beside(frame):
            return
        self.forms |= dict.fromkeys(found)
        handing = frame if event == "return" else _caller(frame)
        if handing is not None and _is_station(handing):
            self.functions[_name(handing.f_code)] = None


def _caller(frame: FrameType) -> FrameType | None:
    """The function of ours that has called, through the language or a library."""
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
        caller = caller.f_back
    return caller


def _is_station(frame: FrameType) -> bool:
    code = frame.f_code
    if "<" in code.co_qualname or (code.co_name.startswith("__") and code.co_name != "__call__"):
        return False
    owner = type(frame.f_locals.get("self"))
    is_own = owner in FORMS or code.co_filename.startswith(f"{PACKAGE}/protocol/")
    return not is_own and not isinstance(getattr(owner, code.co_name, None), property)


def _arguments(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        if name != "self" or type(value) not in FORMS:  # who asks a form something does not hand it on
            yield value


def _forms(value: Any, depth: int) -> Iterator[str]:
    """The forms of the prompt in a value."""
    if (name := FORMS.get(type(value))) is not None:
        yield name
    elif isinstance(value, DataProto) and len(value):
        others = value.non_tensor_batch
        yield "DataProto of objects" if "prompt" in others or "episode" in others else "DataProto of rows"
    elif isinstance(value, Mapping):
        if "ground_truth" in value or "reward_model" in value:
            yield "row of the file" if "prompt" in value else "call of the reward"
        elif depth:
            for one in list(value.values())[:4]:
                yield from _forms(one, depth - 1)
    elif isinstance(value, list | tuple) and depth:
        for one in value[:2]:
            yield from _forms(one, depth - 1)


def _is_beside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name in BESIDE and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def _name(code: CodeType) -> str:
    return f"{code.co_filename.removeprefix(PACKAGE + '/')}:{code.co_qualname}"


def settings(folder: Path) -> list[str]:
    """Of a run of one step with one prompt."""
    make_tiny_model(folder / "model", seed=0)
    task = write_task(
        folder / "task", seed=0, num_train=1, num_val=1, num_sft=1, min_letters=3, max_letters=3
    )
    reward = folder / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return ord((solution_str or ' ')[0]) % 8 / 10\n"
    )
    return [
        f"model.path='{folder / 'model'}'", f"data.train_files=['{task.train}']", "data.prompts_per_step=1",
        "data.max_prompt_tokens=24", "data.max_response_tokens=5", "rollout.samples_per_prompt=2",
        f"reward.path='{reward}'", "reward.num_workers=1", "trainer.max_steps=1", "trainer.preflight=false",
        "trainer.trackers=[]", "eval.every=0", "run.save_every=0", "run.save_samples=false",
        "resources.num_threads=1", "resources.device=cpu", "run.hf_model=never",
    ]  # fmt: skip


def follow(folder: Path) -> Way:
    """Carry out the run."""
    path, child = Way(), folder / "child"
    child.mkdir()
    code = CHILD.format(package=PACKAGE, out=str(child / "seen"))
    (child / "sitecustomize.py").write_text(code)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(child), os.environ.get("PYTHONPATH", "")])
    config = load(overrides=settings(folder))
    start = start_run(folder / "run", config, command=["prompt_path"], say=lambda line: None)
    with start.run as run:
        threading.setprofile(path.hear)
        sys.setprofile(path.hear)
        try:
            Trainer(config, run, checkpoint=None, say=lambda line: None, force=True).fit()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    path.functions |= dict.fromkeys((child / "seen").read_text().split())
    return path


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function and form too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = follow(Path(folder))
    if args.list:
        print("\n".join([*path.functions, "", *path.forms, ""]))
    counts = {"functions": len(path.functions), "forms": len(path.forms)}
    print(json.dumps({"benchmark": "prompt_path", **counts, "machine": machine()}))


if __name__ == "__main__":
    main()
