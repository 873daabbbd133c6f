"""Tokens of answers in a file, for the log-probs of a teacher, without sampling."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.utils.chat_template.answers import answer_text
from strop.utils.terminal import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
"""Options of `strop generate` about sampling and output, with their defaults."""


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that have no effect beside --given.

    Raises:
        UsageError: the sentence names the option.
    """
    if not args.top_logprobs or args.prompts is None or args.prompts.suffix == ".txt":
        raise UsageError(
            "--given logs answers of a file: name it with --prompts (.jsonl or .parquet), and say --top-logprobs K"
        )
    for name, default in _SAMPLING.items():
        if getattr(args, name) != default:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--given samples nothing, so {option} would do nothing: leave it out")


def offline_records(
    rows: Sequence[Mapping[str, Any]], chats: Sequence[Chat | None], config: Config, file_label: str
) -> list[dict[str, Any]]:
    """A record of each row, as `strop generate --out` writes them.

    Args:
        rows: with `prompt_ids` and `response_ids`, which are taken as they are; else with a prompt and a text.
        chats: the prompt of each row; None where it has tokens.
        config: with the model, whose template and tokenizer make tokens of texts.
        file_label: names the file in messages.

    Raises:
        ValueError: a row has no answer, or one that is no sequence of the model's tokens.
    """
    from strop.engines.model_facts import max_positions
    from strop.engines.pretrained_config import load_model_config
    from strop.engines.tokenizer import load_tokenizer
    from strop.rewards.rescoring import RESPONSES
    from strop.trainer.setup import stop_token_ids

    tokenizer = load_tokenizer(config.model)
    stops = stop_token_ids(config.model, tokenizer, config.rollout.stop_token_ids)
    longest = max_positions(load_model_config(config.model))
    records = []
    for number, (row, chat) in enumerate(zip(rows, chats, strict=True)):
        label = f"row {number} of {file_label}"
        text = next((row[name] for name in RESPONSES if isinstance(row.get(name), str)), None)
        if chat is None:
            prompt_ids, response_ids = (list(row[name]) for name in TOKENS)
        elif text is not None:
            prompt_ids, response_ids = encoded(tokenizer, chat, text, stops, label)
        else:
            raise ValueError(
                f"{label} has no answer: name the column {', '.join(RESPONSES)}, or {' and '.join(TOKENS)} with "
                f"tokens; columns found: {', '.join(row)}"
            )
        _check_tokens(prompt_ids, response_ids, len(tokenizer), longest, label)
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


def encoded(
    tokenizer: PreTrainedTokenizerBase, chat: Chat, text: str, stops: Sequence[int], label: str
) -> tuple[list[int], list[int]]:
    """Prompt and answer as the model would have written it: to the token that ends a turn."""
    from strop.data.chat import encode_all, render, render_prompt
    from strop.protocol.trajectory import with_answer

    prompt_text = render_prompt(tokenizer, chat)
    answered = dataclasses.replace(chat, messages=with_answer(chat.messages, text))
    whole = render(tokenizer, answered, add_generation_prompt=False)
    if not whole.startswith(prompt_text):
        raise ValueError(
            f"{label}: the chat template does not write the answer behind the prompt, so its tokens are not known; "
            f"give them in the columns {' and '.join(TOKENS)}"
        )
    prompt_ids, response_ids = encode_all(tokenizer, [prompt_text, whole[len(prompt_text) :]])
    ends = [index for index, token in enumerate(response_ids) if token in stops]
    return prompt_ids, response_ids[: ends[-1] + 1] if ends else response_ids


def _check_tokens(
    prompt_ids: Sequence[Any], response_ids: Sequence[Any], num_ids: int, longest: int | None, label: str
) -> None:
    for name, ids in zip(TOKENS, (prompt_ids, response_ids), strict=True):
        invalid = next((token for token in ids if type(token) is not int or not 0 <= token < num_ids), None)
        if invalid is not None:
            raise ValueError(
                f"{label}: {name} has {invalid!r}, and the model has the tokens 0 to {num_ids - 1}: they are of "
                f"another tokenizer"
            )
        if not ids:
            raise ValueError(f"{label}: {name} is empty, so nothing can be logged: leave the row out")
    total = len(prompt_ids) + len(response_ids)
    if longest is not None and total > longest:
        raise ValueError(
            f"{label} has {total} tokens, more than the {longest} positions of the model: leave it out"
        )
