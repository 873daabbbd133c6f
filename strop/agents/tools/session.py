"""Tools of one episode: create, execute any number of times, rewards, and release whatever happens.

Every call of a tool has a deadline. Errors of the model (an unknown tool, arguments that are no JSON, a call
that fails) become a sentence for the model. The cancellation of the episode, and a tool that cannot work at all
(ToolUnavailable), go on upwards, after release.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from strop.agents.spans import SPANS, add_span
from strop.agents.tools.base import BaseTool, ToolResponse, ToolUnavailable, create_arguments
from strop.agents.tools.call_stats import CallResult, call_numbers
from strop.agents.tools.images import ImageEncoder
from strop.agents.tools.parsed_output import FunctionCall, MalformedCall
from strop.agents.tools.templates import MAX_CHARS_PER_TOKEN
from strop.agents.tools.threads import answer_in_thread, call_in_thread, result_of
from strop.agents.user_code import contained
from strop.protocol.trajectory import Media
from strop.utils.sanitize import described, encodable, read_json, storable, storable_text, usable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

T = TypeVar("T")

Truncation = Literal["left", "right", "middle"]

EMPTY_RESULT = "(the tool returned nothing)"
"""Shown to the model in place of an empty text: some templates leave empty messages out."""


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """Limits of tool calls."""

    max_parallel_calls: int
    """Calls of one answer that are executed."""
    max_response_tokens: int
    """Tokens of one result."""
    truncation: Truncation
    """Side on which a longer one is cut: left keeps its end, right its beginning, middle both."""
    timeout_s: float
    """Wall-clock limit of each call of a tool's method."""


class ToolSession:
    """Use as `async with`; the tools of `tools_kwargs` are created at once, others at their first call."""

    def __init__(
        self,
        tools: Mapping[str, BaseTool],
        *,
        tools_kwargs: Mapping[str, Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        limits: ToolLimits,
        facts: Mapping[str, Any],
        images: ImageEncoder | None = None,
        no_images_reason: str = "the model takes text alone",
    ) -> None:
        """Args:
        tools: by name.
        tools_kwargs: per tool: create_kwargs, execute_kwargs, calc_reward_kwargs, release_kwargs.
        tokenizer: measures results.
        limits: of this episode.
        facts: of the episode, for tools; `execute` gets them as the attributes of `agent_data`.
        images: reads images of results.
        no_images_reason: reason why the model cannot be shown any; empty where it can.
        """
        self._tools = tools
        self._kwargs = tools_kwargs
        self._tokenizer = tokenizer
        self._limits = limits
        self._images, self._no_images_reason = images, no_images_reason
        self._agent_data = SimpleNamespace(**facts, tools_kwargs=tools_kwargs, metrics={})
        self._instances: dict[str, asyncio.Task[str]] = {}
        self.results: list[CallResult] = []
        """Every call so far."""

    async def __aenter__(self) -> Self:
        try:
            for name in self._kwargs:
                if name in self._tools:
                    await self._instance(name)
        except BaseException:
            await self._release()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._release()

    @property
    def seconds(self) -> float:
        """Time spent in calls."""
        return math.fsum(result.seconds for result in self.results)

    def numbers(self) -> dict[str, float]:
        """For the metrics of the step: `call_numbers` of every call so far."""
        return call_numbers(self.results, self._tools, self._tokenizer)

    async def call_all(self, calls: Sequence[FunctionCall | MalformedCall]) -> list[CallResult]:
        """Carry out the calls of one answer at the same time; one result per call, in order.

        Raises:
            ToolUnavailable: a tool cannot work; the other calls have ended then.
        """
        limit = self._limits.max_parallel_calls
        outcomes = await asyncio.gather(*(self._call(call) for call in calls[:limit]), return_exceptions=True)
        results: list[CallResult] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            results.append(outcome)
        results += [
            CallResult(
                name=call.name,
                error="too_many",
                text=f"Tool call not executed: at most {limit} tool call{'s' if limit > 1 else ''} per turn "
                f"{'are' if limit > 1 else 'is'} allowed. Send it again in a later turn.",
            )
            for call in calls[limit:]
        ]
        self.results += results
        return results

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> CallResult:
        """Carry out one call, arguments as an object or as its JSON text.

        Raises:
            ToolUnavailable: the tool cannot work.
        """
        text = arguments if isinstance(arguments, str) else json.dumps(storable(arguments))
        result = await self._call(FunctionCall(name, text))
        self.results.append(result)
        return result

    async def calc_rewards(self) -> dict[str, float]:
        """The reward of each tool that was created, at the end of an episode. One that fails gives none.

        Raises:
            ToolUnavailable: a tool cannot work.
        """
        rewards = {}
        for name, created in self._instances.items():
            if not created.done() or created.cancelled() or created.exception() is not None:
                continue
            tool, kwargs = self._tools[name], self._kwargs_of(name, "calc_reward_kwargs")
            try:
                value = await self._timed(
                    result_of(tool.calc_reward, f"tool {name}", call_in_thread, created.result(), **kwargs)
                )
                rewards[name] = _reward(value, "calc_reward")
            except ToolUnavailable:
                raise
            except Exception:
                logger.exception("tool %s gave no reward", name)
        return rewards

    # ------------------------------------------------------------------ one call

    async def _call(self, call: FunctionCall | MalformedCall) -> CallResult:
        start = time.perf_counter()
        result = await self._execute(call, start)
        add_span(
            SPANS.get(),
            "tool",
            call.name,
            time.perf_counter() - start,
            arguments=call.arguments if isinstance(call, FunctionCall) else call.text,
            result=result.as_read,
            error=result.error,
        )
        return result

    async def _execute(self, call: FunctionCall | MalformedCall, start: float) -> CallResult:
        name = call.name
        if isinstance(call, MalformedCall):
            return CallResult(name=name, error="malformed", text=call.problem)
        if name not in self._tools:
            available = ", ".join(sorted(self._tools)) or "none"
            text = f"Unknown tool '{name}'. Available tools: {available}"
            return CallResult(name=name, error="unknown_tool", text=text)
        try:
            arguments = read_json(call.arguments or "{}")
        except ValueError as invalid:
            text = f"Invalid JSON in arguments for '{name}': {invalid}"
            return CallResult(name=name, error="bad_arguments", text=text)
        if not isinstance(arguments, dict):
            text = f"Invalid JSON in arguments for '{name}': they must be an object"
            return CallResult(name=name, error="bad_arguments", text=text)
        if problem := self._tools[name].wrong_arguments(arguments):
            return CallResult(
                name=name, error="bad_arguments", text=f"Invalid arguments for '{name}': {problem}"
            )
        error = ""
        response, reward = ToolResponse(), 0.0
        facts: Mapping[str, Any] = {}
        images: tuple[Media, ...] = ()
        try:
            instance = await self._instance(name)
            kwargs = self._kwargs_of(name, "execute_kwargs")
            kwargs = {**kwargs, "agent_data": self._agent_data}
            execute = self._tools[name].execute
            returned = await self._timed(
                result_of(execute, f"tool {name}", answer_in_thread, instance, arguments, **kwargs)
            )
            response, reward, facts = _checked_result(returned)
            images = self._read_images(response)
        except _DeadlineExceeded:
            error, text = "timeout", f"no answer within {self._limits.timeout_s:g} s"
        except ToolUnavailable:
            raise
        except Exception as failure:
            logger.debug("tool %s failed", name, exc_info=True)
            error, text = "failed", described(failure)
        if error:
            response = ToolResponse(text=f"Error executing tool '{name}': {text}")
        shown_text = self._truncate(encodable(response.text or ""))
        if unshown := self._unshown_media(response, len(images)):
            error, shown_text = "not_shown", "\n".join([*([shown_text] if shown_text else []), unshown])
        return CallResult(
            name=name,
            text=shown_text or ("" if images else EMPTY_RESULT),
            images=images,
            reward=reward,
            facts=facts,
            error=error,
            seconds=time.perf_counter() - start,
            response=response,
        )

    def _read_images(self, response: ToolResponse) -> tuple[Media, ...]:
        """The images of a result, where the model can be shown any.

        Raises:
            ValueError: one of them cannot be read.
        """
        if self._images is None or self._no_images_reason:
            return ()
        return tuple(self._images.read(image) for image in response.image or ())

    def _unshown_media(self, response: ToolResponse, num_shown: int) -> str:
        """A sentence about media of a result that the model is not shown; empty where there are none."""
        kinds = {"image": len(response.image or ()) - num_shown, "video": len(response.video or ())}
        kinds["audio"] = len(response.audio or ())
        reasons = dict.fromkeys(kinds, "results of tools are shown as text and images alone")
        reasons["image"] = self._no_images_reason
        sentences = [
            f"({count} {kind}{'s' if count > 1 else ''} cannot be shown: {reasons[kind]})"
            for kind, count in kinds.items()
            if count
        ]
        if sentences:
            logger.warning("a tool gave what the model is not shown: %s", " ".join(sentences))
        return "\n".join(sentences)

    def _kwargs_of(self, name: str, key: str) -> Mapping[str, Any]:
        return self._kwargs.get(name, {}).get(key) or {}

    async def _instance(self, name: str) -> str:
        """The tool's instance of this episode, created once, also by several calls at the same time."""
        if name not in self._instances:
            create_kwargs = self._kwargs_of(name, "create_kwargs")
            self._instances[name] = asyncio.create_task(self._create(name, create_kwargs))
        return await asyncio.shield(self._instances[name])

    async def _create(self, name: str, create_kwargs: Mapping[str, Any]) -> str:
        create = self._tools[name].create
        arguments = create_arguments(create, create_kwargs)
        created: object = await self._timed(result_of(create, f"tool {name}", call_in_thread, **arguments))
        return str(created[0] if isinstance(created, tuple) else created)  # some tools give the id alone

    async def _timed(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._limits.timeout_s) as deadline:
                with contained():
                    return await work
        except TimeoutError as error:
            if deadline.expired():
                raise _DeadlineExceeded from None
            raise RuntimeError(
                f"TimeoutError: {error}"
            ) from error  # the tool's own, sooner than the deadline

    def _truncate(self, text: str) -> str:
        """The text within the limit of tokens, with a word where some was left out."""
        limit = self._limits.max_response_tokens
        if len(text) <= limit // 4:  # a character has at most four bytes, and a token at least one
            return text
        most, truncation = limit * MAX_CHARS_PER_TOKEN, self._limits.truncation
        parts = {
            "left": text[-most:],
            "right": text[:most],
            "middle": text[: most // 2] + text[-(most // 2) :],
        }
        is_cut = (
            len(text) > most
        )  # so much text is more than the limit, and encoding all of it may take minutes
        part = parts[truncation] if is_cut else text
        ids = self._tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) <= limit and not is_cut:
            return text
        return truncated(ids, min(limit, len(ids)), truncation, self._tokenizer)

    # ------------------------------------------------------------------ the end

    async def _release(self) -> None:
        """Release every tool that was created or is being created, also while the episode is cancelled."""
        instances, self._instances = self._instances, {}
        if not instances:
            return
        releasing = asyncio.ensure_future(
            asyncio.gather(*(self._release_one(name, task) for name, task in instances.items()))
        )
        cancelled: asyncio.CancelledError | None = None
        while not releasing.done():
            try:
                await asyncio.shield(releasing)
            except asyncio.CancelledError as error:  # of the episode; every wait inside has its own deadline
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _release_one(self, name: str, created: asyncio.Task[str]) -> None:
        try:
            instance = await created
        except Exception:  # noqa: BLE001  (was told to whoever asked for it)
            return
        try:
            release, kwargs = self._tools[name].release, self._kwargs_of(name, "release_kwargs")
            await self._timed(result_of(release, f"tool {name}", call_in_thread, instance, **kwargs))
        except Exception:
            logger.exception("tool %s could not be released", name)


class _DeadlineExceeded(Exception):
    """A tool's method did not answer within its deadline."""


def truncated(
    ids: Sequence[int], limit: int, truncation: Truncation, tokenizer: PreTrainedTokenizerBase
) -> str:
    """Text of at most `limit` of the tokens, with a word where something was left out.

    left keeps the end, right the beginning, middle half of each.
    """
    if truncation == "left":
        return f"(truncated)...{tokenizer.decode(list(ids[-limit:]))}"
    if truncation == "right":
        return str(tokenizer.decode(list(ids[:limit]))) + "...(truncated)"
    head, tail = limit - limit // 2, limit // 2
    end = tokenizer.decode(list(ids[len(ids) - tail :])) if tail else ""
    return f"{tokenizer.decode(list(ids[:head]))}...(truncated)...{end}"


def _checked_result(returned: object) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Check the value that `execute` returned."""
    if isinstance(returned, (str, ToolResponse)):
        returned = (returned,)
    if not isinstance(returned, tuple) or not 1 <= len(returned) <= 3:
        raise TypeError(f"execute returned {returned!r:.80}; it must return (ToolResponse, reward, metrics)")
    response = ToolResponse(text=returned[0]) if isinstance(returned[0], str) else returned[0]
    if not isinstance(response, ToolResponse):
        raise TypeError(f"execute returned a {type(response).__name__} as its response, not a ToolResponse")
    reward = _reward(returned[1], "execute") if len(returned) > 1 else 0.0
    return response, reward, dict(returned[2] or {}) if len(returned) > 2 else {}


def _reward(value: object, method: str) -> float:
    reward = 0.0 if value is None else usable(value)
    if reward is None:
        raise ValueError(
            f"{method} returned the reward {storable_text(value)[:80]}; it must be a number up to 1e15"
        )
    return reward
