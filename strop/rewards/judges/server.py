"""A reward model behind an HTTP address: several answers per request, one number for each.

Formats of a request and its reply (reward.server.format):

    items     {"items": [{"prompt": text, "messages": [...], "response": text, "data_source": text,
                          "ground_truth": any}, ...]}
              -> {"scores": [number, ...]}
    score     vLLM's /score: {"model", "text_1": [prompt, ...], "text_2": [response, ...]}
              -> {"data": [{"score": number}, ...]}
    classify  vLLM's /classify: {"model", "messages": [the prompt's ..., the answer as the assistant's],
              "add_generation_prompt": false, "use_activation": false}, one conversation per request; or, with the
              tokenizer of the reward model at hand, {"model", "input": [text, ...], "use_activation": false}
              -> {"data": [{"probs": [number, ...]}, ...]}, of which the last one counts: that of the only label, or of
              "right" where there are two

A reward model reads a conversation in its own chat template, so nothing is sent to /classify without one. In a text
made here the template's first token is left out where the server's tokenizer sets it by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.protocol.trajectory import with_answer
from strop.rewards.combine import Part
from strop.rewards.judges.client import CallFailed, RemoteClient
from strop.rewards.judges.config import ServerConfig
from strop.rewards.outcome import RewardError
from strop.utils.chat_template import TemplateRefused, TemplateTooCostly, apply_template
from strop.utils.http_client import CLOSED
from strop.utils.sanitize import storable_text, usable
from strop.utils.sanitize.control_tokens import ControlText, without_common_control_text
from strop.utils.sanitize.values import MAX_NUMBER

KEY = "server"


@dataclass(kw_only=True, eq=False)
class _PendingAnswer:
    """An answer on its way into a request."""

    item: Mapping[str, Any]
    fresh: bool
    future: asyncio.Future[tuple[float, dict[str, float]]]


class RewardServer:
    """Collects answers for a moment and sends them together."""

    cost = 0.0
    """It has no price."""

    def __init__(self, config: ServerConfig, *, rank: int = 0, count: int = 1) -> None:
        """Args:
        config: of the run.
        rank, count: which of how many processes this is that ask the server for the run.
        """
        self.config = config
        self._client = RemoteClient(config.share(rank, count), config.url, name=KEY)
        self._batch_size = 1 if config.sends_messages else config.batch_size
        self._tokenizer: Any = None
        self._pending: list[_PendingAnswer] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Read the tokenizer, and start the client.

        Raises:
            RewardError: there is no such tokenizer, or it has no chat template; or as `RemoteClient.start`.
        """
        if self.config.tokenizer:
            self._tokenizer = _load_tokenizer(self.config.tokenizer)
            self._control = ControlText(self._tokenizer)
        self._client.start()

    async def close(self) -> None:
        """End what is under way."""
        await self._client.close()

    compares = False
    """It scores each answer by itself."""

    def set_cost(self, run_cost: float) -> None:
        """Do nothing: a server has no price."""

    async def score(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[Part, dict[str, float]]:
        """The score of one answer, and its share of the usage of the request; see RewardService.score."""
        score, usage = await self._client.run(self._enqueue(item, fresh=fresh))
        prefixed = {f"{KEY}/{name}": value for name, value in usage.items()}
        return Part(key=KEY, weight=self.config.weight, score=score, parts={}), prefixed

    async def _enqueue(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[float, dict[str, float]]:
        if self._tokenizer is not None:
            item = {"text": self._text(_chat(item, self._control.as_plain_text(item["response"])))}
        pending = _PendingAnswer(item=item, fresh=fresh, future=asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        if len(self._pending) >= self._batch_size:
            self._send()
        elif len(self._pending) == 1:
            asyncio.get_running_loop().call_later(self.config.batch_wait_s, self._send)
        return await pending.future

    def _send(self) -> None:
        batch, self._pending = self._pending, []
        if batch:
            task = asyncio.get_running_loop().create_task(self._exchange(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _exchange(self, batch: Sequence[_PendingAnswer]) -> None:
        """Ask for a batch and hand the scores out; every one of its futures is resolved."""
        count = len(batch)
        try:
            reply = await self._client.ask(
                self._request([pending.item for pending in batch]),
                fresh=any(pending.fresh for pending in batch),
            )
            scores = read_scores(self.config.format, reply.data, count)
            self._client.remember(reply)
            usage = {name: value / count for name, value in reply.usage.items()}
            for pending, score in zip(batch, scores, strict=True):
                if isinstance(score, str):
                    _fail(pending, CallFailed("error", score, usage))
                elif not pending.future.done():
                    pending.future.set_result((score, usage))
        except CallFailed as failed:
            usage = {name: value / count for name, value in failed.usage.items()}
            for pending in batch:
                _fail(pending, CallFailed(failed.kind, str(failed), usage, remedy=failed.remedy))
        finally:
            for pending in batch:  # cancelled with the client
                _fail(pending, CallFailed("infrastructure", "the server was closed", {}, remedy=CLOSED))

    def _request(self, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.config.format == "items":
            return {"items": [dict(item) for item in items]}
        request: dict[str, Any] = {"model": self.config.model} if self.config.model else {}
        if self.config.format == "score":
            prompts = [item["prompt"] for item in items]
            return {**request, "text_1": prompts, "text_2": [item["response"] for item in items]}
        request["use_activation"] = self.config.use_activation
        if self._tokenizer is not None:
            return {**request, "input": [item["text"] for item in items]}
        answer = without_common_control_text(items[0]["response"])
        return {**request, "messages": _chat(items[0], answer), "add_generation_prompt": False}

    def _text(self, chat: list[Mapping[str, Any]]) -> str:
        """A conversation as the reward model reads it, without what the server's tokenizer puts before it.

        Raises:
            CallFailed: the template refuses the conversation.
        """
        try:
            text = str(
                apply_template(self._tokenizer, chat, None, tokenize=False, add_generation_prompt=False)
            )
        except (TemplateRefused, TemplateTooCostly) as error:
            raise CallFailed(
                "error",
                f"the chat template of {self.config.tokenizer} refuses this conversation ({error}), so the reward "
                f"model cannot read it",
                {},
                remedy="set reward.server.tokenizer to one whose template takes such conversations",
            ) from error
        first = self._tokenizer.bos_token
        is_set_anyway = bool(first) and self._tokenizer("")["input_ids"][:1] == [self._tokenizer.bos_token_id]
        return text.removeprefix(first) if is_set_anyway else text


def _chat(item: Mapping[str, Any], answer: str) -> list[Mapping[str, Any]]:
    return list(with_answer(item["messages"], answer))


def _load_tokenizer(folder: str) -> Any:
    """The tokenizer of a reward model.

    Raises:
        RewardError: it cannot be read, or has no chat template.
    """
    from transformers import AutoTokenizer  # heavy, and most processes that import this speak to no server

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of any class
        raise RewardError(
            f"reward.server.tokenizer is {folder!r}, which cannot be loaded: {error}"
        ) from error
    if not tokenizer.chat_template:
        raise RewardError(
            f"the tokenizer in reward.server.tokenizer={folder!r} has no chat template, so conversations cannot become "
            f"text: write one into its folder (chat_template.jinja), or leave the key out for the server's own"
        )
    return tokenizer


def read_scores(form: str, data: object, count: int) -> list[float | str]:
    """One number per answer, or a sentence where it is none.

    Raises:
        CallFailed: the reply as a whole cannot be read.
    """
    values = data.get("scores" if form == "items" else "data") if isinstance(data, dict) else None
    if not isinstance(values, list) or len(values) != count:
        description = (
            f"{len(values)} scores" if isinstance(values, list) else f"a {type(data).__name__} without scores"
        )
        raise CallFailed(
            "infrastructure", f"the server was asked for {count} scores and sent {description}", {}
        )
    return [_number(form, value) for value in values]


def _number(form: str, value: object) -> float | str:
    if form == "score":
        value = value.get("score") if isinstance(value, dict) else None
    elif form == "classify":
        probs = value.get("probs") if isinstance(value, dict) else None
        value = probs[-1] if isinstance(probs, list) and probs else None
    score = None if isinstance(value, bool) else usable(value)
    if score is None:
        return (
            f"the server sent {storable_text(value)[:80]!r} as a score, which is no finite number from "
            f"{-MAX_NUMBER:g} to {MAX_NUMBER:g}"
        )
    return score


def _fail(pending: _PendingAnswer, failure: CallFailed) -> None:
    if not pending.future.done():
        pending.future.set_exception(failure)
