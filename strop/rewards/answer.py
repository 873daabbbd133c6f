"""One answer to score, as functions and services are told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.border import encodable
from strop.rewards.wire import plain
from strop.trajectory import Prompt


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model answered to a prompt."""

    prompt: Prompt
    """The row; its ground truth, columns and extra_info reach the function."""
    text: str
    """The decoded response."""
    num_turns: int = 2
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of extra_info."""
    response_ids: Sequence[int] = ()
    """Empty where it comes from no trajectory."""

    def call(self, style: str) -> dict[str, Any]:
        """What a worker process is sent for functions of this calling convention."""
        prompt = self.prompt
        call: dict[str, Any] = {
            "data_source": prompt.data_source,
            "solution_str": self.text,
            "ground_truth": prompt.ground_truth,
            "extra_info": {
                **prompt.extra_info, "num_turns": self.num_turns, "rollout_reward_scores": {}, "turn_scores": [],
                "tool_rewards": [], **self.extra,
            },
        }  # fmt: skip
        if style in ("trl", "manager"):
            call |= self._fields_of_trl()
        if style == "manager":
            call |= {
                "prompt_ids": list(prompt.token_ids),
                "messages": plain(prompt.messages),
                "uid": prompt.uid,
            }
        return call

    def _fields_of_trl(self) -> dict[str, Any]:
        """What TRL hands to a reward function: texts for a text prompt, message lists for a conversation."""
        text_prompt = self.prompt.columns.get("prompt")
        is_text = isinstance(text_prompt, str)
        return {
            "prompt": text_prompt if is_text else list(self.prompt.messages),
            "completion": self.text if is_text else [{"role": "assistant", "content": self.text}],
            "completion_ids": list(self.response_ids),
            "columns": {name: value for name, value in self.prompt.columns.items() if name != "prompt"},
        }

    def item(self) -> dict[str, Any]:
        """What a service is given; see RewardService.score."""
        return {
            "prompt": _question(self.prompt), "messages": plain(self.prompt.messages), "response": self.text,
            "data_source": self.prompt.data_source, "ground_truth": plain(self.prompt.ground_truth),
        }  # fmt: skip


def _question(prompt: Prompt) -> str:
    """A prompt as one text; several messages are named by their roles."""
    messages = [
        (str(message.get("role", "")), _content(message.get("content"))) for message in prompt.messages
    ]
    is_plain = len(messages) == 1
    return encodable(
        messages[0][1] if is_plain else "\n\n".join(f"{role}: {text}" for role, text in messages)
    )


def _content(content: Any) -> str:
    """Text of a message; other kinds of content are named."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else []
    texts = [
        str(part.get("text") or f"<{part.get('type', 'part')}>")
        for part in parts
        if isinstance(part, Mapping)
    ]
    return " ".join(texts)
