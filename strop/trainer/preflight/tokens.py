"""Do template, tokenizer and model fit together? Checks on the tokens of prompts, before anything is generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from strop.utils.verdict import Check


@dataclass(frozen=True)
class AnswerEnd:
    """Text of the template after an answer."""

    kind: Literal["stops", "runs on", "text", "nothing", "unknown"]
    """A token that stops generation; a special token that does not; ordinary text; nothing; the template could not be
    asked."""
    text: str = ""
    """The token that does not stop generation, or the text."""


@dataclass(frozen=True, kw_only=True)
class TokenFacts:
    """Facts about prompts, chat template and vocabulary."""

    num_prompts: int
    num_changed: int
    """Prompts whose tokens are others after decoding and encoding again."""
    num_double_starts: int
    """Prompts that begin with two beginning-of-sequence tokens."""
    num_without_opening: int
    """Prompts that do not end with what the template writes before an answer."""
    has_opening: bool | None
    """The template writes something before an answer; None when it could not be asked."""
    spelled_out: tuple[str, ...]
    """Control markers of the template that are no tokens of this tokenizer."""
    end: AnswerEnd
    num_tokens: int
    """Size of the tokenizer's vocabulary."""
    num_embeddings: int
    """Rows of the model's embedding; 0 when its configuration does not say."""
    kept: tuple[str, ...] = ()
    """Special tokens that stay in the text of answers."""
    num_unused: int = 0
    """Rows of the embedding for which the tokenizer has no token."""
    largest_id: int
    """Largest token id of the prompts."""


def examine_tokens(facts: TokenFacts) -> list[Check]:
    """The checks that need no sample."""
    checks = [_vocabulary(facts), _template(facts), _stop(facts)]
    if facts.kept:
        text = f"{', '.join(facts.kept)} stay in the text of answers, which rewards get"
        checks.append(
            Check(name="special tokens", text=f"{text}; model.keep_special_tokens=[] takes them away")
        )
    return checks


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
    if facts.num_unused:
        text += f"; no text has the last {facts.num_unused} of these, which are never sampled"
    return Check(name="vocabulary", text=text)


def _template(facts: TokenFacts) -> Check:
    """Round trip, generation prompt, and special tokens that are there twice."""
    text = f"{facts.num_prompts - facts.num_changed} of {facts.num_prompts} prompts keep their tokens when decoded and "
    text += "encoded again"
    if facts.num_changed:
        text += "; strop never does that with what is trained, so this is no fault"
    if facts.spelled_out:
        return Check(
            name="template",
            text=f"{text}; {', '.join(facts.spelled_out[:4])} are no tokens of this tokenizer, which spells them out",
            level="warn",
            advice="template and tokenizer do not belong together: prompts are longer, and the model does not see the "
            "beginning and end of turns; use the template that came with the tokenizer",
        )
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
    name = "end of answer"
    match facts.end.kind:
        case "stops":
            return Check(name=name, text="what the template writes after an answer stops generation")
        case "unknown":
            return Check(
                name=name, text="the template does not render a bare answer, so its end was not looked at"
            )
        case "runs on":
            return Check(
                name=name,
                text=f"the template ends an answer with {facts.end.text!r}, which does not stop generation",
                level="warn",
                advice="answers would run on to the limit: name its number in rollout.stop_token_ids, or in "
                "generation_config.json of the model folder",
            )
        case "nothing":
            text = "the template writes nothing after an answer"
        case "text":
            text = (
                f"the template ends an answer with {facts.end.text[:40]!r}, which is ordinary text to this tokenizer "
                f"and does not stop generation"
            )
    return Check(
        name=name,
        text=text,
        level="warn",
        advice="only a model that ends its answers by itself will stop: let the template close an assistant turn with "
        "a token that the tokenizer knows, best the one that the model was trained with",
    )
