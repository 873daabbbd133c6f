"""The reward function behind a process border: `await pool.score(...)` always comes back with an outcome.

The caller waits for one future per sample. The supervisor's thread resolves it when the worker answers, when
the sample's deadline ends, or when the pool is closed; see supervisor.py.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome, RewardError
from strop.rewards.supervisor import Call, Supervisor
from strop.rewards.wire import encode
from strop.rewards.worker import Launch
from strop.trajectory import Prompt, Trajectory

_CLOSE_S = 10.0
"""Limit for ending the worker processes, in seconds; they are killed after a tenth of it."""
_MAX_PROBES = 4
"""Samples that the preflight scores; enough to tell a broken function from a bad answer."""


class RewardPool:
    """Worker processes that run one reward function; use as `async with RewardPool(config) as pool:`."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.label = f"{config.name} in {Path(config.path).name}" if config.path else "the built-in scorer"
        """What sentences call the function."""
        self._supervisor: Supervisor | None = None
        self._style = ""
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Start the workers and load the function in each.

        Raises:
            RewardError: the file is missing, cannot be imported, or has no such function.
        """
        if self._supervisor is not None:
            raise RuntimeError("the reward pool runs already; call start once")
        config = self.config
        path, source = _read_source(config.path)
        self._supervisor = Supervisor(
            Launch(
                path=path,
                source=source,
                name=config.name,
                kwargs=config.kwargs,
                max_memory_gib=config.max_memory_gib,
            ),
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            start_timeout_s=config.start_timeout_s,
            label=self.label,
        )  # fmt: skip
        self._supervisor.start()
        try:
            self._style = await asyncio.wrap_future(self._supervisor.ready)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End the workers. Samples still being scored get an error outcome."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        supervisor.stop("the reward pool was closed")
        if not await asyncio.to_thread(supervisor.join, _CLOSE_S):
            raise RuntimeError(f"the reward workers did not end within {_CLOSE_S:g} s of being killed")

    async def score(self, prompt: Prompt, trajectory: Trajectory, solution_str: str) -> Outcome:
        """Score one finished trajectory.

        Args:
            prompt: the row it answers; its ground truth, columns and extra_info reach the function.
            trajectory: its turn count and extra facts are added to extra_info.
            solution_str: the decoded response.
        """
        return await self.score_text(
            prompt,
            solution_str,
            num_turns=trajectory.num_turns,
            extra=trajectory.extra,
            response_ids=trajectory.response_ids,
        )

    async def score_text(
        self,
        prompt: Prompt,
        solution_str: str,
        *,
        num_turns: int = 2,
        extra: Mapping[str, Any] | None = None,
        response_ids: Sequence[int] = (),
    ) -> Outcome:
        """Score an answer that comes from no trajectory: a probe, or a saved sample that is scored again."""
        if self._supervisor is None:
            raise RuntimeError("the reward pool is not running; use `async with RewardPool(config) as pool:`")
        call: dict[str, Any] = {
            "data_source": prompt.data_source,
            "solution_str": solution_str,
            "ground_truth": prompt.ground_truth,
            "extra_info": {
                **prompt.extra_info, "num_turns": num_turns, "rollout_reward_scores": {}, **(extra or {}),
            },
        }  # fmt: skip
        if self._style == "trl":
            call |= _trl_fields(prompt, solution_str, response_ids)
        number = next(self._numbers)
        try:
            line = encode([number, call])
        except (TypeError, ValueError) as error:
            return Outcome(
                kind="error",
                error=f"sample of {prompt.uid} cannot be scored: {error}; keep extra_info plain data",
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        self._supervisor.submit(Call(number=number, line=line, loop=loop, future=future))
        return await future

    async def preflight(self, prompts: Sequence[Prompt], solutions: Sequence[str]) -> list[Outcome]:
        """Score a few probes before training; at most four are used.

        Returns:
            The outcomes; one that failed among others that did not is the caller's to report.

        Raises:
            RewardError: every probe failed; the sentence says what the function did.
        """
        probes = list(zip(prompts, solutions, strict=True))[:_MAX_PROBES]
        if not probes:
            raise ValueError("the reward preflight needs at least one prompt and one answer")
        outcomes = await asyncio.gather(*(self.score_text(prompt, text) for prompt, text in probes))
        if all(outcome.kind != "score" for outcome in outcomes):
            raise RewardError(_verdict(outcomes, self.config.path))
        return list(outcomes)


def _verdict(outcomes: Sequence[Outcome], path: str) -> str:
    count = "the one probe" if len(outcomes) == 1 else f"all {len(outcomes)} probes"
    where = f" ({path})" if path else ""
    if all(outcome.kind == "timeout" for outcome in outcomes):
        advice = "make it faster, or raise reward.timeout_s"
    elif path:
        advice = "repair the function; training has not started"
    else:
        advice = "repair the data, or set reward.path to a scorer of your own; training has not started"
    return f"the reward function failed on {count}{where}: {outcomes[0].error}. What to do: {advice}"


def _read_source(path: str) -> tuple[str, str]:
    """Absolute path and text of the reward file; two empty strings for the built-in scorers."""
    if not path:
        return "", ""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        kind = "a folder" if file.is_dir() else "missing"
        raise RewardError(
            f"reward.path is {path!r}, but {file} is {kind}; name a Python file, relative to the current "
            f"directory"
        )
    try:
        return str(file), file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RewardError(f"reward.path is {path!r}, but it cannot be read: {error}") from error


def _trl_fields(prompt: Prompt, solution_str: str, response_ids: Sequence[int]) -> dict[str, Any]:
    """What TRL hands to a reward function: texts for a text prompt, message lists for a conversation."""
    text_prompt = prompt.columns.get("prompt")
    is_text = isinstance(text_prompt, str)
    return {
        "prompt": text_prompt if is_text else list(prompt.messages),
        "completion": solution_str if is_text else [{"role": "assistant", "content": solution_str}],
        "completion_ids": list(response_ids),
        "columns": {name: value for name, value in prompt.columns.items() if name != "prompt"},
    }
