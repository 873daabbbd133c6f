"""Bytes of single tokens: what a client is told of each token beside its log-prob.

`decode` of one token loses what only its neighbours show: a space that begins a word of SentencePiece, and the bytes of
a character that several tokens make.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""Form of a token that stands for a byte, in vocabularies of SentencePiece."""
_SPACE = "▁"
"""Sign for a space, in the same."""


def token_bytes(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[bytes]:
    """UTF-8 of each token; of a character that several tokens make, each one's part."""
    steps, added = _decoder_steps(tokenizer), tokenizer.added_tokens_decoder
    names: list[Any] = [tokenizer.convert_ids_to_tokens(token_id) for token_id in token_ids]
    return [
        (None if token_id in added or name is None else _bytes_of(str(name), steps))
        or str(tokenizer.decode([token_id])).encode()
        for token_id, name in zip(token_ids, names, strict=True)
    ]


def text_offsets(parts: Sequence[bytes]) -> list[int]:
    """The place in their text at which each token begins; inside a character, that of the character."""
    decoder, length, offsets = codecs.getincrementaldecoder("utf-8")("replace"), 0, []
    for part in parts:
        offsets.append(length)
        length += len(decoder.decode(part))
    return offsets


def opening_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that the tokenizer writes before a text that no template has rendered, such as <s>."""
    plain, whole = (list(tokenizer("a", add_special_tokens=adds)["input_ids"]) for adds in (False, True))
    starts = range(len(whole) - len(plain) + 1)
    return tuple(next((whole[:start] for start in starts if whole[start : start + len(plain)] == plain), ()))


def _decoder_steps(tokenizer: Any) -> frozenset[str]:
    """Kinds of the steps of a tokenizer's decoder, and _SPACE where one writes a space for it; none where there is no
    such decoder."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    steps = state.get("decoders") or [state]
    writes_space = any(
        step.get("replacement") == _SPACE or step.get("pattern") == {"String": _SPACE} for step in steps
    )
    return frozenset([*(str(step.get("type")) for step in steps), *([_SPACE] if writes_space else [])])


def _bytes_of(name: str, steps: frozenset[str]) -> bytes | None:
    """The bytes of a token with this name in the vocabulary; None where the decoder is of another kind."""
    if "ByteLevel" in steps:
        table = _byte_of_char()
        return bytes(table[char] for char in name) if table.keys() >= set(name) else None
    if "ByteFallback" in steps and (match := _BYTE.fullmatch(name)):
        return bytes([int(match[1], 16)])
    return name.replace(_SPACE, " ").encode() if _SPACE in steps else None


@cache
def _byte_of_char() -> dict[str, int]:
    """Bytes by the characters that stand for them in byte-level vocabularies: visible ones of Latin-1 for themselves,
    the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {
        chr(0x100 + number): byte for number, byte in enumerate(others)
    }
