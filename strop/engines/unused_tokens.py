"""Token ids that a model has rows for and its tokenizer has no token for: embeddings are often padded to a round size.

Nobody can read such a token, so none is ever sampled: they have probability zero in generation, and in every log-prob
that is compared with it (policy, reference, teacher, process reward model). Fine-tuning on texts and on comparisons
goes over the whole vocabulary, as elsewhere: it keeps these rows unlikely for programs that do not know of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strop.engines.model_folder import end_tokens


def unused_token_ids(tokenizer: Any, num_rows: int, folder: str) -> tuple[int, ...]:
    """The ids behind a tokenizer's last token, up to the end of the head; those that end generation are used.

    Args:
        tokenizer: of the model.
        num_rows: of the head.
        folder: of the model, whose generation settings may name tokens too.

    Raises:
        ValueError: the generation settings of the folder cannot be used.
    """
    special = [number for number in tokenizer.all_special_ids if number is not None]
    token_ids = [*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder, *special]
    ends = set(end_tokens(Path(folder)))
    return tuple(
        number
        for number in range(max(len(tokenizer), *(n + 1 for n in token_ids)), num_rows)
        if number not in ends
    )
