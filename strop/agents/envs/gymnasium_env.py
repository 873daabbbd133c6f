"""Gymnasium environments with observations and actions as text."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_NUMBER = re.compile(r"-?\d+")
_MAX_DIGITS = 18
"""Of a number that may be an action."""
MAX_INVALID = 8
"""Answers in a row that are no action, after which an episode ends."""


class GymnasiumEnvironment:
    """An environment that `gymnasium.make` knows, with text on both sides.

    Observations that are text are shown as they are, others as JSON. Spaces of actions: Text takes the answer as it
    is; Discrete takes the first whole number in it, or one of `actions`; others take JSON. An answer that is no
    action costs `invalid_reward` and is answered with a sentence; the environment does not move.
    """

    def __init__(
        self,
        id: str,  # noqa: A002 (the name of gymnasium.make)
        *,
        actions: Mapping[str, int] | None = None,
        imports: str = "",
        instructions: str = "",
        invalid_reward: float = 0.0,
        max_invalid: int = MAX_INVALID,
        **kwargs: Any,
    ) -> None:
        """Args:
        id: of the environment.
        actions: words for the actions of a Discrete space.
        imports: module that registers the environment.
        instructions: shown before the first observation.
        invalid_reward: for an answer that is no action.
        max_invalid: answers in a row that are no action, after which the episode ends.
        kwargs: for gymnasium.make.

        Raises:
            ValueError: there is no such environment.
        """
        try:
            import gymnasium
        except ModuleNotFoundError as error:
            raise ValueError(
                "environment gymnasium needs the gymnasium package: pip install 'strop[gymnasium]'"
            ) from error
        if imports:
            importlib.import_module(imports)
        try:
            self._env = gymnasium.make(id, **kwargs)
        except gymnasium.error.Error as error:
            raise ValueError(f"gymnasium.make({id!r}) failed: {error}") from error
        self._read = action_reader(self._env.action_space, dict(actions or {}))
        self._instructions = instructions
        self._invalid_reward, self._max_invalid = invalid_reward, max_invalid
        self._num_invalid = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """As of Environment."""
        observation, _ = self._env.reset(seed=seed)
        self._env.action_space.seed(seed)
        return "\n".join(part for part in (self._instructions, observation_text(observation)) if part)

    def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """As of Environment."""
        try:
            chosen = self._read(action)
        except ValueError as problem:
            self._num_invalid += 1
            is_over = self._num_invalid >= self._max_invalid
            return f"Invalid action: {problem}", self._invalid_reward, is_over, {"is_invalid": True}
        self._num_invalid = 0
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        facts = {key: value for key, value in info.items() if isinstance(value, str | int | float | bool)}
        return observation_text(observation), float(reward), bool(terminated or truncated), facts

    def gold_action(self) -> str | None:
        """Result of the environment's own `gold_action`; None where it has none."""
        gold = getattr(self._env.unwrapped, "gold_action", None)
        return None if gold is None else gold()

    def close(self) -> None:
        """As of Environment."""
        self._env.close()


def observation_text(observation: object) -> str:
    """An observation as text."""
    if isinstance(observation, str):
        return observation
    return json.dumps(_plain(observation), ensure_ascii=False)


def _plain(value: object) -> Any:
    """Arrays and numbers of numpy as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def action_reader(space: Any, actions: Mapping[str, int]) -> Callable[[str], Any]:
    """Parser of answers into actions of a space; it raises ValueError with a sentence for the model."""
    kind = type(space).__name__
    if kind == "Text":

        def read_text(answer: str) -> Any:
            if space.contains(answer):
                return answer
            raise ValueError(
                f"the answer must have {space.min_length} to {space.max_length} of the characters allowed"
            )

        return read_text
    if kind == "Discrete":
        first, last = int(space.start), int(space.start) + int(space.n) - 1

        def read_discrete(answer: str) -> Any:
            words = {word.lower(): number for word, number in actions.items()}
            for word in re.findall(r"\w+", answer.lower()):
                if word in words:
                    return words[word]
            match = _NUMBER.search(answer)
            digits = match[0].lstrip("-").lstrip("0") if match else ""
            if match and len(digits) <= _MAX_DIGITS:
                number = int(digits or "0") * (-1 if match[0].startswith("-") else 1)
                if first <= number <= last:
                    return number
            choices = f"one of {', '.join(actions)}" if actions else f"a whole number from {first} to {last}"
            raise ValueError(f"say {choices}")

        return read_discrete

    def read_json(answer: str) -> Any:
        try:
            value = json.loads(answer)
            sample = space.sample()
            action = type(sample)(value) if not hasattr(sample, "dtype") else _array(value, sample)
        except (ValueError, TypeError, RecursionError, OverflowError) as error:
            raise ValueError(f"say a value of {space} as JSON") from error
        if not space.contains(action):
            raise ValueError(f"say a value of {space} as JSON")
        return action

    return read_json


def _array(value: Any, like: Any) -> Any:
    import numpy as np

    return np.asarray(value, dtype=like.dtype)
