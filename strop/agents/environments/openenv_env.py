"""OpenEnv servers as environments: a session of its own per episode, over the package's generic client.

Written from the documentation of openenv-core 0.3; it has not been run against a server yet, and its test is skipped
without the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


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
        message_timeout_s: float = 60.0,
    ) -> None:
        """Args:
        url: of the server, http:// or ws://.
        action_key: field of the action that takes the answer; empty: the answer is the action, as a JSON object.
        observation_key: field of the observation that is shown; empty: all of it as JSON.
        action_fields: further fields of every action.
        reset_options: further arguments of reset.
        message_timeout_s: longest wait for a message of the server.
        """
        try:
            from openenv.core.generic_client import GenericEnvClient
        except ModuleNotFoundError as error:
            raise ValueError(
                "environment openenv needs the openenv-core package: pip install 'strop[openenv]'"
            ) from error
        self._client = GenericEnvClient(base_url=url, message_timeout_s=message_timeout_s)
        self._action_key, self._observation_key = action_key, observation_key
        self._fields, self._options = dict(action_fields or {}), dict(reset_options or {})

    async def reset(self, seed: int, row: Mapping[str, Any]) -> str:
        """As of Environment."""
        result = await self._client.reset(seed=seed, **self._options)
        return self._shown(result.observation)

    async def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
        """As of Environment; an answer that is no action of the server is worth nothing."""
        if self._action_key:
            sent = {**self._fields, self._action_key: action}
        else:
            try:
                read = json.loads(action)
            except (ValueError, RecursionError):
                read = None
            if not isinstance(read, dict):
                return "Invalid action: answer with a JSON object.", 0.0, False, {"is_invalid": True}
            sent = {**self._fields, **read}
        try:
            result = await self._client.step(sent)
        except RuntimeError as error:
            if "VALIDATION_ERROR" not in str(error):
                raise
            return "Invalid action: the environment does not take it.", 0.0, False, {"is_invalid": True}
        reward = 0.0 if result.reward is None else float(result.reward)
        return self._shown(result.observation), reward, bool(result.done), {}

    async def close(self) -> None:
        """As of Environment."""
        await self._client.close()

    def _shown(self, observation: Any) -> str:
        if self._observation_key and isinstance(observation, Mapping):
            if self._observation_key not in observation:
                raise ValueError(
                    f"the observation has no field {self._observation_key!r}; it has {', '.join(map(str, observation))}"
                )
            observation = observation[self._observation_key]
        return observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
