"""An environment as episodes use it: async, with deadlines and checked return values."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
import logging
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Self

from strop.agents.envs.base import EnvironmentFailed, Observation, Step, read_observation, read_step
from strop.agents.envs.gymnasium_env import MAX_INVALID, action_reader
from strop.agents.envs.loading import EnvironmentChoice
from strop.agents.tools.threads import answer_in_thread, call_in_thread, result_of
from strop.agents.user_code import contained
from strop.utils.rng import random_key

logger = logging.getLogger(__name__)

MAX_ANCHOR_CHARS = 2000
"""Of the text of a state; a longer one is known by its beginning and a digest of the whole."""


def episode_seed(uid: str, extra_info: Mapping[str, Any]) -> int:
    """Seed of a prompt's episodes, from 0 to 2^31 - 1: `extra_info.seed`, or else a function of the prompt's uid.

    All samples of the prompt have it; two runs that visit a row at the same time meet the same episode.
    """
    row_seed = extra_info.get("seed")
    if isinstance(row_seed, int) and not isinstance(row_seed, bool):
        return row_seed
    return random_key(0, "environment", uid) >> 33


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def reset_call(reset: Callable[..., Any], seed: int, row: Mapping[str, Any]) -> Callable[[], Any]:
    """The call of an environment's `reset`: (seed, row), or in the form of Gymnasium with those of seed and
    options that it takes."""
    signature = inspect.signature(reset)
    parameters = signature.parameters
    try:
        takes_row = "options" not in signature.bind(seed, row).arguments
    except TypeError:
        takes_row = False
    if takes_row:
        return functools.partial(reset, seed, row)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {"seed": seed, "options": dict(row)}
    return functools.partial(
        reset, **{key: value for key, value in arguments.items() if takes_any or key in parameters}
    )


def _space_of(environment: object) -> Any:
    """The action space of an environment in the form of Gymnasium; None where it has none."""
    space = getattr(environment, "action_space", None)
    is_space = callable(getattr(space, "sample", None)) and callable(getattr(space, "contains", None))
    return space if is_space else None


class PlayedEnvironment:
    """One environment for one episode; use as `async with`, so that it is closed whatever happens."""

    def __init__(self, choice: EnvironmentChoice, *, timeout_s: float) -> None:
        """Args:
        choice: which one.
        timeout_s: wall-clock limit of each call.
        """
        self.name = choice.name
        self._choice = choice
        self._timeout_s = timeout_s
        self._environment: Any = None
        self._read_action: Callable[[str], Any] | None = None
        self._num_invalid = 0
        self.not_closed = ""
        """Error of closing it; an episode that is over counts as it is."""

    async def __aenter__(self) -> Self:
        try:
            self._environment = await self._timed("its constructor", call_in_thread(self._choice.make))
        except ValueError as error:
            raise EnvironmentFailed(str(error)) from error
        return self

    async def __aexit__(self, *error: object) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            closing = asyncio.ensure_future(self._call("close", close))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await asyncio.wait([closing])
                raise
            except EnvironmentFailed as failure:
                self.not_closed = str(failure)
                logger.warning("%s", failure)

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """Begin.

        Raises:
            EnvironmentFailed: it raised, took too long, or returned an invalid value.
        """
        begin = reset_call(self._environment.reset, seed, row)
        first = read_observation(await self._call("reset", begin), self.name)
        space = _space_of(self._environment)
        if callable(reseed := getattr(space, "seed", None)):
            await self._call("action_space", reseed, seed)
        self._read_action = None if space is None else action_reader(space, {})
        return first

    async def step(self, action: str) -> Step:
        """Say something; raises as `reset` does."""
        if self._read_action is not None:
            try:
                chosen = self._read_action(action)
            except ValueError as problem:
                self._num_invalid += 1
                is_over = self._num_invalid >= MAX_INVALID
                sentence = f"Invalid action: {problem}"
                return Step(observation=sentence, reward=0.0, is_done=is_over, info={"is_invalid": True})
            self._num_invalid = 0
            return read_step(await self._call("step", self._environment.step, chosen), self.name)
        return read_step(await self._call("step", self._environment.step, action), self.name)

    async def gold_action(self) -> str | None:
        """The best next action, where the environment knows it."""
        method = getattr(self._environment, "gold_action", None)
        action = None if method is None else await self._call("gold_action", method)
        return None if action is None else str(action)

    async def anchor_state(self, observation: str) -> str:
        """Text that is equal where the environment is in the same state: `anchor_state`, else the observation.

        Args:
            observation: text last shown.

        Raises:
            EnvironmentFailed: as `reset` does.
        """
        method = getattr(self._environment, "anchor_state", None)
        state = observation if method is None else str(await self._call("anchor_state", method))
        return state if len(state) <= MAX_ANCHOR_CHARS else f"{state[:MAX_ANCHOR_CHARS]} {_digest(state)}"

    async def _call(self, label: str, method: Callable[..., Any], *args: Any) -> Any:
        in_thread = answer_in_thread if label == "step" else call_in_thread
        work = result_of(method, f"environment {self.name}: {label}", in_thread, *args)
        return await self._timed(label, work)

    async def _timed(self, label: str, work: Awaitable[Any]) -> Any:
        async def run() -> Any:
            with contained():
                return await work

        task = asyncio.ensure_future(run())
        try:  # what has ended in time counts, also where the loop was held up and sees it late
            await asyncio.wait([task], timeout=self._timeout_s)
            is_late = not task.done()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if is_late:
            raise EnvironmentFailed(
                f"environment {self.name}: {label} took longer than {self._timeout_s:g} s"
            )
        try:
            return task.result()
        except TimeoutError as error:
            raise EnvironmentFailed(f"environment {self.name}: {label}: TimeoutError: {error}") from error
        except (EnvironmentFailed, ValueError) as error:
            if label == "its constructor" or isinstance(error, EnvironmentFailed):
                raise
            raise self._error(label, error) from error
        except Exception as error:
            raise self._error(label, error) from error

    def _error(self, label: str, error: Exception) -> EnvironmentFailed:
        """With the last line of the environment's own file on the way to the error."""
        file = getattr(sys.modules.get(type(self._environment).__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        own_frame = next((frame for frame in reversed(frames) if frame.filename == file), None)
        location = "" if own_frame is None else f" at {Path(own_frame.filename).name}:{own_frame.lineno}"
        return EnvironmentFailed(
            f"environment {self.name}: {label}: {type(error).__name__}: {error}{location}"
        )
