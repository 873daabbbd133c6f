"""Environment, Observation and Step, and checks of the values that environments return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strop.agents.envs.gymnasium_env import observation_text
from strop.utils.sanitize import encodable, encodable_value, real, usable
from strop.utils.sanitize.text import describe_object
from strop.utils.sanitize.values import MAX_NUMBER


class EnvironmentFailed(RuntimeError):
    """An environment failed: it raised, took too long, or returned an invalid value. Before the
    model has answered, that fails the episode, which is left out of training; after that the answer is worth 0."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Text or messages shown to the model."""

    text: str = ""
    """The turn of the user. After `reset` it is appended to the prompt of the row; empty: the prompt stays as it
    is."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """After `reset` only: a conversation that takes the place of the row's prompt."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Result of one action."""

    observation: str
    """Next user turn; not shown when the episode is over."""
    reward: float | None
    """Of this answer; None where the environment gives no rewards."""
    is_done: bool
    """The episode is over."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts. Numbers, texts and booleans of the last step become parts of the reward; `acc` says whether the episode
    succeeded (not given: the sum of the rewards)."""


class Environment:
    """Interface of an environment; a class need not inherit from it.

    A class in the form of Gymnasium is one too: `reset(*, seed, options)` gets the row as its options and returns
    (observation, info), `step` returns (observation, reward, terminated, truncated, info). With an `action_space` it
    gets actions of it, read as the environment `gymnasium` reads them, and without one the answer. Observations that
    are no text are shown as JSON.

    There is one object per episode. Methods may be async; others run in a thread. Each call has the deadline
    agent.tool_timeout_s. Everything random must come from the seed. The text of a model may be anything: an answer
    that makes no sense is answered with a sentence, or ends the episode, and never raises.

    A class may have one more method, `anchor_state()`, for estimators that compare answers given in the same state
    (gigpo): text that is equal where the environment is in the same state, asked for after `reset` and after each
    `step`. Without it, the last observation is taken for the state.
    """

    def reset(self, seed: int, row: Mapping[str, Any]) -> str | Observation:
        """Begin the episode.

        Args:
            seed: equal for the samples of one prompt, so that they can be compared.
            row: of the data: prompt, data_source, ground_truth, extra_info and the row's own columns.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method reset")

    def step(self, action: str) -> tuple[str, float | None, bool, Mapping[str, Any]] | Step:
        """Answer an action: observation, reward, whether the episode is over, and facts."""
        raise NotImplementedError(f"{type(self).__name__} has no method step")

    def gold_action(self) -> str | None:
        """The best next action, for `strop env check`; None where it is not known."""
        return None

    def close(self) -> None:
        """End the episode, also one that failed."""


def read_observation(returned: object, name: str) -> Observation:
    """Check the value that `reset` returned.

    Raises:
        EnvironmentFailed: it is nothing that an environment may return.
    """
    if _has_info(returned):
        returned = _observation(returned[0])  # type: ignore[index]
    if isinstance(returned, str):
        return Observation(text=encodable(returned))
    if isinstance(returned, Observation):
        messages = tuple(encodable_value([dict(message) for message in returned.messages]))
        return replace(returned, text=encodable(returned.text), messages=messages)
    if returned is None:
        return Observation()
    if isinstance(returned, Sequence) and all(
        isinstance(message, Mapping) and "role" in message and "content" in message for message in returned
    ):
        return Observation(messages=tuple(encodable_value([dict(message) for message in returned])))
    raise EnvironmentFailed(
        f"environment {name}: reset returned {returned!r:.80}; return text, an Observation, chat messages, or "
        f"(observation, info)"
    )


def _has_info(returned: object) -> bool:
    """True for (observation, info), false for two messages."""
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        return False
    return not (isinstance(returned[0], Mapping) and "role" in returned[0])


def _observation(observation: object) -> object:
    """An observation of Gymnasium: text, messages and Observation as they are, any other value as JSON."""
    is_messages = isinstance(observation, list | tuple) and all(
        isinstance(item, Mapping) and "role" in item for item in observation
    )
    if observation is None or isinstance(observation, Observation) or (is_messages and observation):
        return observation
    return observation_text(observation)


def read_step(returned: object, name: str) -> Step:
    """Check the value that `step` returned.

    Raises:
        EnvironmentFailed: it is nothing that an environment may return.
    """
    if isinstance(returned, tuple) and len(returned) == 5:
        observation, reward, terminated, truncated, info = returned
        if isinstance(info, Mapping):  # numbers and booleans of numpy are facts too
            info = {
                key: value.item() if getattr(value, "ndim", None) == 0 else value
                for key, value in info.items()
            }
        returned = (_observation(observation), reward, bool(terminated) or bool(truncated), info)
    if isinstance(returned, tuple) and len(returned) == 4:
        text, reward, is_done, info = returned
        if isinstance(text, Observation):
            text = text.text
        if not isinstance(info, Mapping | None):
            raise EnvironmentFailed(f"environment {name}: the info of step is {info!r:.60}, not a dictionary")
        if not isinstance(text, str | None):
            raise EnvironmentFailed(f"environment {name}: the observation of step is {text!r:.60}, not text")
        returned = Step(
            observation=text or "",
            reward=_number(reward, name),
            is_done=bool(is_done),
            info=dict(info or {}),
        )
    if not isinstance(returned, Step):
        raise EnvironmentFailed(
            f"environment {name}: step returned {returned!r:.80}; return (observation, reward, done, info) or "
            f"(observation, reward, terminated, truncated, info)"
        )
    return replace(
        returned, observation=encodable(returned.observation or ""), reward=_number(returned.reward, name)
    )


def _number(reward: object, name: str) -> float | None:
    if reward is None:
        return None
    value = real(reward)
    if value is None:
        raise EnvironmentFailed(
            f"environment {name}: the reward is {describe_object(reward):.60}, not a number"
        )
    if usable(value) is None:
        raise EnvironmentFailed(
            f"environment {name}: the reward is {value}; it must be finite, at most {MAX_NUMBER:g} in size"
        )
    return value
