"""Conversations as bytes that become chat messages again.

Agents speak in token ids. The tokens of somebody else's model are not known, so its conversations are written with a
tokenizer that has one token for each byte, and control tokens of its own between messages. What an agent has made of a
conversation is read back, message by message, and sent; what the server answers is written in the same form, calls of
tools as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from strop.utils.sanitize import encodable, read_json
from strop.utils.sanitize.control_tokens import ControlText

BYTES_PER_TOKEN = 32
"""More than the tokens of other models have on average: what bounds an answer is its number of tokens there."""
MESSAGE, TOOLS, END = "<|strop_message|>", "<|strop_tools|>", "<|strop_end|>"
_CALL = re.compile(r"\n?<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_NOT_ANSWERED = "This call was not carried out."
_TEMPLATE = """\
{%- if tools -%}
    {{- '<|strop_tools|>' + (tools | tojson) + '<|strop_end|>' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|strop_message|>' + message['role'] + '\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- elif message['content'] -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] != 'text' -%}
                {{- raise_exception('rollout.engine=openai sends text alone, no ' + part['type']) -}}
            {%- endif -%}
            {{- part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
    {%- for call in message['tool_calls'] or [] -%}
        {%- set function = call['function'] -%}
        {{- '\n<tool_call>\n{"name": ' + (function['name'] | tojson) + ', "arguments": ' -}}
        {{- function['arguments'] if function['arguments'] is string else (function['arguments'] | tojson) -}}
        {{- '}\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|strop_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|strop_message|>assistant\n' -}}
{%- endif -%}
"""


def make_speech_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte of UTF-8, three control tokens, and the chat template above."""
    control = [MESSAGE, TOOLS, END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*control, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers has no types here
        tokenizer_object=tokenizer, eos_token=END, clean_up_tokenization_spaces=False
    )
    fast.chat_template = _TEMPLATE
    return fast


def write_speech_folder(folder: Path) -> None:
    """The tokenizer, in a folder that looks like that of a model, for whatever reads one of `model.path`."""
    tokenizer = make_speech_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": len(tokenizer)}
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Spoken:
    """Messages and settings that are sent of a conversation."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)


class Speech:
    """Token ids to messages, and answers to token ids."""

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is that of `make_speech_tokenizer`."""
        self._tokenizer = tokenizer
        ids = tokenizer.convert_tokens_to_ids([MESSAGE, TOOLS, END])
        self._message, self._tools, self.end_id = ids
        self._control = ControlText(tokenizer)

    def read(self, token_ids: Sequence[int]) -> Spoken:
        """The messages and tools that these tokens were made of, up to the header of the next answer.

        Raises:
            ValueError: an answer that was begun would have to be continued, or there is no message.
        """
        spoken, pieces = Spoken(), self._pieces(token_ids)
        if not pieces or pieces[-1] != (self._message, "assistant\n"):
            raise ValueError(
                "an agent asks to continue an answer that was begun, which a server of chats does not do: let it end "
                "each prompt with the header of an answer, or use another rollout.engine"
            )
        waiting: list[str] = []
        for kind, text in pieces[:-1]:
            if kind == self._tools:
                spoken.tools.extend(read_json(text))
                continue
            role, _, content = text.partition("\n")
            if role != "tool":
                _answer_all(spoken.messages, waiting)
            if role == "assistant" and spoken.tools:
                spoken.messages.append(_with_calls(content, len(spoken.messages), waiting))
            elif role == "tool" and waiting:
                reply = {"role": "tool", "tool_call_id": waiting.pop(0), "content": content}
                spoken.messages.append(reply)
            else:  # a reply to what was no whole call
                spoken.messages.append({"role": "user" if role == "tool" else role, "content": content})
        _answer_all(spoken.messages, waiting)
        if not spoken.messages:
            raise ValueError("the prompt has no messages, so there is nothing to ask a server of chats")
        return spoken

    def write(self, content: str, calls: Sequence[tuple[str, str]], *, is_whole: bool) -> list[int]:
        """Tokens of an answer.

        Args:
            content: its text.
            calls: name and arguments, as JSON text, of each tool call.
            is_whole: it has ended, and was not cut off.
        """
        text = encodable(content)
        for name, arguments in calls:
            named = json.dumps(encodable(name), ensure_ascii=False)
            text += (
                f'\n<tool_call>\n{{"name": {named}, "arguments": {_object_text(arguments)}}}\n</tool_call>'
            )
        plain = self._control.as_plain_text(text)
        ids = list(self._tokenizer(plain, add_special_tokens=False, verbose=False)["input_ids"])
        return [*ids, self.end_id] if is_whole else ids

    def _pieces(self, token_ids: Sequence[int]) -> list[tuple[int, str]]:
        """The text behind each control token that opens one."""
        pieces: list[tuple[int, list[int]]] = []
        for token in token_ids:
            if token in (self._message, self._tools):
                pieces.append((token, []))
            elif token != self.end_id and pieces:
                pieces[-1][1].append(token)
        return [(kind, str(self._tokenizer.decode(ids))) for kind, ids in pieces]


def _answer_all(messages: list[dict[str, Any]], waiting: list[str]) -> None:
    """Servers refuse a conversation in which a call has no answer; agents need not carry all of them out."""
    messages.extend(
        {"role": "tool", "tool_call_id": call_id, "content": _NOT_ANSWERED} for call_id in waiting
    )
    waiting.clear()


def _with_calls(text: str, number: int, waiting: list[str]) -> dict[str, Any]:
    """The message of the assistant with its calls in their field; what is no whole call stays text."""
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        call = _call_of(match[1])
        if call is None:
            return match[0]
        identity = f"call_{number}_{len(calls)}"
        calls.append({"id": identity, "type": "function", "function": call})
        waiting.append(identity)
        return ""

    content = _CALL.sub(take, text)
    if not calls:
        return {"role": "assistant", "content": content}
    return {"role": "assistant", "content": content or None, "tool_calls": calls}


def _call_of(text: str) -> Mapping[str, str] | None:
    try:
        value = read_json(text)
    except ValueError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"name": value["name"], "arguments": written}


def _object_text(arguments: str) -> str:
    """Arguments as an object where they are one, else as a text, so that whoever reads the call sees what they are."""
    try:
        value = read_json(arguments or "{}")
    except ValueError:
        value = None
    return json.dumps(value if isinstance(value, dict) else encodable(arguments), ensure_ascii=False)
