"""Rows that hold the tokens themselves: sampled tokens are trained as they are, never encoded again from text.

| column | value |
|---|---|
| `prompt_ids`, `response_ids` | token ids |
| `response_mask` | true on tokens that are trained; without it all of the response |
| `earlier_sequences` | of a sample whose history was rewritten: further such mappings |
| `teacher_ids`, `teacher_logprobs` | [response tokens, K]: likely tokens in the place of each, and their log-probs |
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from strop.data.sft.stored_conversation import StoredConversation, TeacherTop
from strop.utils.chat_template.answers import answer_text
from strop.utils.sanitize import encodable, storable_text

_MOST = 1.001
"""Largest sum of probabilities: 1, but for the rounding of logs."""


def token_examples(
    row: Mapping[str, Any], number: int, *, where: str, num_ids: int
) -> Iterator[StoredConversation]:
    """Every training sequence of the row in which a token is trained.

    Args:
        row: its columns.
        number: of the row in the files.
        where: names it in errors.
        num_ids: token ids are below this.

    Raises:
        ValueError: a column is malformed, or an id is that of no token.
    """
    for sequence in (*(row.get("earlier_sequences") or ()), row):
        prompt = _ids(sequence["prompt_ids"], "prompt_ids", where, num_ids)
        response = _ids(sequence["response_ids"], "response_ids", where, num_ids)
        mask = sequence.get("response_mask")
        mask = [True] * len(response) if mask is None else [bool(is_trained) for is_trained in mask]
        if not prompt or len(mask) != len(response):
            raise ValueError(
                f"{where} has {len(prompt)} prompt_ids, {len(response)} response_ids and {len(mask)} values of "
                f"response_mask; a prompt has at least one token, and the other two are as many"
            )
        teacher = _teacher(sequence, len(prompt), len(response), where, num_ids)
        if any(mask):
            yield StoredConversation(
                number, array("i", [*prompt, *response]), bytes([*bytes(len(prompt)), *mask]), (), teacher
            )


def _ids(value: object, name: str, where: str, num_ids: int) -> list[int]:
    if not isinstance(value, list | tuple) or not all(isinstance(token, int) for token in value):
        raise ValueError(f"{where}: {name} is {value!r:.60}; it must be a list of token ids")
    out_of_range = [token for token in value if not 0 <= token < num_ids]
    if out_of_range:
        raise ValueError(
            f"{where}: {name} has the id {out_of_range[0]}, but the tokenizer of model.path has ids from 0 to "
            f"{num_ids - 1}: the tokens are those of another model; use one with the same tokenizer"
        )
    return list(value)


def _teacher(
    row: Mapping[str, Any], start: int, num_tokens: int, where: str, num_ids: int
) -> TeacherTop | None:
    """Logged top tokens of a teacher for the response; None where the row has none.

    Raises:
        ValueError: one of the two columns is missing, they are not [response tokens, K], or hold no log-probs.
    """
    ids, log_probs = row.get("teacher_ids"), row.get("teacher_logprobs")
    if ids is None and log_probs is None:
        return None
    form = f"{where}: teacher_ids and teacher_logprobs"
    try:
        top = np.asarray(ids, dtype=np.int32), np.asarray(log_probs, dtype=np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"{form} must be lists of as many numbers for each response token ({error})"
        ) from error
    if top[0].ndim != 2 or top[0].shape != top[1].shape or len(top[0]) != num_tokens or not top[0].shape[1]:
        raise ValueError(
            f"{form} have shapes {list(top[0].shape)} and {list(top[1].shape)}; both need [{num_tokens}, K], a list of "
            f"K numbers for each of the {num_tokens} response tokens"
        )
    if num_tokens and (top[0].min() < 0 or top[0].max() >= num_ids):
        raise ValueError(
            f"{form}: ids go from {top[0].min()} to {top[0].max()}; use a teacher with the same tokenizer"
        )
    ordered = np.sort(top[0], axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError(f"{form}: a place has the same token twice; log every token once")
    mass = np.exp(top[1].astype(np.float64)).sum(axis=1)
    if not np.isfinite(top[1]).all() or (mass > _MOST).any():
        raise ValueError(
            f"{form} are no log-probs: the probabilities of a place add up to {np.nanmax(mass):.3g}, or one is not "
            f"finite; log the natural logs of probabilities at temperature 1"
        )
    return TeacherTop(start, *top)


def check_text(tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], where: str) -> None:
    """Refuse tokens that say something else than the text of the row: they are those of another tokenizer.

    Raises:
        ValueError: with both texts.
    """
    sequences: Sequence[Mapping[str, Any]] = [*(row.get("earlier_sequences") or ()), row]
    text = row.get("response")
    if not isinstance(text, str) or not all(
        isinstance(sequence["response_ids"], list) for sequence in sequences
    ):
        return
    responses = [sequence["response_ids"] for sequence in sequences]
    if any(
        not isinstance(token, int) or not 0 <= token < len(tokenizer) for ids in responses for token in ids
    ):
        return  # reported with its row later
    decoded = "".join(answer_text(tokenizer, ids) for ids in responses)
    plain = "".join(str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in responses)
    if text not in (
        storable_text(encodable(decoded)),
        storable_text(encodable(plain)),
    ):  # as another run keeps them
        raise ValueError(
            f"{where}: its tokens say {decoded!r:.60} with the tokenizer of model.path, but its text is {text!r:.60}: "
            f"they are those of another tokenizer; use a model with the tokenizer that they were sampled with"
        )
