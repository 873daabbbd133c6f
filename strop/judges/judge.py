"""A language model that grades answers: the prompt, and the number in its reply.

The judged text is untrusted: a policy that learns may write whatever raises its score. It stands between tags that hold
letters made from the text itself, so no text can close them; what comes back is one number that must lie in the range
of the rubric. A reply without such a number is an error of this sample, never a score.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import regex  # type: ignore[import-untyped]

from strop.border import encodable, read_json_at, storable, storable_text, without_common_control_text
from strop.judges.client import RemoteClient, Reply
from strop.judges.config import JudgeConfig
from strop.judges.cost_budget import CostBudget
from strop.rewards.combining import Part
from strop.rewards.outcome import CallFailed, Value

KEY = "judge"
_MAX_REASON = 500
_TAG_LETTERS = 12
_MAX_TOKENS = 10**9
"""Of one reply; a larger count is none."""
_MAX_VERDICT_CHARS = 1 << 16
"""The verdict is looked for in the last so many characters of a reply."""
_MAX_OBJECTS = 200
"""And among the last so many places where an object begins."""
_PATTERN_S = 5.0
_NOTHING: Any = object()


class Judge:
    """Grades one answer per request."""

    def __init__(self, config: JudgeConfig, *, rank: int = 0, count: int = 1) -> None:
        """Args:
        config: of the run.
        rank, count: which of how many processes this is that ask the judge for the run.
        """
        self.config = config
        self._budget = CostBudget(config.max_cost, count=count)
        url = f"{config.base_url.rstrip('/')}/chat/completions"
        self._client = RemoteClient(config.share(rank, count), url, name=KEY, budget=self._budget)

    def start(self) -> None:
        """Start the client; RewardError as `RemoteClient.start`."""
        self._client.start()

    async def close(self) -> None:
        """End what is under way."""
        await self._client.close()

    @property
    def spent(self) -> float:
        """What it has cost in this process."""
        return self._budget.spent

    def tell_spent(self, run_spent: float) -> None:
        """What it has cost the run so far, in all its processes and starts (reward.judge.max_cost)."""
        self._budget.tell(run_spent)

    async def score(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[Part, dict[str, float]]:
        """The verdict on one answer, and what it used up; see RewardService.score."""
        return await self._client.run(self._score(item, fresh=fresh))

    async def _score(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[Part, dict[str, float]]:
        config = self.config
        asked = fill(config, item["prompt"], item["response"], _reference(item["ground_truth"]))
        request = {
            "model": config.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.extra_body,
        }
        try:
            reply = await self._client.ask(request, fresh=fresh)
        except CallFailed as failed:
            raise CallFailed(failed.kind, str(failed), _named(failed.usage)) from failed
        usage = _named(reply.usage) | self._paid(reply)
        text = _content(reply.data)
        if text is None:
            raise CallFailed(
                "infrastructure", f"the judge sent no chat completion: {_shown(reply.data)}", usage
            )
        found = await asyncio.to_thread(verdict, config, text)
        if isinstance(found, str):
            raise CallFailed("error", f"the judge {config.model} {found}: {_shown(text)}", usage)
        score, reason = found
        self._client.remember(reply)
        parts: dict[str, Value] = {"acc": (score - config.lowest) / (config.highest - config.lowest)}
        if reason:
            parts["reason"] = reason[:_MAX_REASON]
        return Part(key=KEY, weight=config.weight, score=score, parts=parts), usage

    def _paid(self, reply: Reply) -> dict[str, float]:
        """Tokens and price of a reply, taken from the budget; nothing of one that was remembered."""
        if reply.usage.get("cached"):
            return {}
        given = reply.data.get("usage") if isinstance(reply.data, dict) else None
        counts = [0.0, 0.0]
        for place, name in enumerate(("prompt_tokens", "completion_tokens")):
            number = given.get(name) if isinstance(given, dict) else None
            if isinstance(number, int) and 0 <= number <= _MAX_TOKENS:
                counts[place] = float(number)
            else:
                self._budget.pay_unknown()
        config = self.config
        cost = (
            counts[0] * config.price_per_million_input_tokens
            + counts[1] * config.price_per_million_output_tokens
        ) / 1e6
        self._budget.pay(cost)
        return {f"{KEY}/input_tokens": counts[0], f"{KEY}/output_tokens": counts[1], f"{KEY}/cost": cost}


def _reference(ground_truth: Any) -> str:
    """The right answer as text; empty where there is none."""
    if ground_truth is None:
        return ""
    is_text = isinstance(ground_truth, str)
    return encodable(ground_truth if is_text else json.dumps(storable(ground_truth), ensure_ascii=False))


def fill(config: JudgeConfig, question: str, answer: str, reference: str) -> str:
    """The judge's prompt. Equal texts give equal prompts."""
    tag = hashlib.sha256(f"{question}\0{answer}\0{reference}".encode(errors="replace")).hexdigest()[
        :_TAG_LETTERS
    ]
    known = f"\nA right answer, which the model was not shown:\n<reference-{tag}>\n{reference}\n</reference-{tag}>\n"
    return config.template.format(
        question=question, answer=without_common_control_text(answer), rubric=config.rubric, tag=tag,
        reference=known if reference else "",
        lowest=f"{config.lowest:g}", highest=f"{config.highest:g}",
    )  # fmt: skip


def verdict(config: JudgeConfig, text: str) -> tuple[float, str] | str:
    """Score and reason of a reply; a sentence about the reply where there is no score."""
    text = text[-_MAX_VERDICT_CHARS:]
    if config.pattern:
        try:
            given: Any = _last_match(config.pattern, text)
        except TimeoutError:
            return f"gave a reply in which reward.judge.pattern was looked for longer than {_PATTERN_S:g} s"
        if given is _NOTHING:
            return "gave no verdict (nothing matches reward.judge.pattern)"
        reason: Any = ""
    else:
        found = _last_object(text, config.score_field)
        if found is None:
            return f"gave no verdict (no JSON object with {config.score_field!r})"
        given, reason = found[config.score_field], found.get("reason", "")
    try:
        score = float(given)
    except (TypeError, ValueError, OverflowError):
        return f"gave the score {storable_text(given)[:80]!r}, which is no number"
    if isinstance(given, bool):
        score = config.highest if given else config.lowest
    if not (math.isfinite(score) and config.lowest <= score <= config.highest):
        return f"gave the score {score:g}, outside of {config.lowest:g} to {config.highest:g}"
    return score, reason if isinstance(reason, str) else ""


def _last_match(pattern: str, text: str) -> Any:
    """First group of the last place where an expression of the user matches; _NOTHING without one.

    The lock of the interpreter is not held meanwhile.

    Raises:
        TimeoutError: an expression can take exponential time, and this one took more than _PATTERN_S.
    """
    last = _NOTHING
    for match in regex.compile(pattern).finditer(text, timeout=_PATTERN_S, concurrent=True):
        last = match.group(1)
    return last


def _last_object(text: str, name: str) -> Mapping[str, Any] | None:
    """The last JSON object in a text that has this field at its top.

    Looked at are the last _MAX_OBJECTS beginnings of one: a judge may repeat what it was given to read, and each
    beginning is read to its end.
    """
    starts = [match.start() for match in re.finditer(r'\{\s*["}]', text)]
    for start in reversed(starts[-_MAX_OBJECTS:]):
        try:
            value, _ = read_json_at(text, start)
        except ValueError:
            continue
        if isinstance(value, dict) and name in value:
            return value
    return None


def _content(data: Any) -> str | None:
    """Text of the first choice of a chat completion."""
    try:
        content = data["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    return content if isinstance(content, str) else None


def _named(usage: Mapping[str, float]) -> dict[str, float]:
    return {f"{KEY}/{name}": value for name, value in usage.items()}


def _shown(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(storable(value))).split())
    return repr(text[:120] + ("..." if len(text) > 120 else ""))
