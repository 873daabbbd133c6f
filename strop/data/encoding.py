"""Token ids of many prompts: texts are rendered one by one and encoded in batches, which fast tokenizers spread over
threads."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from transformers import PreTrainedTokenizerBase

from strop.base.guests import all_joined
from strop.data.chat import Chat, encode_all, render

_TOKENIZER_BATCH = 512
"""Texts per call of the tokenizer: enough to amortise the call, few enough to stay small in memory."""


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, chats: Callable[[], Iterable[Chat]], num_chats: int, cache_dir: str
) -> list[array[int]]:
    """Token ids of every conversation with the generation prompt; arrays take an eighth of what lists would.

    Args:
        tokenizer: with a chat template.
        chats: gives the conversations from the first on, each time it is called.
        num_chats: how many there are.
        cache_dir: where a guest may keep the result for the next run; empty means the default.
    """
    for keep in all_joined("kept token ids").values():
        kept: list[array[int]] = keep(_encoded, tokenizer, chats, num_chats, cache_dir)
        return kept
    return _encoded(tokenizer, chats())


def _encoded(tokenizer: PreTrainedTokenizerBase, chats: Iterable[Chat]) -> list[array[int]]:
    encoded: list[array[int]] = []
    texts: list[str] = []
    for chat in chats:
        texts.append(render(tokenizer, chat, add_generation_prompt=True))
        if len(texts) == _TOKENIZER_BATCH:
            encoded.extend(array("i", ids) for ids in encode_all(tokenizer, texts))
            texts = []
    encoded.extend(array("i", ids) for ids in encode_all(tokenizer, texts))
    return encoded
