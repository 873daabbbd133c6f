"""Sampled answers of a session, found again when a client sends them back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from strop.agents.openai_server.messages import Call, ConversationKey, Message, conversation_key


@dataclass(frozen=True, kw_only=True)
class SampledAnswer:
    """One choice of one call."""

    context_key: ConversationKey
    """The conversation before it."""
    message: Message
    """As sent to the client."""
    token_ids: tuple[int, ...]
    has_thinking: bool


class SampledAnswers:
    """Answers by the ids of their calls, and by what they say."""

    def __init__(self) -> None:
        self.written_ids: dict[str, str] = {}
        """Ids that the model wrote, of calls by the ids that clients know."""
        self._by_key: dict[tuple[Any, ...], list[SampledAnswer]] = {}
        self._by_call: dict[str, SampledAnswer] = {}
        self._in_order: deque[SampledAnswer] = deque()
        self._num_tokens = 0

    def add(self, answer: SampledAnswer, written_ids: Sequence[str | None]) -> None:
        """Remember an answer, with the ids that the model wrote for its calls, where it wrote some."""
        self._by_key.setdefault(answer.message.key, []).append(answer)
        self._in_order.append(answer)
        self._num_tokens += len(answer.token_ids)
        for call, written_id in zip(answer.message.calls, written_ids, strict=True):
            self._by_call[call.id] = answer
            if written_id:
                self.written_ids[call.id] = written_id

    def find(self, message: Message, messages_before: Sequence[Message]) -> SampledAnswer | None:
        """The answer that a message of the assistant repeats."""
        for call in message.calls:
            answer = self._by_call.get(call.id)
            if answer is not None and answer.message.key == message.key:
                return answer
        candidates = self._by_key.get(message.key, [])
        context_key = conversation_key(messages_before) if len(candidates) > 1 else ()
        return next(
            (candidate for candidate in reversed(candidates) if candidate.context_key == context_key),
            candidates[-1] if candidates else None,
        )

    def has_answer_of(self, calls: Sequence[Call]) -> bool:
        """True if the model wrote these calls in one answer."""
        answers = [self._by_call.get(call.id) for call in calls]
        return answers[0] is not None and all(answer is answers[0] for answer in answers)

    def forget_beyond(self, max_tokens: int) -> bool:
        """Forget the oldest answers where all have more tokens, but for the last; True if there were some."""
        has_forgotten = False
        while len(self._in_order) > 1 and self._num_tokens > max_tokens:
            oldest = self._in_order.popleft()
            self._num_tokens -= len(oldest.token_ids)
            self._by_key[oldest.message.key].remove(oldest)
            for call in oldest.message.calls:
                self._by_call.pop(call.id, None)
                self.written_ids.pop(call.id, None)
            has_forgotten = True
        return has_forgotten
