"""A language model that grades answers, or compares them: prompts and requests.

The judged text is untrusted: a policy that learns may write whatever raises its score. It stands between tags that hold
letters made from the text itself, so no text can close them; what comes back is one number that must lie in the range
of the rubric. A reply without such a number is an error of this sample, never a score.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from strop.rewards.combine import Part
from strop.rewards.judges.client import CallFailed, RemoteClient, Reply, add_usage
from strop.rewards.judges.comparing import orders, tally_comparisons
from strop.rewards.judges.config import JudgeConfig
from strop.rewards.judges.cost_budget import CostBudget
from strop.rewards.judges.replies import MAX_LISTED, criteria_verdict, letter_of, points, verdict
from strop.rewards.judges.rubrics import criteria_text
from strop.rewards.outcome import Value
from strop.utils.sanitize import encodable, storable
from strop.utils.sanitize.control_tokens import without_common_control_text

KEY = "judge"
_MAX_REASON = 500
_TAG_LETTERS = 12
_MAX_TOKENS = 10**9
"""Of one reply; a larger count is none."""


class Judge:
    """Grades one answer per request, or compares several."""

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
    def cost(self) -> float:
        """Cost in this process."""
        return self._budget.cost

    def set_cost(self, run_cost: float) -> None:
        """Set its cost for the run so far, in all its processes and starts (reward.judge.max_cost)."""
        self._budget.set_cost(run_cost)

    async def score(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[Part, dict[str, float]]:
        """The verdict on one answer, and its usage; see RewardService.score."""
        return await self._client.run(self._score(item, fresh=fresh))

    async def _score(self, item: Mapping[str, Any], *, fresh: bool) -> tuple[Part, dict[str, float]]:
        config, usage = self.config, dict[str, float]()
        texts = item["prompt"], item["response"], reference_of(item["ground_truth"])
        prompt, tag = fill(config, *texts), tag_of(*texts) if config.marks_verdicts else ""
        scores: list[dict[str, float]] = []
        reason, failure = "", None
        for vote in range(config.votes):
            text, reply = await self._reply(prompt, usage, fresh=fresh, vote=vote)
            result = await asyncio.to_thread(self._read, text, tag)
            if isinstance(result, str):
                failure = failure or self._no_verdict(result, text, reply, usage)
                continue
            self._client.remember(reply)
            scores.append(result[0])
            reason = reason or result[1]
        if 2 * len(scores) <= config.votes and failure is not None:  # half of the votes, or more, are none
            raise failure
        return self._part(scores, reason), usage

    def _read(self, text: str, tag: str) -> tuple[dict[str, float], str] | str:
        """Numbers by criterion, under the empty name where there are no criteria, and the reason; or a sentence."""
        if self.config.criteria:
            return criteria_verdict(self.config, text, tag)
        result = verdict(self.config, text, tag)
        return result if isinstance(result, str) else ({"": result[0]}, result[1])

    def _part(self, scores: Sequence[Mapping[str, float]], reason: str) -> Part:
        """The mean of the votes; of criteria, their weighted mean, and each beside it."""
        config = self.config
        mean = {name: fmean(vote[name] for vote in scores) for name in scores[0]}
        weights = {criterion.name: criterion.weight for criterion in config.criteria} or {"": 1.0}
        score = sum(weights[name] * mean[name] for name in weights) / sum(weights.values())
        score = min(max(score, config.lowest), config.highest)  # whatever the rounding
        parts: dict[str, Value] = {"acc": (score - config.lowest) / (config.highest - config.lowest)}
        parts |= {name: value for name, value in mean.items() if name}
        if reason:
            parts["reason"] = reason[:_MAX_REASON]
        return Part(key=KEY, weight=config.weight, score=score, parts=parts)

    async def _reply(
        self, prompt: str, usage: dict[str, float], *, fresh: bool, vote: int = 0
    ) -> tuple[str, Reply]:
        """Ask the judge; returns text and reply, and adds what the request used to `usage`.

        Raises:
            CallFailed: nothing that can be read came.
        """
        config = self.config
        request = {
            "model": config.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **({"seed": vote} if config.votes > 1 else {}),
            **config.extra_body,
        }
        try:
            reply = await self._client.ask(request, fresh=fresh)
        except CallFailed as failed:
            add_usage(usage, _with_prefix(failed.usage))
            raise CallFailed(failed.kind, str(failed), usage, remedy=failed.remedy) from failed
        add_usage(usage, _with_prefix(reply.usage) | self._paid(reply))
        text = _content(reply.data)
        if text is None:
            raise CallFailed(
                "infrastructure", f"the judge sent no chat completion: {_shown(reply.data)}", usage
            )
        return text, reply

    @property
    def compares(self) -> bool:
        """True if it compares the answers to a prompt, and scores none by itself."""
        return self.config.compares

    async def compare(
        self, items: Sequence[Mapping[str, Any]], *, fresh: bool
    ) -> list[tuple[Part | CallFailed, dict[str, float]]]:
        """Score of each answer to a prompt, or the reason why it has none, and its share of the usage.

        Args:
            items: as of `score`, the answers of one prompt.
            fresh: do not take them from a cache.
        """
        return await self._client.run(self._compare(items, fresh=fresh))

    async def _compare(
        self, items: Sequence[Mapping[str, Any]], *, fresh: bool
    ) -> list[tuple[Part | CallFailed, dict[str, float]]]:
        if self.config.compare == "list" and len(items) > MAX_LISTED:
            sentence = (
                f"the prompt has {len(items)} answers, and a list has letters for {MAX_LISTED}: use pairs"
            )
            return [(CallFailed("error", sentence, {}, remedy=""), {}) for _ in items]
        requests = orders(self.config, len(items))
        usages: list[dict[str, float]] = [{} for _ in requests]
        results = await asyncio.gather(
            *(
                self._points([items[number] for number in order], usage, fresh=fresh)
                for order, usage in zip(requests, usages, strict=True)
            )
        )
        failures = [result for result in results if isinstance(result, CallFailed)]
        failures.sort(key=lambda failure: failure.kind != "error")
        points_or_reasons = [
            (order, str(result) if isinstance(result, CallFailed) else result)
            for order, result in zip(requests, results, strict=True)
        ]
        scores: list[tuple[Part | CallFailed, dict[str, float]]] = []
        for number, tally in enumerate(tally_comparisons(len(items), points_or_reasons)):
            used: dict[str, float] = {}
            for order, usage in zip(requests, usages, strict=True):
                if number in order:
                    add_usage(used, {name: value / len(order) for name, value in usage.items()})
            if tally.failed:
                first = failures[0]
                scores.append((CallFailed(first.kind, tally.failed, {}, remedy=first.remedy), used))
                continue
            parts: dict[str, Value] = {
                "comparisons": float(len(tally.points)), "position_bias": tally.position_bias
            }  # fmt: skip
            scores.append((Part(key=KEY, weight=self.config.weight, score=tally.score, parts=parts), used))
        return scores

    async def _points(
        self, items: Sequence[Mapping[str, Any]], usage: dict[str, float], *, fresh: bool
    ) -> list[float] | CallFailed:
        """Points of the answers in one comparison, in the order in which they are shown."""
        question, reference = items[0]["prompt"], reference_of(items[0]["ground_truth"])
        answers = [item["response"] for item in items]
        prompt = fill_comparison(self.config, question, answers, reference)
        tag = tag_of(question, *answers, reference) if self.config.marks_verdicts else ""
        try:
            text, reply = await self._reply(prompt, usage, fresh=fresh)
        except CallFailed as failed:
            return failed
        result = await asyncio.to_thread(points, text, len(items), tag)
        if isinstance(result, str):
            return self._no_verdict(result, text, reply, {})
        self._client.remember(reply)
        return result

    def _no_verdict(self, problem: str, text: str, reply: Reply, usage: Mapping[str, float]) -> CallFailed:
        """The failure of a reply without a verdict, with the advice that it needs where it was cut."""
        sentence = f"the judge {self.config.model} {problem}: {_shown(text)}"
        if not _is_cut(reply.data):
            return CallFailed("error", sentence, usage)
        limit = self.config.max_tokens
        return CallFailed(
            "error",
            f"{sentence}, cut at reward.judge.max_tokens={limit}",
            usage,
            remedy=f"raise reward.judge.max_tokens above {limit}, which the judge's thinking counts towards",
        )

    def _paid(self, reply: Reply) -> dict[str, float]:
        """Tokens and price of a reply, taken from the budget; nothing of one that was remembered."""
        if reply.usage.get("cached"):
            return {}
        tokens = reply.data.get("usage") if isinstance(reply.data, dict) else None
        counts = [0.0, 0.0]
        for index, name in enumerate(("prompt_tokens", "completion_tokens")):
            number = tokens.get(name) if isinstance(tokens, dict) else None
            if isinstance(number, int) and 0 <= number <= _MAX_TOKENS:
                counts[index] = float(number)
            else:
                self._budget.pay_unknown()
        config = self.config
        cost = (
            counts[0] * config.price_per_million_input_tokens
            + counts[1] * config.price_per_million_output_tokens
        ) / 1e6
        self._budget.pay(cost)
        return {f"{KEY}/input_tokens": counts[0], f"{KEY}/output_tokens": counts[1], f"{KEY}/cost": cost}


def reference_of(ground_truth: Any) -> str:
    """The right answer as text; empty where there is none."""
    if ground_truth is None:
        return ""
    is_text = isinstance(ground_truth, str)
    return encodable(ground_truth if is_text else json.dumps(storable(ground_truth), ensure_ascii=False))


def fill(config: JudgeConfig, question: str, answer: str, reference: str) -> str:
    """The judge's prompt. Equal texts give equal prompts."""
    tag = tag_of(question, answer, reference)
    rubric = (
        criteria_text(config.criteria, int(tag, 16) % len(config.criteria))
        if config.criteria
        else config.rubric
    )
    return config.prompt.format(
        question=question, answer=without_common_control_text(answer), rubric=rubric, tag=tag,
        reference=_reference_block(reference, tag), lowest=f"{config.lowest:g}", highest=f"{config.highest:g}",
    )  # fmt: skip


def fill_comparison(config: JudgeConfig, question: str, answers: Sequence[str], reference: str) -> str:
    """The judge's prompt about several answers, which it knows by letters in the order in which they are shown."""
    tag = tag_of(question, *answers, reference)
    blocks = "\n\n".join(
        f"<answer-{letter_of(index)}-{tag}>\n{without_common_control_text(answer)}\n</answer-{letter_of(index)}-{tag}>"
        for index, answer in enumerate(answers)
    )
    return config.prompt.format(
        question=question,
        answers=blocks,
        rubric=config.rubric,
        tag=tag,
        reference=_reference_block(reference, tag),
    )


def tag_of(*texts: str) -> str:
    """Letters that none of these texts (question, answers, reference) can contain by intent."""
    return hashlib.sha256("\0".join(texts).encode(errors="replace")).hexdigest()[:_TAG_LETTERS]


def _reference_block(reference: str, tag: str) -> str:
    block = f"\nA right answer, which the model was not shown:\n<reference-{tag}>\n{reference}\n</reference-{tag}>\n"
    return block if reference else ""


def _content(data: Any) -> str | None:
    """Text of the first choice of a chat completion; empty where it was cut before one."""
    try:
        content = data["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return None
    if content is None and _is_cut(data):
        return ""
    return content if isinstance(content, str) else None


def _is_cut(data: Any) -> bool:
    """True for a chat completion that ended at its limit of tokens."""
    try:
        return bool(data["choices"][0]["finish_reason"] == "length")
    except (KeyError, IndexError, TypeError):
        return False


def _with_prefix(usage: Mapping[str, float]) -> dict[str, float]:
    return {f"{KEY}/{name}": value for name, value in usage.items()}


def _shown(value: object) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(storable(value))).split())
    return repr(text[:120] + ("..." if len(text) > 120 else ""))
