"""Environments of the verifiers package before 0.4 (`load_environment`, MultiTurnEnv, Rubric).

The package's own rollout runs, in an event loop beside the trainer's, with a client that asks nobody: each request
for an answer is handed out as an observation, and the next action is the answer. So its stop conditions, its state
and its rubric are what they are in the package.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from strop.agents.envs.base import EnvironmentFailed, Observation
from strop.utils.background_loop import BackgroundLoop
from strop.utils.user_files import load_user_file

_loop = BackgroundLoop("verifiers environments")
_loaded: dict[tuple[str, str], tuple[Any, Any]] = {}
_loading = threading.Lock()
MODEL = "policy"
"""Name of the model in the states of the package."""


class VerifiersClassicEnvironment:
    """One rollout of an environment per episode, over the row of its data set that the seed chooses.

    The last answer is worth the rubric's reward, the others nothing. The metrics of the rubric are facts.
    """

    def __init__(
        self,
        environment: str,
        *,
        args: Mapping[str, Any] | None = None,
        index: int | None = None,
        split: str = "train",
    ) -> None:
        """Args:
        environment: FILE.py (with a function load_environment), or the id of an installed environment.
        args: of load_environment.
        index: of the row; None: by the seed.
        split: train or eval: which data set of the environment.

        Raises:
            ValueError: there is no such environment, or it cannot be played here.
        """
        if split not in ("train", "eval"):
            raise ValueError(f"split is {split!r}; use train or eval")
        self._env, self._rows = environment_of(environment, dict(args or {}), split)
        self._index = index
        self._requests: asyncio.Queue[tuple[list[dict[str, str]], asyncio.Future[str]]] = asyncio.Queue()
        self._pending: asyncio.Future[str] | None = None
        self._rollout: asyncio.Task[Any] | None = None
        self._said: list[dict[str, str]] = []

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Observation:
        """As of Environment."""
        index = seed % len(self._rows) if self._index is None else self._index
        if not 0 <= index < len(self._rows):
            raise ValueError(f"the environment has {len(self._rows)} rows, but index is {index}")
        messages, state = await self._advance(dict(self._rows[index]), None)
        if messages is None:
            raise EnvironmentFailed(
                f"environment verifiers_classic: row {index} ended before the first answer, by "
                f"{state.get('stop_condition')!r}"
            )
        self._said = messages
        return Observation(messages=tuple(messages))

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """As of Environment.

        Raises:
            EnvironmentFailed: the environment went on with anything but turns of the user.
        """
        before = [*self._said, {"role": "assistant", "content": action}]
        messages, state = await self._advance(None, action)
        if messages is None:
            if (error := state.get("error")) is not None:
                raise EnvironmentFailed(
                    f"environment verifiers_classic: {type(error).__name__}: {error}"
                ) from error
            return "", float(state["reward"]), True, dict(state["metrics"] or {})
        shown = messages[len(before) :]
        if messages[: len(before)] != before or [one["role"] for one in shown] != ["user"]:
            raise EnvironmentFailed(
                "environment verifiers_classic: it did not go on with one turn of the user after the answer; "
                "environments that rewrite the conversation or answer with other roles cannot be played here"
            )
        self._said = messages
        return shown[0]["content"], 0.0, False, {}

    async def close(self) -> None:
        """As of Environment; a rollout that has not ended is cancelled."""
        if self._rollout is not None and not self._rollout.done():
            await asyncio.wrap_future(_loop.submit(_cancelled(self._rollout)))

    async def _advance(
        self, row: Mapping[str, Any] | None, answer: str | None
    ) -> tuple[list[dict[str, str]] | None, Mapping[str, Any]]:
        """Begin with a row, or give an answer; then the next request, or None and the final state."""

        async def go_on() -> tuple[list[dict[str, str]] | None, Mapping[str, Any]]:
            if row is not None:
                self._rollout = asyncio.create_task(_scored(self._env, row, _client(self._respond)))
            elif self._pending is not None:
                self._pending.set_result(answer or "")
            assert self._rollout is not None, "reset comes first"
            asked = asyncio.create_task(self._requests.get())
            await asyncio.wait({asked, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                messages, self._pending = asked.result()
                return messages, {}
            asked.cancel()
            return None, self._rollout.result()

        return await asyncio.wrap_future(_loop.submit(go_on()))

    async def _respond(self, prompt: Any) -> str:
        """The policy's answer to a prompt; in the loop of the rollouts."""
        answered: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        await self._requests.put(([_plain(message) for message in prompt], answered))
        return await answered


def environment_of(name: str, args: Mapping[str, Any], split: str) -> tuple[Any, Any]:
    """An environment and its rows; loaded once per process, as all its rollouts share it.

    Raises:
        ValueError: there is no such environment, or it cannot be played here.
    """
    with _loading:
        key = (name, f"{sorted(args.items())!r} {split}")
        if key not in _loaded:
            _loaded[key] = _load(name, args, split)
        return _loaded[key]


def _load(name: str, args: Mapping[str, Any], split: str) -> tuple[Any, Any]:
    try:
        import verifiers as vf
        from verifiers.clients import Client  # noqa: F401 (tells the versions apart)
        from verifiers.envs import environment as made_of
    except ImportError as error:
        raise ValueError(
            f"environment verifiers_classic needs a verifiers package before 0.4, and is tested with 0.1.14 ({error}): "
            f"pip install --no-deps 'verifiers==0.1.14', and what it imports, because it asks for an older datasets "
            f"than strop; tasksets of 0.4 are played by the environment verifiers"
        ) from error
    # An environment would take over the handlers of SIGINT and SIGTERM, which belong to the trainer, and cannot be
    # made outside the main thread for it.
    made_of.signal = _NoSignals()
    if name.endswith(".py"):
        load = getattr(
            load_user_file(name, setting="environment verifiers_classic"), "load_environment", None
        )
        if not callable(load):
            raise ValueError(f"{name} has no function load_environment")
    else:

        def load(**given: Any) -> Any:
            return vf.load_environment(name, **given)

    try:
        env = load(**args)
    except (ImportError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"load_environment of {name!r} failed: {type(error).__name__}: {error}") from error
    if not isinstance(env, vf.MultiTurnEnv):
        raise ValueError(
            f"{name!r} is a {type(env).__name__}; MultiTurnEnv and what inherits from it can be played"
        )
    for is_so, what in (
        (
            getattr(env, "tool_defs", None),
            "tools: give them to tool_agent, and its rubric to a reward function",
        ),
        (getattr(env, "message_type", "chat") != "chat", "prompts that are no conversations"),
        (env.rubric.has_group_rewards, "rewards of whole groups, but an episode is scored by itself here"),
    ):
        if is_so:
            raise ValueError(f"the environment {name!r} has {what}")
    rows = env.get_dataset() if split == "train" else env.get_eval_dataset()
    if not len(rows):
        raise ValueError(f"the environment {name!r} has no rows")
    return env, rows


class _NoSignals:
    """In place of the module `signal`."""

    SIGINT, SIGTERM = signal.SIGINT, signal.SIGTERM

    def signal(self, number: int, handler: object) -> None:
        """Leave the handler as it is."""


async def _scored(env: Any, row: Mapping[str, Any], client: Any) -> Mapping[str, Any]:
    """The final state of a rollout, with its reward."""
    state: Mapping[str, Any] = await env.rollout(row, client, MODEL, {})
    if state.get("error") is None:
        await env.rubric.score_rollout(state)
    await env.rubric.cleanup(state)
    return state


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _client(respond: Callable[[Any], Any]) -> Any:
    """A client of the package whose answers come from `respond`."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class PolicyClient(Client):  # type: ignore[misc]  # the package is not typed here
        async def get_response(self, prompt: Any, model: str, sampling_args: Any, **_: Any) -> Any:
            said = ResponseMessage(
                role="assistant", content=await respond(prompt), finish_reason="stop", is_truncated=False
            )
            return Response(id="", created=int(time.time()), model=model, message=said)

        def setup_client(self, config: Any) -> Any: ...
        async def to_native_tool(self, tool: Any) -> Any: ...
        async def to_native_prompt(self, messages: Any) -> Any: ...
        async def get_native_response(self, *args: Any, **kwargs: Any) -> Any: ...
        async def raise_from_native_response(self, response: Any) -> None: ...
        async def from_native_response(self, response: Any) -> Any: ...
        async def close(self) -> None: ...

    return PolicyClient(None)


def _plain(message: Any) -> dict[str, str]:
    """A message of the package as role and text."""
    given = message if isinstance(message, Mapping) else message.model_dump()
    content: Any = given.get("content") or ""
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts: list[Any] = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
        if any(part.get("type") != "text" for part in parts):
            raise EnvironmentFailed("environment verifiers_classic: a message holds more than text")
        content = "".join(str(part["text"]) for part in parts)
    return {"role": str(given["role"]), "content": str(content)}
