"""The client of a scoring service: asks within its limits, remembers answers, and keeps to the cost budget."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from strop.rewards.judges.config import CallsConfig
from strop.rewards.judges.cost_budget import CostBudget
from strop.rewards.outcome import OutcomeKind, RewardError
from strop.utils.http_client import Caller, CallRefused
from strop.utils.sanitize import read_json

T = TypeVar("T")


class CallFailed(Exception):
    """A service gave no score for a sample; the message is one sentence, and `remedy` as of `Outcome`."""

    def __init__(
        self, kind: OutcomeKind, sentence: str, usage: Mapping[str, float], *, remedy: str | None = None
    ) -> None:
        super().__init__(sentence)
        self.kind, self.usage, self.remedy = kind, usage, remedy


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The answer of a service to one request."""

    data: Any
    """Its JSON."""
    key: str
    """Of the cache."""
    usage: Mapping[str, float]
    """requests, retries, cached, wait_s."""


def add_usage(total: dict[str, float], usage: Mapping[str, float]) -> None:
    """Add what a request used, by name."""
    for name, value in usage.items():
        total[name] = total.get(name, 0.0) + value


class RemoteClient:
    """Asks one address; use `start` and `close` around it."""

    def __init__(self, config: CallsConfig, url: str, *, name: str, budget: CostBudget | None = None) -> None:
        """Args:
        config: limits.
        url: full address of the POST requests.
        name: of the service in error sentences and metrics: `judge`, `server`.
        budget: nothing is asked once it is empty; who reads the replies pays.
        """
        self._url = url
        self._budget = CostBudget(None) if budget is None else budget
        self._cache = AnswerCache(config.cache_dir)
        self._caller = Caller(
            config,
            url,
            key=f"reward.{name}",
            name=name,
            timeout_s=config.timeout_s,
            timeout_key=f"reward.{name}.timeout_s",
        )

    def start(self) -> None:
        """Read the key and start the thread.

        Raises:
            RewardError: there is no key under the configured name.
        """
        try:
            self._caller.start()
        except ValueError as error:
            raise RewardError(str(error)) from error

    async def close(self) -> None:
        """End what is under way; who waits for it is cancelled."""
        await self._caller.close()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry out a coroutine in the client's own loop."""
        try:
            return await self._caller.run(work)
        except CallRefused as refused:
            raise CallFailed(refused.kind, str(refused), refused.usage, remedy=refused.remedy) from refused

    async def ask(self, request: Mapping[str, Any], *, fresh: bool = False) -> Reply:
        """The reply to a request; to be awaited in the client's own loop.

        Args:
            request: becomes the JSON body.
            fresh: ask although the answer is in the cache.

        Raises:
            CallFailed: no attempt succeeded.
        """
        body = json.dumps(request, sort_keys=True, separators=(",", ":")).encode()
        key = self._cache.key(self._url, body)
        if not fresh and (cached := self._cache.get(key)) is not None:
            return Reply(data=cached, key=key, usage={"requests": 0.0, "retries": 0.0, "cached": 1.0})
        try:
            called = await self._caller.ask(body, refusal=self._budget.refusal)
        except CallRefused as refused:
            raise CallFailed(refused.kind, str(refused), refused.usage, remedy=refused.remedy) from refused
        return Reply(data=called.data, key=key, usage=called.usage)

    def remember(self, reply: Reply) -> None:
        """Keep a reply that could be used."""
        if not reply.usage.get("cached"):
            self._cache.put(reply.key, reply.data)


class AnswerCache:
    """The answers in one folder; without a folder, nothing is kept."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser() if folder else None

    def key(self, url: str, body: bytes) -> str:
        """Name of the answer to a request."""
        return hashlib.sha256(url.encode() + b"\0" + body).hexdigest()

    def get(self, key: str) -> Any:
        """The answer; None where there is none, or its file is damaged."""
        if self._folder is None:
            return None
        try:
            return read_json(self._path(self._folder, key).read_bytes())
        except (OSError, ValueError):
            return None

    def put(self, key: str, answer: object) -> None:
        """Keep an answer. A full or read-only disk costs repeats of the request, not the run."""
        if self._folder is None:
            return
        path = self._path(self._folder, key)
        temporary = path.with_name(f".{key}.{os.getpid()}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(answer), encoding="utf-8")
            temporary.replace(path)

    @staticmethod
    def _path(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"
