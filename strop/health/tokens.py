"""Do template, tokenizer and model fit together? Checks on the tokens of prompts, before anything is generated."""

from __future__ import annotations

from dataclasses import dataclass

from strop.health.verdict import Check


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """What the prompts, the chat template and the vocabulary show."""

    num_prompts: int
    num_changed: int
    """Prompts whose tokens are others after decoding and encoding again."""
    num_double_starts: int
    """Prompts that begin with two beginning-of-sequence tokens."""
    num_without_opening: int
    """Prompts that do not end with what the template writes before an answer."""
    has_opening: bool | None
    """The template writes something before an answer; None when it could not be asked."""
    unknown_end: str
    """The special token with which the template ends an answer, when it does not stop generation; else empty."""
    num_tokens: int
    """Size of the tokenizer's vocabulary."""
    num_embeddings: int
    """Rows of the model's embedding; 0 when its configuration does not say."""
    largest_id: int
    """Of all tokens of the prompts."""


def examine_tokens(facts: TokenFacts) -> list[Check]:
    """The checks that need no sample."""
    return [_vocabulary(facts), _template(facts), _stop(facts)]


def _vocabulary(facts: TokenFacts) -> Check:
    text = f"the tokenizer has {facts.num_tokens} tokens, the model {facts.num_embeddings or 'an unknown number'}"
    if facts.num_embeddings and facts.largest_id >= facts.num_embeddings:
        return Check(
            name="vocabulary",
            text=f"{text}, and the prompts use number {facts.largest_id}",
            level="stop",
            advice="tokenizer and model do not belong together: use the tokenizer that came with the model, or "
            "resize its embedding",
        )
    if facts.num_embeddings and facts.num_tokens > facts.num_embeddings:
        return Check(
            name="vocabulary",
            text=text,
            level="warn",
            advice="the last tokens have no embedding; none of these prompts uses them",
        )
    return Check(name="vocabulary", text=text)


def _template(facts: TokenFacts) -> Check:
    """Round trip, generation prompt, and special tokens that are there twice."""
    text = f"{facts.num_prompts - facts.num_changed} of {facts.num_prompts} prompts keep their tokens when decoded and "
    text += "encoded again"
    if facts.num_changed:
        text += "; strop never does that with what is trained, so this is no fault"
    if facts.num_double_starts:
        return Check(
            name="template",
            text=f"{text}; {facts.num_double_starts} begin with two beginning-of-sequence tokens",
            level="warn",
            advice="the template writes one and the prompt's text holds another: take it out of one of the two",
        )
    if facts.has_opening is False:
        return Check(
            name="template",
            text=f"{text}; the template writes nothing before an answer",
            level="warn",
            advice="the model may go on writing for the user: give the template an `add_generation_prompt` part",
        )
    if facts.num_without_opening:
        return Check(
            name="template",
            text=f"{text}; {facts.num_without_opening} do not end with the template's beginning of an answer",
            level="warn",
            advice="was it cut off? Raise data.max_prompt_tokens, or cut on another side with data.truncation",
        )
    if facts.has_opening:
        text += "; all end with the template's beginning of an answer"
    return Check(name="template", text=text)


def _stop(facts: TokenFacts) -> Check:
    if not facts.unknown_end:
        return Check(name="end of answer", text="what the template writes after an answer stops generation")
    return Check(
        name="end of answer",
        text=f"the template ends an answer with {facts.unknown_end!r}, which does not stop generation",
        level="warn",
        advice="answers would run on to the limit: name its number in rollout.stop_token_ids, or in "
        "generation_config.json of the model folder",
    )
