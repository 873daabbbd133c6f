"""Facts about chat template, tokenizer and model, from the first prompts of a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.data.chat import Chat, render
from strop.engines.pretrained_config import load_model_config
from strop.engines.unused_tokens import unused_token_ids
from strop.protocol.trajectory import Prompt, continues, with_answer
from strop.trainer.config import Config
from strop.trainer.preflight.tokens import AnswerEnd, TokenFacts
from strop.trainer.setup import sampling_of
from strop.utils.chat_template.answers import kept_special_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANSWER = "strop:answer"
"""Stands for an answer in a rendered chat: nothing that a template writes by itself."""
_MARKER = re.compile(r"<\|[^\s<>|]{1,40}\|>|</?s>|<(?:start|end)_of_turn>|\[/?INST\]")
"""Spellings of templates that a tokenizer made for them has as one token."""


def token_facts(config: Config, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt]) -> TokenFacts:
    """Facts about prompts, template and vocabulary."""
    ids = [list(prompt.token_ids) for prompt in prompts]
    texts = [tokenizer.decode(token_ids) for token_ids in ids]
    opening = _opening(config, tokenizer, prompts[0])
    start = getattr(tokenizer, "bos_token_id", None)
    shape = load_model_config(config.model)
    num_embeddings = int(getattr(shape.get_text_config(), "vocab_size", 0) or 0)
    answered = _answered(config, tokenizer, prompts[0])
    return TokenFacts(
        num_prompts=len(prompts),
        num_changed=sum(
            list(tokenizer.encode(text, add_special_tokens=False)) != token_ids
            for text, token_ids in zip(texts, ids, strict=True)
        ),
        num_double_starts=sum(start is not None and token_ids[:2] == [start, start] for token_ids in ids),
        num_without_opening=sum(opening.strip() not in text[-len(opening) - 200 :] for text in texts)
        if opening
        else 0,
        has_opening=None if opening is None else bool(opening.strip()),
        spelled_out=() if answered is None else _spelled_out(tokenizer, answered, prompts[0]),
        end=AnswerEnd("unknown") if answered is None else _end(config, tokenizer, answered),
        num_tokens=len(tokenizer),
        num_embeddings=num_embeddings,
        kept=kept_special_tokens(tokenizer),
        num_unused=len(unused_token_ids(tokenizer, num_embeddings, config.model.path)),
        largest_id=max(max(token_ids) for token_ids in ids),
    )


def _opening(config: Config, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | None:
    """Text of the template before an answer; None when it refuses these messages without their tools."""
    options = config.data.chat_template_kwargs
    messages = prompt.messages[:-1] if continues(prompt.messages) else prompt.messages
    chat = Chat(messages=tuple(messages), where=prompt.uid, options=options)
    try:
        whole = render(tokenizer, chat, add_generation_prompt=True)
        bare = render(tokenizer, chat, add_generation_prompt=False)
    except ValueError:
        return None
    return whole[len(bare) :] if whole.startswith(bare) else None


def _answered(config: Config, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str | None:
    """The chat of a prompt with an answer; None when the template refuses it or leaves the answer out."""
    messages = with_answer(prompt.messages, _ANSWER)
    chat = Chat(messages=messages, where=prompt.uid, options=config.data.chat_template_kwargs)
    try:
        text = render(tokenizer, chat, add_generation_prompt=False)
    except ValueError:
        return None
    return text if _ANSWER in text else None


def _end(config: Config, tokenizer: PreTrainedTokenizerBase, answered: str) -> AnswerEnd:
    """Text of the template after an answer, and if generation stops there."""
    text = answered.rpartition(_ANSWER)[2].lstrip()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        return AnswerEnd("nothing")
    if ids[0] in sampling_of(config, config.rollout, tokenizer).stop_token_ids:
        return AnswerEnd("stops")
    if ids[0] in tokenizer.all_special_ids:
        return AnswerEnd("runs on", str(tokenizer.convert_ids_to_tokens(ids[0])))
    return AnswerEnd("text", text)


def _spelled_out(tokenizer: PreTrainedTokenizerBase, answered: str, prompt: Prompt) -> tuple[str, ...]:
    """Control markers of the template that this tokenizer writes in several ordinary tokens."""
    text = str(prompt.messages)
    markers = dict.fromkeys(_MARKER.findall(answered))
    return tuple(
        marker
        for marker in markers
        if marker not in text and len(tokenizer.encode(marker, add_special_tokens=False)) > 1
    )
