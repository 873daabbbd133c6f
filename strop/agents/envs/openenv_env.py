"""OpenEnv servers as environments: a session of its own per episode, over the package's generic client.

A server has a limited number of sessions (max_concurrent_envs, 1 by default) and turns further ones away at once;
`reset` asks again until one is free.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any

from strop.agents.envs.base import EnvironmentFailed
from strop.utils.sanitize import read_json

_FULL = "CAPACITY_REACHED"
_INVALID = "VALIDATION_ERROR"


class OpenEnvEnvironment:
    """One session of a server. The answer becomes the field `action_key` of an action; `observation_key` is shown."""

    def __init__(
        self,
        url: str,
        *,
        action_key: str = "",
        observation_key: str = "",
        action_fields: Mapping[str, Any] | None = None,
        reset_options: Mapping[str, Any] | None = None,
        rewards: bool = True,
        message_timeout_s: float = 60.0,
        session_wait_s: float = 45.0,
    ) -> None:
        """Args:
        url: of the server, http:// or ws://.
        action_key: field of the action that takes the answer; empty: the answer is the action, as a JSON object.
        observation_key: field of the observation that is shown; empty: all of it as JSON.
        action_fields: further fields of every action.
        reset_options: further arguments of reset.
        rewards: the server rewards actions, and one that it gives no reward is worth 0; false: the episode is left
            to the reward function.
        message_timeout_s: longest wait for a message of the server.
        session_wait_s: longest wait for a free session; agent.tool_timeout_s bounds it too.
        """
        try:
            from openenv.core.generic_client import GenericEnvClient
            from websockets.exceptions import ConnectionClosed
        except ModuleNotFoundError as error:
            raise ValueError(
                f"environment openenv needs the openenv-core package ({error}): pip install 'strop[openenv]'"
            ) from error
        self._client = GenericEnvClient(base_url=url, message_timeout_s=message_timeout_s)
        self._closed: type[Exception] = ConnectionClosed
        self._url, self._message_timeout_s, self._session_wait_s = url, message_timeout_s, session_wait_s
        self._action_key, self._observation_key = action_key, observation_key
        self._fields, self._options = dict(action_fields or {}), dict(reset_options or {})
        self._rewards = rewards

    async def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """As of Environment.

        Raises:
            EnvironmentFailed: the server cannot be reached, or no session was free in time.
        """
        loop = asyncio.get_running_loop()
        deadline, wait = loop.time() + self._session_wait_s, 0.05
        while True:
            try:
                result = await self._request("reset", self._client.reset(seed=seed, **self._options))
                return self._shown(result.observation)
            except _ServerError as refusal:
                if _FULL not in str(refusal):
                    raise self._error("reset", str(refusal)) from None
            if loop.time() + wait > deadline:
                raise self._error(
                    "reset",
                    f"no session was free within {self._session_wait_s:g} s; start the server with a larger "
                    f"max_concurrent_envs (it is 1 by default)",
                )
            await self._client.close()
            await asyncio.sleep(wait)
            wait = min(2 * wait, 1.0)

    async def step(self, action: str) -> tuple[str, float | None, bool, dict[str, Any]]:
        """As of Environment; an answer that is no action of the server is worth nothing.

        Raises:
            EnvironmentFailed: the server ended, was silent for too long, or failed at it.
        """
        nothing = 0.0 if self._rewards else None
        if self._action_key:
            action_data = {**self._fields, self._action_key: action}
        else:
            try:
                fields = read_json(action)
            except ValueError:
                fields = None
            if not isinstance(fields, dict):
                return "Invalid action: answer with a JSON object.", nothing, False, {"is_invalid": True}
            action_data = {**self._fields, **fields}
        try:
            result = await self._request("step", self._client.step(action_data))
        except _ServerError as refusal:
            if _INVALID not in str(refusal):
                raise self._error("step", str(refusal)) from None
            return "Invalid action: the environment does not take it.", nothing, False, {"is_invalid": True}
        reward = nothing if result.reward is None or not self._rewards else float(result.reward)
        return self._shown(result.observation), reward, bool(result.done), {}

    async def close(self) -> None:
        """As of Environment."""
        await self._client.close()

    async def _request(self, label: str, exchange: Coroutine[Any, Any, Any]) -> Any:
        """The server's answer.

        Raises:
            _ServerError: the server answered with an error.
            EnvironmentFailed: there was no answer.
        """
        try:
            return await exchange
        except TimeoutError:
            raise self._error(label, f"no answer within {self._message_timeout_s:g} s") from None
        except self._closed as error:
            # A server says why it ends a session, before anybody asked; that is still to be read.
            if words := await self._closing_message():
                raise _ServerError(words) from None
            raise self._error(label, f"the connection ended: {error}") from error
        except OSError as error:
            raise self._error(label, str(error)) from error
        except RuntimeError as error:  # how the client tells of an answer that is an error
            raise _ServerError(str(error)) from None

    async def _closing_message(self) -> str:
        try:
            message = (await self._client._receive())["data"]
            return f"{message['message']} (code: {message['code']})"
        except (self._closed, TimeoutError, ValueError, LookupError, TypeError, AttributeError):
            return ""

    def _error(self, label: str, reason: str) -> EnvironmentFailed:
        return EnvironmentFailed(f"environment openenv: {label}: server {self._url}: {reason}")

    def _shown(self, observation: object) -> str:
        if self._observation_key and isinstance(observation, Mapping):
            if self._observation_key not in observation:
                raise ValueError(
                    f"the observation has no field {self._observation_key!r}; it has {', '.join(map(str, observation))}"
                )
            observation = observation[self._observation_key]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)


class _ServerError(Exception):
    """The server answered with an error."""
