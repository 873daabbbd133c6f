"""The token record of an episode of several turns: one training sequence, or several where history is rewritten.

Answers are appended as they were sampled, replies as the chat template writes them after an answer. A reply at
which the template would write earlier turns differently (its thinking is dropped, for example) ends the sequence:
the next one has the rewritten conversation as its prompt, and nothing of it is trained twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strop.agents.context import AgentContext
from strop.agents.tools.images import as_read
from strop.agents.tools.parsed_output import CLOSE, OPEN, FunctionCall, ParsedTurn, split_thinking
from strop.agents.tools.templates import MAX_CHARS_PER_TOKEN
from strop.protocol.trajectory import Media, MediaTokens, Prompt, Trajectory, continues, with_answer, words_of
from strop.rollout.types import TokenOutput
from strop.utils.chat_template import TemplateRefused
from strop.utils.sanitize import encodable, read_json

CONTINUED = "continued"
"""Stop reason of a sequence after which the conversation went on in another one."""
NO_ROOM = "no room for it and another answer"
MAX_LEFT_OUT_CHARS = 2000
"""Of a reply that did not fit, in the sample store."""


class Conversation:
    """Grows while an agent plays; `finish` gives the sequences."""

    def __init__(self, prompt: Prompt, trajectory: Trajectory, context: AgentContext) -> None:
        self._context = context
        self._current = trajectory
        self._done: list[Trajectory] = []
        self._max_row = len(trajectory.prompt_ids) + context.sampling.max_tokens
        self._messages: list[Mapping[str, Any]] = list(prompt.messages)
        """As the template sees them."""
        self._is_continued = continues(prompt.messages)
        self._log: list[dict[str, Any]] = []
        self._has_thinking = False
        self._call_names: list[str] = []
        self._call_ids: list[str] = []
        self._answer_at = 0
        self._num_answers = self._num_replies = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens that the model continues, with their images."""
        return self._current.token_ids

    @property
    def num_turns(self) -> int:
        """Answers and replies, and the prompt."""
        return self._num_answers + self._num_replies + 1

    @property
    def num_sequences(self) -> int:
        """Training sequences so far."""
        return len(self._done) + 1

    @property
    def room(self) -> int:
        """Tokens that may still be appended."""
        used = sum(len(t.response_ids) for t in (*self._done, self._current))
        return min(self._context.sampling.max_tokens - used, self._max_row - len(self.token_ids))

    @property
    def begins_in_thinking(self) -> bool:
        """The next answer begins inside thinking, which the template has opened, or the message that it continues."""
        if not self._is_continued:
            return self._context.begins_in_thinking
        _, opened, thinking = words_of(self._messages[-1]).rpartition(OPEN)
        return bool(opened) and CLOSE not in thinking

    def add_answer(self, output: TokenOutput, parsed: ParsedTurn) -> None:
        """Append an answer of the model."""
        start = len(self._current.response_ids)
        self._answer_at = len(self._current.token_ids)
        self._current = self._current.with_sampled(output.token_ids, output.log_probs, output.versions)
        self._num_answers += 1
        self._has_thinking = self._has_thinking or bool(parsed.reasoning.strip())
        template = self._context.template
        self._call_names = [template.as_plain_text(call.name or "unknown") for call in parsed.calls]
        self._call_ids = template.call_ids(
            self._call_names,
            [call.tool_call_id if isinstance(call, FunctionCall) else None for call in parsed.calls],
        )
        if self._is_continued:  # one message, begun by the row
            self._messages[-1] = self._as_end_of_message(output, parsed)
            self._is_continued = False
        else:
            self._messages.append(self._as_message(output, parsed))
        entry: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning:
            entry["reasoning"] = parsed.reasoning
        if parsed.calls:
            entry["tool_calls"] = [
                {"name": call.name, "arguments": call.arguments}
                if isinstance(call, FunctionCall)
                else {"name": call.name, "malformed": call.text, "problem": call.problem}
                for call in parsed.calls
            ]
        self._log_entry(entry, start)

    def add_replies(
        self,
        texts: Sequence[str],
        *,
        role: str = "tool",
        images: Sequence[Sequence[Media]] = (),
        facts: Sequence[Mapping[str, Any]] = (),
    ) -> bool:
        """Append the results of the calls of the last answer, in order, or the turn of a user.

        Args:
            texts: one per call, or that of the user.
            role: tool or user.
            images: of each of them, if there are any.
            facts: kept with each of them in the sample store, such as a reward.

        Returns:
            False where they do not fit with at least one more token of the model; nothing is appended then.

        Raises:
            TemplateRefused: the template has no place for them.
            ValueError: the template has places for another number of images.
        """
        if sum(map(len, texts)) > self._max_row * MAX_CHARS_PER_TOKEN:
            return False  # to encode it would hold up all episodes
        texts = [encodable(text) for text in texts]
        names, ids = self._reply_names(role), self._call_ids if role == "tool" else [""]
        results = list(zip(ids, names, texts, strict=True))
        template = self._context.template
        all_images = [image for of_result in images for image in of_result]
        replies = template.reply_messages(
            results, role=role, num_images=[len(of_result) for of_result in images] if all_images else ()
        )
        start = len(self._current.response_ids)
        reply = template.reply(
            replies,
            call_names=self._call_names if role == "tool" else (),
            tools=self._context.tool_schemas,
            last_id=self._current.response_ids[-1],
            stop_ids=self._context.stop_ids,
        )
        is_rewritten = reply.ends_otherwise or self._is_rewritten_at(str(replies[0]["role"]))
        if is_rewritten and not (
            all_images or self._current.media
        ):  # their places are known in these very tokens alone
            start = 0
            if not self._start_sequence(
                template.prompt_ids([*self._messages, *replies], self._context.tool_schemas)
            ):
                return False
        else:
            reply_ids = self._expand(reply.token_ids, all_images) if all_images else reply.token_ids
            if self.room <= len(reply_ids):
                return False
            self._current = self._current.with_given(reply_ids)
        self._messages += replies
        self._num_replies += 1
        images_in_place = iter(self._current.media[len(self._current.media) - len(all_images) :])
        for number, (name, text) in enumerate(zip(names, texts, strict=True)):
            image_facts = (
                [self._image_facts(next(images_in_place)) for _ in images[number]] if all_images else []
            )
            entry = {
                "role": role,
                "content": as_read(text, len(image_facts)),
                **(facts[number] if facts else {}),
            }
            self._log_entry(
                entry | ({"name": name} if name else {}) | ({"images": image_facts} if image_facts else {}),
                start,
            )
        return True

    def _reply_names(self, role: str) -> list[str]:
        """Tools that the replies are from; an empty name for a user."""
        return self._call_names if role == "tool" else [""]

    def log_left_out(
        self, texts: Sequence[str], *, role: str, facts: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Record replies that did not fit, in the sample store alone."""
        start = len(self._current.response_ids)
        for number, (name, text) in enumerate(zip(self._reply_names(role), texts, strict=True)):
            entry = {"role": role, "content": encodable(text[:MAX_LEFT_OUT_CHARS]), "left_out": NO_ROOM}
            self._log_entry(
                entry | ({"name": name} if name else {}) | (dict(facts[number]) if facts else {}), start
            )

    def finish(
        self,
        stop_reason: str,
        *,
        extra: Mapping[str, Any],
        numbers: Mapping[str, float],
        timings: Mapping[str, float],
    ) -> tuple[Trajectory, ...]:
        """The sequences in order; the last one has the facts of the whole episode.

        Args:
            stop_reason: why it ended.
            extra: facts for the reward function.
            numbers: for the metrics.
            timings: seconds per activity.
        """
        drift = self._drift() if self._num_replies else None
        last = replace(
            self._current,
            messages=tuple(self._log),
            num_turns=self.num_turns,
            extra=extra,
            numbers=numbers if drift is None else {**numbers, "template_drift": drift},
            timings=timings,
        )
        return (*self._done, last.finish(stop_reason))

    def _expand(self, token_ids: Sequence[int], images: Sequence[Media]) -> MediaTokens:
        encoder = self._context.images
        assert encoder is not None, "whoever read the images has it"
        return encoder.expand(token_ids, images)

    def _image_facts(self, image: Media) -> dict[str, Any]:
        """An image for the sample store: its size, and which response tokens stand for it."""
        first = len(self._current.prompt_ids)
        return {"size": list(image.size), "tokens": [position - first for position in image.span]}

    def _start_sequence(self, prompt_ids: tuple[int, ...]) -> bool:
        """Begin a sequence with this prompt; False, and nothing is done, where it leaves no room for a token."""
        used = sum(len(t.response_ids) for t in (*self._done, self._current))
        if min(self._context.sampling.max_tokens - used, self._max_row - len(prompt_ids)) < 1:
            return False
        self._done.append(self._current.finish(CONTINUED))
        self._current = Trajectory(
            uid=self._current.uid, sample_index=self._current.sample_index, prompt_ids=prompt_ids
        )
        self._has_thinking = False
        return True

    def _is_rewritten_at(self, role: str) -> bool:
        has_system = bool(self._messages) and self._messages[0]["role"] == "system"
        is_rewritten: bool = self._context.template.profile.rewrites_history(
            role, has_system=has_system, has_thinking=self._has_thinking
        )
        return is_rewritten

    def _as_message(self, output: TokenOutput, parsed: ParsedTurn) -> dict[str, Any]:
        """An answer for the template: as it was written, or in its parts where the template wants these."""
        profile = self._context.template.profile
        if profile.takes_raw_answers:
            text = self._as_written(output)
            if not (profile.knows_thinking and CLOSE in text):
                text = profile.thinking_opening + text.removeprefix(profile.before_text)
                return {"role": "assistant", "content": text}
            thinking, text = split_thinking(text, begins_in_thinking=profile.begins_in_thinking)
            return {"role": "assistant", "content": text.lstrip("\n"), **thinking_fields(thinking)}
        content = parsed.content or (profile.no_content if parsed.calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if parsed.reasoning:
            message |= thinking_fields(parsed.reasoning)
        return message | self._calls_for_template(parsed)

    def _as_end_of_message(self, output: TokenOutput, parsed: ParsedTurn) -> dict[str, Any]:
        """The last message, whose words the answer continues, with these behind them."""
        if self._context.template.profile.takes_raw_answers:
            return dict(with_answer(self._messages, self._as_written(output))[-1])
        is_inside = self.begins_in_thinking
        thinking = f"{parsed.reasoning}{CLOSE}" if is_inside else ""
        message = dict(with_answer(self._messages, f"{thinking}{parsed.content}")[-1])
        if parsed.reasoning and not is_inside:
            message |= thinking_fields(parsed.reasoning)
        return message | self._calls_for_template(parsed)

    def _as_written(self, output: TokenOutput) -> str:
        """The text of an answer with its control tokens, but for the one that ends it."""
        ids = list(output.token_ids)
        if ids and ids[-1] in self._context.template.ends_of_turns(self._context.stop_ids):
            ids.pop()
        return str(self._context.tokenizer.decode(ids))

    def _calls_for_template(self, parsed: ParsedTurn) -> dict[str, Any]:
        """The calls of an answer as part of its message; nothing where it has none."""
        if not parsed.calls:
            return {}
        return {
            "tool_calls": [
                {
                    "id": self._call_ids[number],
                    "type": "function",
                    "function": {"name": self._call_names[number], "arguments": _arguments(call)},
                }
                for number, call in enumerate(parsed.calls)
            ]
        }

    def _log_entry(self, entry: Mapping[str, Any], start: int) -> None:
        stop = len(self._current.response_ids)
        self._log.append({**entry, "sequence": len(self._done), "tokens": [start, stop]})

    def _drift(self) -> float | None:
        """Share of the last sequence's response for which the template and the tokenizer would give other tokens.

        The tokens before the last answer are rendered from messages, the last answer is encoded from its text. 0 where
        the template only appends and the model writes as the tokenizer encodes. Training is not affected: it uses the
        sampled tokens.
        """
        template, token_ids = self._context.template, self.token_ids
        has_answer = self._messages[-1]["role"] == "assistant"
        first, answer_at = len(self._current.prompt_ids), self._answer_at if has_answer else len(token_ids)
        messages = self._messages[:-1] if has_answer else self._messages
        tokenizer = self._context.tokenizer
        prompt = str(tokenizer.decode(list(self._current.prompt_ids)))
        try:
            text = template.render(messages, self._context.tool_schemas, opens_answer=True)
            if not text.startswith(prompt):
                return None  # the prompt was cut, or its header is written differently once it is answered
            rendered: Sequence[int] = [*self._current.prompt_ids, *template.encode(text[len(prompt) :])]
            if self._current.media:
                rendered = self._expand(rendered, self._current.media)
        except (TemplateRefused, ValueError):
            return None
        rendered = [*rendered, *template.encode(str(tokenizer.decode(list(token_ids[answer_at:]))))]
        end = 0
        while end < min(len(rendered), len(token_ids)) and rendered[end] == token_ids[end]:
            end += 1
        return min(1.0, (len(token_ids) - end) / max(1, len(token_ids) - first))


def thinking_fields(thinking: str) -> dict[str, str]:
    """Thinking under the names that templates know, without the line breaks that they write around it."""
    return dict.fromkeys(("reasoning_content", "thinking"), thinking.strip("\n"))


def _arguments(call: Any) -> Any:
    try:
        return read_json(call.arguments)
    except (AttributeError, ValueError):
        return {}
