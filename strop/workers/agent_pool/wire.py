"""Protocol between a rollout worker and its agent workers: one JSON array a line, in both directions.

Nothing is unpickled: what a worker says is data that is checked here, whatever the model or a tool made of it.

    to the worker      ["begin", settings]                          the first line, see `AgentWorkers`
                       ["play", number, prompt, sample_index, sampling, listens]
                       ["stop", number]                             nobody waits for this episode any more
                       ["token", call, id, log_prob, version]       a token of a call that wants to hear of them
                       ["output", call, output]
                       ["refused", call, kind, sentence]            the call of the engine raised
                       ["ping"]
    from the worker    ["ready"], or ["failed", sentence]           the agents are loaded, or cannot be
                       ["generate", call, request_id, ids, sampling, wants_tokens]
                       ["drop", call]                               nobody waits for this call any more
                       ["played", number, sequences, spans]
                       ["raised", number, sentence]                 the episode failed
                       ["pong"]
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from strop.agents.spans import Span
from strop.protocol.columns import BatchError
from strop.protocol.folder import from_json, to_json
from strop.protocol.trajectory import Prompt, Trajectory
from strop.rollout.types import Sampling, TokenOutput
from strop.utils.sanitize import storable

MAX_LINE_BYTES = 256 << 20
"""No message comes near this."""
_TOKEN_COLUMNS = ("prompt_ids", "response_ids", "sampled", "log_probs", "versions")
_NOT_SENT = {"media", "checked"}


def line(*message: Any) -> bytes:
    """A message as it is written."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def read_line(text: bytes) -> list[Any]:
    """The message of a line.

    Raises:
        ValueError: it is none.
    """
    try:
        message = json.loads(text)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ValueError(f"expected a JSON array that begins with a word, got {text[:100]!r}")
    return message


def prompt_out(prompt: Prompt) -> dict[str, Any]:
    """A prompt without media as JSON.

    Raises:
        ValueError: its row has a value that is no plain data, or media.
    """
    if prompt.media:
        raise ValueError(
            f"prompt {prompt.uid} has images, which agent workers do not get: set agent.num_workers=0"
        )
    try:
        return {
            field.name: to_json(getattr(prompt, field.name), field.name)
            for field in dataclasses.fields(prompt)
            if field.name not in _NOT_SENT
        }
    except BatchError as error:
        raise ValueError(
            f"prompt {prompt.uid} cannot be handed to an agent worker: {error}; or set agent.num_workers=0"
        ) from None


def prompt_in(fields: Mapping[str, Any]) -> Prompt:
    """Decode the prompt of `prompt_out`."""
    return Prompt(**{name: from_json(value) for name, value in fields.items()})


def sampling_out(sampling: Sampling) -> dict[str, Any]:
    """As JSON."""
    return dataclasses.asdict(sampling)


def sampling_in(fields: Mapping[str, Any]) -> Sampling:
    """Decode the options of `sampling_out`; ValueError as Sampling, TypeError for another form."""
    return Sampling(**{**fields, "stop_token_ids": tuple(fields["stop_token_ids"])})


def output_out(output: TokenOutput) -> list[Any]:
    """As JSON."""
    return [output.token_ids, output.log_probs, output.versions, output.stop_reason]


def output_in(fields: Sequence[Any]) -> TokenOutput:
    """Decode the output of `output_out`."""
    ids, log_probs, versions, stop_reason = fields
    return TokenOutput(
        token_ids=tuple(ids), log_probs=tuple(log_probs), versions=tuple(versions), stop_reason=stop_reason
    )


def sequence_out(sequence: Trajectory) -> dict[str, Any]:
    """A training sequence as JSON; what the agent noted and JSON cannot say becomes `storable`.

    Raises:
        ValueError: it has images.
    """
    if sequence.media:
        raise ValueError(
            f"trajectory {sequence.id} has images, which agent workers do not hand on: set agent.num_workers=0"
        )
    fields = {name: list(getattr(sequence, name)) for name in _TOKEN_COLUMNS}
    for field in dataclasses.fields(sequence):
        if field.name not in _NOT_SENT and field.name not in fields:
            fields[field.name] = _sayable(getattr(sequence, field.name), field.name)
    return fields


def sequence_in(content: Mapping[str, Any], prompt: Prompt, sample_index: int) -> Trajectory:
    """Decode the sequence of `sequence_out`.

    Raises:
        ValueError: it is no sequence of this sample.
        TypeError, KeyError: it has another form.
    """
    fields = {name: from_json(value) for name, value in content.items() if name not in _TOKEN_COLUMNS}
    for name in _TOKEN_COLUMNS:
        fields[name] = tuple(content[name])
    sequence = Trajectory(**fields)
    if sequence.uid != prompt.uid or sequence.sample_index != sample_index or not sequence.is_finished:
        raise ValueError(f"trajectory {sequence.id} is no finished one of {prompt.uid}/{sample_index}")
    return sequence


def span_out(span: Span) -> list[Any]:
    """As JSON; facts that JSON cannot say become `storable`."""
    facts = {name: _sayable(value, name) for name, value in span.facts.items()}
    return [span.kind, span.name, span.start_s, span.end_s, facts]


def span_in(fields: Sequence[Any]) -> Span:
    """Decode the span of `span_out`."""
    kind, name, start_s, end_s, facts = fields
    return Span(
        kind=kind,
        name=name,
        start_s=start_s,
        end_s=end_s,
        facts={key: from_json(value) for key, value in facts.items()},
    )


def _sayable(value: object, location: str) -> Any:
    """The value, or the parts of a mapping or a tuple, as JSON; `storable` where it is no plain data."""
    try:
        return to_json(value, location)
    except (BatchError, RecursionError):
        if isinstance(value, Mapping):
            return to_json(
                {str(key): from_json(_sayable(item, location)) for key, item in value.items()}, location
            )
        return to_json(storable(value), location)
