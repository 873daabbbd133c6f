"""An environment as episodes use it: async, with deadlines, and with what it returns checked."""

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
from strop.agents.tools.threads import answer_in_thread, call_in_thread
from strop.agents.user_code import contained
from strop.utils.rng import random_key

logger = logging.getLogger(__name__)

MAX_ANCHOR_CHARS = 2000
"""Of the text of a state; a longer one is known by its beginning and a digest of the whole."""


def episode_seed(uid: str, extra_info: Mapping[str, Any]) -> int:
    """Seed of a prompt's episodes, from 0 to 2^31 - 1: `extra_info.seed`, or else a function of the prompt's uid.

    All samples of the prompt have it; two runs that visit a row at the same time meet the same episode.
    """
    given = extra_info.get("seed")
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    return random_key(0, "environment", uid) >> 33


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def reset_call(reset: Callable[..., Any], seed: int, row: Mapping[str, Any]) -> Callable[[], Any]:
    """The call of an environment's `reset`: (seed, row), or in the form of Gymnasium with what it takes of seed and
    options."""
    signature = inspect.signature(reset)
    parameters = signature.parameters
    try:
        takes_row = "options" not in signature.bind(seed, row).arguments
    except TypeError:
        takes_row = False
    if takes_row:
        return functools.partial(reset, seed, row)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    given = {"seed": seed, "options": dict(row)}
    return functools.partial(
        reset, **{key: one for key, one in given.items() if takes_any or key in parameters}
    )


def _space_of(environment: Any) -> Any:
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
        self._made: Any = None
        self._read_action: Callable[[str], Any] | None = None
        self._num_invalid = 0
        self.not_closed = ""
        """Why it could not be closed; an episode that is over counts as it is."""

    async def __aenter__(self) -> Self:
        try:
            self._made = await self._timed("its constructor", call_in_thread(self._choice.make))
        except ValueError as error:
            raise EnvironmentFailed(str(error)) from error
        return self

    async def __aexit__(self, *error: object) -> None:
        close = getattr(self._made, "close", None)
        if close is not None:
            closing = asyncio.ensure_future(self._called("close", close))
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
            EnvironmentFailed: it raised, took too long, or returned what it may not.
        """
        begin = reset_call(self._made.reset, seed, row)
        first = read_observation(await self._called("reset", begin), self.name)
        space = _space_of(self._made)
        if callable(reseed := getattr(space, "seed", None)):
            await self._called("action_space", reseed, seed)
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
                shown = f"Invalid action: {problem}"
                return Step(observation=shown, reward=0.0, is_done=is_over, info={"is_invalid": True})
            self._num_invalid = 0
            return read_step(await self._called("step", self._made.step, chosen), self.name)
        return read_step(await self._called("step", self._made.step, action), self.name)

    async def gold_action(self) -> str | None:
        """The best next action, where the environment knows it."""
        gold = getattr(self._made, "gold_action", None)
        found = None if gold is None else await self._called("gold_action", gold)
        return None if found is None else str(found)

    async def anchor_state(self, shown: str) -> str:
        """Text that is equal where the environment is in the same state: what its method `anchor_state` says, else
        what is shown.

        Args:
            shown: the observation.

        Raises:
            EnvironmentFailed: as `reset` does.
        """
        own = getattr(self._made, "anchor_state", None)
        found = shown if own is None else str(await self._called("anchor_state", own))
        return found if len(found) <= MAX_ANCHOR_CHARS else f"{found[:MAX_ANCHOR_CHARS]} {_digest(found)}"

    async def _called(self, what: str, method: Callable[..., Any], *args: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await self._timed(what, method(*args))
        in_thread = answer_in_thread if what == "step" else call_in_thread
        return await self._timed(what, in_thread(method, *args))

    async def _timed(self, what: str, work: Awaitable[Any]) -> Any:
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
            raise EnvironmentFailed(f"environment {self.name}: {what} took longer than {self._timeout_s:g} s")
        try:
            return task.result()
        except TimeoutError as error:
            raise EnvironmentFailed(f"environment {self.name}: {what}: TimeoutError: {error}") from error
        except (EnvironmentFailed, ValueError) as error:
            if what == "its constructor" or isinstance(error, EnvironmentFailed):
                raise
            raise self._failed(what, error) from error
        except Exception as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> EnvironmentFailed:
        """With the last line of the environment's own file on the way to the error."""
        file = getattr(sys.modules.get(type(self._made).__module__), "__file__", None)
        frames = traceback.extract_tb(error.__traceback__)
        at = next((frame for frame in reversed(frames) if frame.filename == file), None)
        place = "" if at is None else f" at {Path(at.filename).name}:{at.lineno}"
        return EnvironmentFailed(f"environment {self.name}: {what}: {type(error).__name__}: {error}{place}")
