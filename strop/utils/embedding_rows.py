"""Rows of a model's embedding: a tokenizer may know tokens for which the model has none, such as those that were added
to it and not to the model. Most are never written; a text that holds one cannot be read by the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_NUM_ROWS = "strop_num_rows"


def set_num_rows(tokenizer: Any, num_rows: int) -> None:
    """Let a tokenizer know how many tokens its model has rows for."""
    setattr(tokenizer, _NUM_ROWS, num_rows)


def check_tokens_known(tokenizer: Any, token_ids: Sequence[int], where: str) -> None:
    """Refuse tokens for which the model has no row.

    Args:
        tokenizer: as `set_num_rows` left it; another one refuses nothing.
        token_ids: of a text.
        where: names the text in the error.

    Raises:
        ValueError: one has none.
    """
    num_rows: int | None = getattr(tokenizer, _NUM_ROWS, None)
    if num_rows is None or not token_ids or (largest := max(token_ids)) < num_rows:
        return
    token = tokenizer.convert_ids_to_tokens(largest)
    raise ValueError(
        f"{where} has the token {token!r} ({largest}), for which the model has no row: its embedding has {num_rows}. "
        f"Use the tokenizer that the model was trained with, add rows (resize_token_embeddings of transformers), or "
        f"write the text otherwise"
    )
