"""Answers that a file holds, as tokens: what a teacher is logged over without sampling anything."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.utils.chat_template.answers import answer_text
from strop.utils.terminal import UsageError

if TYPE_CHECKING:
    from strop.data.chat import Chat
    from strop.trainer.config import Config


TOKENS = ("prompt_ids", "response_ids")
"""Columns of a row that holds tokens."""
_SAMPLING = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "max_tokens": None,
    "samples": 1,
    "seed": 0,
    "json": False,
}
"""Options of `strop generate` that say how answers are sampled and shown, and what each is where it is not given."""


def check_asked(args: argparse.Namespace) -> None:
    """Refuse what has no meaning beside --given.

    Raises:
        UsageError: the sentence says what.
    """
    if not args.top_logprobs or args.prompts is None or args.prompts.suffix == ".txt":
        raise UsageError(
            "--given logs answers of a file: name it with --prompts (.jsonl or .parquet), and say --top-logprobs K"
        )
    for name, default in _SAMPLING.items():
        if getattr(args, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--given samples nothing, so {option} would do nothing: leave it out")


def given_answers(
    rows: Sequence[Mapping[str, Any]], chats: Sequence[Chat | None], config: Config, where: str
) -> list[dict[str, Any]]:
    """A record of each row, as `strop generate --out` writes them.

    Args:
        rows: with `prompt_ids` and `response_ids`, which are taken as they are; else with a prompt and a text.
        chats: the prompt of each row; None where it has tokens.
        config: with the model, whose template and tokenizer make tokens of texts.
        where: the file, for sentences.

    Raises:
        ValueError: a row has no answer, or one that is no sequence of the model's tokens.
    """
    from strop.engines.causal_lm import max_positions
    from strop.engines.model import load_tokenizer, read_shape
    from strop.rewards.rescoring import RESPONSES
    from strop.trainer.setup import stop_token_ids

    tokenizer = load_tokenizer(config.model)
    stops = stop_token_ids(config.model, tokenizer, config.rollout.stop_token_ids)
    longest = max_positions(read_shape(config.model))
    records = []
    for number, (row, chat) in enumerate(zip(rows, chats, strict=True)):
        place = f"row {number} of {where}"
        text = next((row[name] for name in RESPONSES if isinstance(row.get(name), str)), None)
        if chat is None:
            prompt_ids, response_ids = (list(row[name]) for name in TOKENS)
        elif text is not None:
            prompt_ids, response_ids = encoded(tokenizer, chat, text, stops, place)
        else:
            raise ValueError(
                f"{place} has no answer: name the column {', '.join(RESPONSES)}, or {' and '.join(TOKENS)} with "
                f"tokens; columns found: {', '.join(row)}"
            )
        _check(prompt_ids, response_ids, len(tokenizer), longest, place)
        records.append(
            {
                "row": number,
                "sample_index": 0,
                "prompt": row.get(config.data.prompt_key),
                "response": answer_text(tokenizer, response_ids) if text is None else text,
                "stop_reason": "stop" if response_ids[-1] in stops else "length",
                "num_tokens": len(response_ids),
                "prompt_ids": prompt_ids,
                "response_ids": response_ids,
            }
        )
    return records


def has_tokens(row: Mapping[str, Any]) -> bool:
    """The row says with which tokens it was asked and answered."""
    return all(row.get(name) is not None for name in TOKENS)


def encoded(
    tokenizer: Any, chat: Chat, text: str, stops: Sequence[int], where: str
) -> tuple[list[int], list[int]]:
    """Prompt and answer as the model would have written it: to the token that ends a turn."""
    from strop.data.chat import encode_all, render, render_prompt
    from strop.protocol.trajectory import with_answer

    asked = render_prompt(tokenizer, chat)
    answered = dataclasses.replace(chat, messages=with_answer(chat.messages, text))
    whole = render(tokenizer, answered, add_generation_prompt=False)
    if not whole.startswith(asked):
        raise ValueError(
            f"{where}: the chat template does not write the answer behind the prompt, so its tokens are not known; "
            f"give them in the columns {' and '.join(TOKENS)}"
        )
    prompt_ids, response_ids = encode_all(tokenizer, [asked, whole[len(asked) :]])
    ends = [place for place, token in enumerate(response_ids) if token in stops]
    return prompt_ids, response_ids[: ends[-1] + 1] if ends else response_ids


def _check(
    prompt_ids: Sequence[Any], response_ids: Sequence[Any], num_ids: int, longest: int | None, where: str
) -> None:
    for name, ids in zip(TOKENS, (prompt_ids, response_ids), strict=True):
        wrong = next((one for one in ids if type(one) is not int or not 0 <= one < num_ids), None)
        if wrong is not None:
            raise ValueError(
                f"{where}: {name} has {wrong!r}, and the model has the tokens 0 to {num_ids - 1}: they are of another "
                f"tokenizer"
            )
        if not ids:
            raise ValueError(f"{where}: {name} is empty, so nothing can be logged: leave the row out")
    total = len(prompt_ids) + len(response_ids)
    if longest is not None and total > longest:
        raise ValueError(
            f"{where} has {total} tokens, more than the {longest} positions of the model: leave it out"
        )
