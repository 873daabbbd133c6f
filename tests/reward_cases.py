"""Prompts, reward files and one call that scores: what the tests of this folder share."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from strop.protocol.trajectory import Prompt, Trajectory
from strop.rewards import Outcome, RewardConfig, RewardPool

DEADLINE_S = 0.3


def make_prompt(
    *, ground_truth: Any = "12", data_source: str = "strop/exact", columns: Mapping[str, Any] | None = None
) -> Prompt:
    return Prompt(
        uid="e0-000003",
        row=3,
        token_ids=(5, 6),
        messages=({"role": "user", "content": "7 + 5 = ?"},),
        data_source=data_source,
        ground_truth=ground_truth,
        extra_info={"index": 3},
        columns=columns or {},
    )


def make_trajectory(**fields: Any) -> Trajectory:
    return Trajectory(uid="e0-000003", sample_index=0, prompt_ids=(5, 6), **fields)


def write_reward(folder: Path, source: str) -> str:
    file = folder / "my_reward.py"
    file.write_text(textwrap.dedent(source))
    return str(file)


def score_all(config: RewardConfig, texts: list[str], prompt: Prompt | None = None) -> list[Outcome]:
    async def run() -> list[Outcome]:
        async with RewardPool(config) as pool:
            return await asyncio.gather(
                *(pool.score(prompt or make_prompt(), make_trajectory(), text) for text in texts)
            )

    return asyncio.run(run())


def score_one(folder: Path, source: str, **fields: Any) -> Outcome:
    prompt = fields.pop("prompt", None)
    fields = {"num_workers": 1, "timeout_s": DEADLINE_S, **fields}
    (outcome,) = score_all(RewardConfig(path=write_reward(folder, source), **fields), ["12"], prompt)
    return outcome


FAULTS = """
import ctypes, os, time
def compute_score(solution_str, **_):
    match solution_str:
        case "sleep": time.sleep(1e6)
        case "spin":
            while True: pass
        case "raise": raise KeyError("x")
        case "exit": os._exit(1)
        case "segfault": ctypes.string_at(8)
        case "nan": return float("nan")
        case "text": return "1.0"
    return int(solution_str) / 7
"""


def reward_processes() -> list[psutil.Process]:
    """The scoring processes that this process has started; sandboxes of other tests are none."""
    words = {one: " ".join(one.cmdline()) for one in psutil.Process().children()}
    return [one for one, line in words.items() if "strop.rewards" in line and "sandbox.launcher" not in line]
