"""Token ids of the prompts of large sets, before any limit is applied, kept for the next run.

They lie in a file whose name is a digest of all they depend on: what the template sees of every row (messages, tools,
variables), the template, the tokenizer and the versions of the libraries. A limit may change without a new encoding.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import zipfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from strop.data.cache import cache_folder, use
from strop.data.chat import Chat
from strop.utils.chat_template import asks_for_time

MIN_CACHED_ROWS = 5000
"""Smaller sets are encoded within seconds and not kept."""

_log = logging.getLogger(__name__)


def load_or_encode(
    encode: Callable[[PreTrainedTokenizerBase, Iterable[Chat]], list[array[int]]],
    tokenizer: PreTrainedTokenizerBase,
    chats: Callable[[], Iterable[Chat]],
    num_chats: int,
    cache_dir: str,
) -> list[array[int]]:
    """Token ids of every conversation with the generation prompt, from the cache or encoded now.

    Args:
        encode: encodes conversations.
        tokenizer: with a chat template.
        chats: gives the conversations from the first on, each time it is called.
        num_chats: number of conversations; from MIN_CACHED_ROWS on the result is kept.
        cache_dir: folder of the cache; empty means the default.
    """
    if num_chats < MIN_CACHED_ROWS or not _is_repeatable(tokenizer):
        return encode(tokenizer, chats())
    path = cache_folder(cache_dir) / "prompts" / f"{digest(tokenizer, chats())}.npz"
    token_ids = _load(path, num_chats)
    if token_ids is None:
        token_ids = encode(tokenizer, chats())
        _save(path, token_ids)
    return token_ids


def digest(tokenizer: PreTrainedTokenizerBase, chats: Iterable[Chat]) -> str:
    """A name for the token ids of these conversations; 32 hexadecimal digits."""
    state = hashlib.blake2b(digest_size=16)
    state.update(f"{transformers.__version__} {tokenizers.__version__}\n".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state.update(str(backend.to_str() if backend is not None else "").encode("utf-8", "surrogatepass"))
    state.update(repr((tokenizer.chat_template, sorted(tokenizer.special_tokens_map.items()))).encode())
    for chat in chats:  # in the order of the keys: templates print objects in it
        text = json.dumps([chat.messages, chat.tools, dict(chat.options)], default=repr)
        state.update(text.encode() + b"\n")
    return state.hexdigest()


def _is_repeatable(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True where digest sees all that the ids depend on: a fast tokenizer, and a template without the date."""
    return tokenizer.is_fast and not asks_for_time(tokenizer.chat_template)


def _save(path: Path, encoded: Sequence[array[int]]) -> None:
    """Write the file at once; a folder that cannot be written costs time, not the run."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="writing-", dir=path.parent)
        staging = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                lengths = np.array([len(ids) for ids in encoded], dtype=np.int64)
                flat = np.frombuffer(b"".join(ids.tobytes() for ids in encoded), dtype=np.intc)
                np.savez(file, lengths=lengths, token_ids=flat)
            staging.replace(path)
            use(path)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("encoded prompts are not kept for the next run: %s", error)


def _load(path: Path, num_chats: int) -> list[array[int]] | None:
    """The kept token ids; None when there are none, or they are damaged."""
    try:
        with np.load(path) as arrays:
            lengths, flat = arrays["lengths"], arrays["token_ids"]
        use(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        _log.warning("encoded prompts in %s cannot be read and are made again: %s", path, error)
        return None
    if len(lengths) != num_chats or int(lengths.sum()) != len(flat) or flat.dtype != np.intc:
        return None
    ends = np.cumsum(lengths)
    return [array("i", flat[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)]
