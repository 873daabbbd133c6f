"""One episode turn by turn: who spoke, which tools were called and what they answered, and the tokens of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from strop.observability.viewer.token_view import Token, coloured, response_tokens
from strop.utils.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

Decode = Callable[[Sequence[int]], str]
_INDENT = "    "
_LABEL_STYLE = "bold"
_ERROR_STYLE = "red"
_SHOWN_ELSEWHERE = (
    "role", "content", "reasoning", "tool_calls", "name", "sequence", "tokens", "error", "images"
)  # fmt: skip


def training_sequences(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The sequences of tokens that a row was trained as, in order; the row itself holds the last one."""
    return [*(row.get("earlier_sequences") or ()), row]


def turns_text(row: Mapping[str, Any], decode: Decode | None = None) -> Text:
    """The answers and the replies to them, in order; with `decode`, as tokens in their colours.

    A turn is an answer with the replies to it. Several results of one answer share their tokens, which stand under the
    first of them.
    """
    from rich.text import Text

    tokens = (
        []
        if decode is None
        else [response_tokens(training_sequence, decode) for training_sequence in training_sequences(row)]
    )
    images = _images(row)
    text, num_answers, sequence = Text(), 0, 0
    previous: list[int] = []
    for message in row.get("messages") or ():
        at = int(message.get("sequence", 0))
        if at > sequence:
            text.append(f"sequence {at + 1}: {_sequence_reason(row, at)}\n", "dim")
            sequence = at
        num_answers += message["role"] == "assistant"
        span = _span(message, tokens)
        text.append(_headline(message, num_answers, span) + "\n", style=_LABEL_STYLE)
        position = [at, *message.get("tokens", ())]
        if not span:
            _append(text, str(message.get("reasoning") or ""), style="dim")
            _append(text, str(message.get("content") or ""))
        elif position != previous:
            text.append(_INDENT).append(coloured(_with_images(span, images.get(at, {})))).append("\n")
        previous = position
        for call in message.get("tool_calls") or ():
            _append_call(text, call)
        if message.get("error"):
            _append(text, f"error: {message['error']}", style=_ERROR_STYLE)
    return text


def _span(message: Mapping[str, Any], tokens: Sequence[Sequence[Token]]) -> Sequence[Token]:
    """The tokens of a message; none where they are not known."""
    sequence = int(message.get("sequence", 0))
    if sequence >= len(tokens) or "tokens" not in message:
        return ()
    start, stop = message["tokens"]
    return tokens[sequence][start:stop]


def _images(row: Mapping[str, Any]) -> dict[int, dict[int, tuple[int, str]]]:
    """By sequence and first token of each image of a tool: where its tokens end, and a name for them."""
    images: dict[int, dict[int, tuple[int, str]]] = {}
    for message in row.get("messages") or ():
        for image in message.get("images") or ():
            (wide, high), (start, stop) = image["size"], image["tokens"]
            name = f"[image {wide}x{high}: {stop - start} tokens]"
            images.setdefault(int(message.get("sequence", 0)), {})[start] = stop, name
    return images


def _sequence_reason(row: Mapping[str, Any], sequence: int) -> str:
    before = (row.get("earlier_sequences") or ())[sequence - 1 : sequence]
    if any(earlier.get("stop_reason") == "turn" for earlier in before):
        return "an answer is trained by itself (agent.credit=turn)"
    return "its prompt is another one (the chat template or the agent writes what stands before differently)"


def _with_images(span: Sequence[Token], images: Mapping[int, tuple[int, str]]) -> list[Token]:
    """The tokens with one name in place of those of each image."""
    parts, end = [], 0
    for token in span:
        if token.position in images:
            end, name = images[token.position]
            parts.append(replace(token, text=name))
        elif token.position >= end:
            parts.append(token)
    return parts


def _headline(message: Mapping[str, Any], num_answers: int, span: Sequence[Token]) -> str:
    """Turn, role and tool, number of tokens, versions of the policy, and what else is kept, such as a reward."""
    parts = [f"turn {num_answers}  {message['role']} {message.get('name', '')}".rstrip()]
    if "tokens" in message:
        start, stop = message["tokens"]
        parts.append(f"{stop - start} tokens")
    if span and message["role"] == "assistant":
        mean = sum(token.log_prob for token in span) / len(span)
        versions = "/".join(str(version) for version in sorted({token.version for token in span}))
        parts.append(f"version {versions} · mean log-prob {mean:.3f}")
    parts += [
        f"{key} {value if isinstance(value, str) else json.dumps(short(value), ensure_ascii=False)}"
        for key, value in message.items()
        if key not in _SHOWN_ELSEWHERE
    ]
    return plain(" · ".join(parts), is_one_line=True)


def short(value: object) -> Any:
    """Numbers with four digits that count, in lists and mappings too."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [short(item) for item in value]
    if isinstance(value, dict):
        return {key: short(item) for key, item in value.items()}
    return value


def _append_call(text: Text, call: Mapping[str, Any]) -> None:
    if "problem" in call:
        _append(text, f"broken call: {call['problem']} {call.get('malformed', '')}", style=_ERROR_STYLE)
        return
    arguments = call.get("arguments", "")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    _append(text, f"calls {call.get('name', '')} {shown}", style="magenta")


def _append(text: Text, content: str, *, style: str = "") -> None:
    """Indented lines; nothing for no content."""
    for line in plain(content).splitlines():
        text.append(f"{_INDENT}{line}\n", style=style)
