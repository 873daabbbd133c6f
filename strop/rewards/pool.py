"""The reward behind a process border: `await pool.score(...)` always comes back with an outcome.

Functions run in worker processes: the caller waits for one future per sample, which the supervisor's thread resolves
when the worker answers, when the sample's deadline ends, or when the pool is closed; see supervisor.py. A judge and a
reward model on a server are asked at the same time, from threads of their own; see remote/client.py. What could not be
scored is scored again, or given a score in its place, as reward.on_failure says.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from strop.base.foreign_files import read_text
from strop.base.trust import ask
from strop.border import encodable, storable, usable
from strop.border.values import MAX_NUMBER
from strop.judges.client import CallFailed
from strop.judges.judge import Judge
from strop.judges.server import RewardServer
from strop.rewards.combining import Part, combine
from strop.rewards.config import RewardConfig
from strop.rewards.outcome import Outcome, RewardError
from strop.rewards.supervisor import Call, Supervisor
from strop.rewards.wire import encode, plain
from strop.rewards.worker import Launch
from strop.sandbox.opening import config_as_data
from strop.trajectory import Prompt, Trajectory

_CLOSE_S = 10.0
MAX_SOURCE_BYTES = 2**24
"""Of a Python file."""
"""Limit for ending the worker processes, in seconds; they are killed after a tenth of it."""
_MAX_PROBES = 4
"""Samples that the preflight scores; enough to tell a broken function from a bad answer."""


class RewardPool:
    """Worker processes that run one reward function; use as `async with RewardPool(config) as pool:`."""

    def __init__(
        self,
        config: RewardConfig,
        *,
        tokenizer: str = "",
        rank: int = 0,
        count: int = 1,
        logs: Path | None = None,
    ) -> None:
        """Args:
        config: of the reward.
        tokenizer: folder of the policy's tokenizer, which a reward manager is given.
        logs: folder for what the functions print; None keeps only what is shown.
        rank, count: which of how many pools this is that score for one run; they share the limits of services.

        Raises:
            ValueError: the limits cannot be shared by so many.
        """
        self.config = config
        self._tokenizer = tokenizer
        self._log_file = None if logs is None else logs / (f"reward-{rank}.log" if rank else "reward.log")
        self.label = _label(config)
        """What sentences call the functions."""
        self._judge = Judge(config.judge, rank=rank, count=count) if config.judge.base_url else None
        self._server = RewardServer(config.server, rank=rank, count=count) if config.server.url else None
        self._is_running = False
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
            RewardError: the file is missing, cannot be imported, or has no such function; or a service needs a key
                that the environment does not have.
            UntrustedCode: received settings name a file or a service.
        """
        if self._is_running:
            raise RuntimeError("the reward pool runs already; call start once")
        if self.config.manager and not self._tokenizer:
            raise RewardError(
                "reward.manager needs the tokenizer of a model, and there is none here: set model.path"
            )
        self._ask()
        self._is_running = True
        try:
            if self._judge is not None:
                self._judge.client.start()
            if self._server is not None:
                self._server.start()
            if self.config.uses_functions:
                await self._start_workers(self.config)
        except BaseException:
            await self.close()
            raise

    def _ask(self) -> None:
        """Pass the door with everything that is run or contacted."""
        config = self.config
        sandbox = config.sandbox
        service = "" if sandbox.backend == "local" else f"{sandbox.backend} {sandbox.url}".strip()
        for key, named in (
            ("reward.path", config.path),
            *(("reward.functions", function.path) for function in config.functions),
            ("reward.judge.base_url", config.judge.base_url),
            ("reward.server.url", config.server.url),
            ("reward.sandbox.url" if sandbox.url else "reward.sandbox.backend", service),
            ("reward.sandbox.python", sandbox.python),
            ("reward.sandbox.read_only_paths", ", ".join(sandbox.read_only_paths)),
        ):
            if named:
                ask(key, named)

    async def _start_workers(self, config: RewardConfig) -> None:
        self._supervisor = Supervisor(
            Launch(
                functions=_functions(config, self._tokenizer),
                module="managers" if config.manager else "child",
                max_memory_gib=config.max_memory_gib,
                timeout_s=config.timeout_s,
                sandbox=config_as_data(config.sandbox),
            ),
            num_workers=config.num_workers,
            timeout_s=config.timeout_s,
            start_timeout_s=config.start_timeout_s,
            label=self.label,
            log_file=self._log_file,
        )  # fmt: skip
        self._supervisor.start()
        self._style = await asyncio.wrap_future(self._supervisor.ready)

    async def close(self) -> None:
        """End the workers. Samples still being scored get an outcome without a score."""
        self._is_running = False
        for service in (self._judge, self._server):
            if service is not None:
                await service.client.close()
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        supervisor.stop("the reward pool was closed")
        if not await asyncio.to_thread(supervisor.join, _CLOSE_S):
            raise RuntimeError(f"the reward workers did not end within {_CLOSE_S:g} s of being killed")

    @property
    def spent(self) -> float:
        """What the judge has cost in this process."""
        return 0.0 if self._judge is None else self._judge.purse.spent

    def tell_spent(self, run_spent: float) -> None:
        """What the judge has cost the run so far, in all its processes and starts (reward.judge.max_cost)."""
        if self._judge is not None:
            self._judge.purse.tell(run_spent)

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
        if not self._is_running:
            raise RuntimeError("the reward pool is not running; use `async with RewardPool(config) as pool:`")
        on_failure, usage = self.config.on_failure, dict[str, float]()
        for attempt in range(self.config.retries + 1):
            outcome = await self._attempt(
                prompt, solution_str, num_turns, extra or {}, response_ids, fresh=attempt > 0
            )
            _add(usage, outcome.usage)
            then = "" if outcome.kind == "score" else getattr(on_failure, outcome.kind)
            if then != "retry" or not self._is_running:
                break
        stand_in = self.config.failed_score if then == "fixed" else None
        return replace(outcome, stand_in=stand_in, usage=usage)

    async def _attempt(
        self,
        prompt: Prompt,
        solution_str: str,
        num_turns: int,
        extra: Mapping[str, Any],
        response_ids: Sequence[int],
        *,
        fresh: bool,
    ) -> Outcome:
        """Ask everything that scores, at the same time; the first of them that fails decides."""
        if self._judge is None and self._server is None:
            return await self._call_functions(prompt, solution_str, num_turns, extra, response_ids)
        started = time.monotonic()
        asked: list[Coroutine[Any, Any, Outcome | tuple[Part, dict[str, float]]]] = []
        if self.config.uses_functions:
            asked.append(self._call_functions(prompt, solution_str, num_turns, extra, response_ids))
        question, reference = _texts(prompt)
        if self._judge is not None:
            asked.append(self._judge.score(question, solution_str, reference, fresh=fresh))
        if self._server is not None:
            item = {
                "prompt": question, "messages": plain(prompt.messages), "response": solution_str,
                "data_source": prompt.data_source, "ground_truth": plain(prompt.ground_truth),
            }  # fmt: skip
            asked.append(self._server.score(item, fresh=fresh))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return self._joined(answers, time.monotonic() - started)

    def _joined(
        self, answers: Sequence[Outcome | tuple[Part, dict[str, float]] | BaseException], seconds: float
    ) -> Outcome:
        """One outcome from those of all that score."""
        usage: dict[str, float] = {}
        failure: Outcome | None = None
        parts: list[Part] = []
        for answer in answers:
            if isinstance(answer, CallFailed):
                _add(usage, answer.usage)
                failure = failure or Outcome(kind=answer.kind, error=str(answer), seconds=seconds)
            elif isinstance(answer, BaseException):
                raise answer
            elif isinstance(answer, tuple):
                _add(usage, answer[1])
                parts.append(answer[0])
            elif answer.score is None or len(answers) == 1:
                failure = failure or answer
            else:
                named = {} if self.config.functions else {self.config.part: answer.score}
                parts.append(Part(key="", score=answer.score, parts={**named, **answer.parts}))
        if failure is not None:
            return replace(failure, usage=usage)
        score, merged = combine(parts)
        assert score is not None, (
            "judges and servers always give a number, and functions that give none have failed"
        )
        if usable(score) is None:
            sentence = f"the sum of the scores is {score}, beyond {MAX_NUMBER:g}"
            return Outcome(kind="error", error=sentence, seconds=seconds, usage=usage)
        return Outcome(kind="score", score=score, parts=merged, seconds=seconds, usage=usage)

    async def _call_functions(
        self,
        prompt: Prompt,
        solution_str: str,
        num_turns: int,
        extra: Mapping[str, Any],
        response_ids: Sequence[int],
    ) -> Outcome:
        if self._supervisor is None:
            return Outcome(kind="infrastructure", error="not scored: the reward pool was closed")
        call: dict[str, Any] = {
            "data_source": prompt.data_source,
            "solution_str": solution_str,
            "ground_truth": prompt.ground_truth,
            "extra_info": {
                **prompt.extra_info, "num_turns": num_turns, "rollout_reward_scores": {}, "turn_scores": [],
                "tool_rewards": [], **extra,
            },
        }  # fmt: skip
        if self._style == "manager":
            call |= _trl_fields(prompt, solution_str, response_ids)
            call |= {
                "prompt_ids": list(prompt.token_ids),
                "messages": plain(prompt.messages),
                "uid": prompt.uid,
            }
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


def _add(total: dict[str, float], usage: Mapping[str, float]) -> None:
    for name, value in usage.items():
        total[name] = total.get(name, 0.0) + value


def _label(config: RewardConfig) -> str:
    names = [
        f"{one.name} in {Path(one.path).name}" if one.path else "the built-in scorer"
        for one in config.functions
    ]
    if config.manager:
        names = [f"{config.manager} in {Path(config.path).name}"]
    elif not config.functions and config.uses_functions:
        names = [f"{config.name} in {Path(config.path).name}" if config.path else "the built-in scorer"]
    names += ["the judge"] if config.judge.base_url else []
    names += ["the reward server"] if config.server.url else []
    return ", ".join(names)


def _texts(prompt: Prompt) -> tuple[str, str]:
    """Question and right answer as text; the answer is empty where there is none."""
    messages = [
        (str(message.get("role", "")), _content(message.get("content"))) for message in prompt.messages
    ]
    is_plain = len(messages) == 1
    question = messages[0][1] if is_plain else "\n\n".join(f"{role}: {text}" for role, text in messages)
    truth = "" if prompt.ground_truth is None else prompt.ground_truth
    answer = truth if isinstance(truth, str) else json.dumps(storable(truth), ensure_ascii=False)
    return encodable(question), encodable(answer)


def _content(content: Any) -> str:
    """Text of a message; other kinds of content are named."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else []
    texts = [
        str(part.get("text") or f"<{part.get('type', 'part')}>")
        for part in parts
        if isinstance(part, Mapping)
    ]
    return " ".join(texts)


def _functions(config: RewardConfig, tokenizer: str) -> list[dict[str, Any]]:
    """What a worker process needs to load each function."""
    if config.functions:
        named = [(one.path, one.name, one.kwargs, one.part, one.weight) for one in config.functions]
    else:
        named = [(config.path, config.name, config.kwargs, "", 1.0)]
    setups = []
    for given, name, kwargs, key, weight in named:
        path, source = _read_source(given)
        setups.append(
            {
                "path": path,
                "source": source,
                "name": name,
                "kwargs": kwargs,
                "key": key,
                "weight": weight,
                "manager": config.manager,
                "tokenizer": tokenizer,
            }
        )
    return setups


def _read_source(path: str) -> tuple[str, str]:
    """Absolute path and text of the reward file; two empty strings for the built-in scorers."""
    if not path:
        return "", ""
    file = Path(path).expanduser().resolve()
    if not file.exists() or file.is_dir():
        kind = "a folder" if file.is_dir() else "missing"
        raise RewardError(
            f"reward.path is {path!r}, but {file} is {kind}; name a Python file, relative to the current "
            f"directory"
        )
    try:
        return str(file), read_text(file, limit=MAX_SOURCE_BYTES)
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
