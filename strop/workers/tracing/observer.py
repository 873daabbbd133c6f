"""Episode observer that sends traces of OpenTelemetry.

The semantic conventions of generative AI name the attributes: `gen_ai.usage.input_tokens`, `gen_ai.output.messages`,
`gen_ai.tool.call.result` and so on. Spans leave from a thread of OpenTelemetry's own, in batches; a collector that does
not answer costs nothing but the traces, which its log says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from strop.agents.spans import Span
from strop.data.visit_ids import is_visit
from strop.rollout.config import RolloutConfig
from strop.rollout.tracing_config import TraceConfig
from strop.utils.sanitize import storable
from strop.workers.episodes import Episode
from strop.workers.tracing.mlflow import mlflow_target

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from transformers import PreTrainedTokenizerBase


MAX_TEXT_CHARS = 100_000
"""Longest text of one attribute; longer ones are cut, with a word."""
_QUEUE_SPANS = 1 << 16
_SEND_S = 10.0


class TraceObserver:
    """Makes a trace of each episode that it hears of."""

    def __init__(
        self,
        exporter: SpanExporter,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_samples: int | None = None,
    ) -> None:
        """Args:
        exporter: takes the spans.
        tokenizer: reads answers; None where no episode follows.
        max_samples: episodes of each call of play; None: all.
        """
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._tokenizer, self._max_samples, self._left = tokenizer, max_samples, max_samples
        self._provider = TracerProvider(resource=Resource.create({"service.name": "strop"}))
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_QUEUE_SPANS, export_timeout_millis=1000 * _SEND_S)
        )
        self._tracer = self._provider.get_tracer("strop")

    @property
    def listens(self) -> bool:
        """Always."""
        return True

    def start(self) -> None:
        """Prompts are about to be played."""
        self._left = self._max_samples

    def on_episode_end(self, episode: Episode, spans: Sequence[Span], start_s: float, end_s: float) -> None:
        """Called after an episode, with its start and end in seconds since the epoch."""
        if self._left is not None:
            if self._left == 0:
                return
            self._left -= 1
        from opentelemetry import trace

        root = self._tracer.start_span(
            f"episode {episode.id}", start_time=_nanos(start_s), attributes=_of_episode(episode)
        )
        within = trace.set_span_in_context(root)
        for span in spans:
            assert self._tokenizer is not None, "episodes need a tokenizer"
            attributes = _of_span(span, self._tokenizer)
            part = self._tracer.start_span(
                f"{span.kind} {span.name}".rstrip(),
                within,
                start_time=_nanos(span.start_s),
                attributes=attributes,
            )
            if problem := span.facts.get("error"):
                part.set_status(trace.StatusCode.ERROR, str(problem))
            part.end(_nanos(span.end_s))
        if episode.failure:
            root.set_status(trace.StatusCode.ERROR, _cut(episode.failure))
        root.end(_nanos(end_s))

    def close(self) -> None:
        """Send what is left, within a few seconds; a second call does nothing."""
        self._provider.force_flush(int(1000 * _SEND_S))
        self._provider.shutdown()


def check_observers(rollout: RolloutConfig) -> None:
    """Refuse observers that cannot work here, before a model is loaded; ValueError as from `episode_observers`."""
    for observer in episode_observers(rollout, None):
        observer.close()


def episode_observers(
    rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase | None
) -> list[TraceObserver]:
    """Observers of episodes: traces, where rollout.trace asks for them.

    Raises:
        ValueError: the sentence says what of the settings cannot be had here.
    """
    observer = make_observer(rollout.trace, tokenizer)
    return [] if observer is None else [observer]


def make_observer(config: TraceConfig, tokenizer: PreTrainedTokenizerBase | None) -> TraceObserver | None:
    """The observer of a process; None where nothing is traced.

    Raises:
        ValueError: the extra is not installed, or the server of MLflow cannot be asked for the experiment.
    """
    if not config.backend:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ValueError(
            f"rollout.trace.backend={config.backend} needs OpenTelemetry, which cannot be imported ({error}); install "
            f"the extra trace: pip install 'strop[trace]'"
        ) from error
    if config.backend == "mlflow":
        target = mlflow_target(config.endpoint, config.experiment)
        exporter = OTLPSpanExporter(endpoint=target.address, headers=dict(target.headers), timeout=_SEND_S)
    else:
        exporter = OTLPSpanExporter(endpoint=config.endpoint or None, timeout=_SEND_S)
    return TraceObserver(exporter, tokenizer, max_samples=config.max_samples)


def _of_episode(episode: Episode) -> dict[str, Any]:
    prompt, outcome = episode.prompt, episode.outcome
    answer = {"role": "assistant", "content": episode.text}
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": prompt.agent_name,
        "gen_ai.conversation.id": episode.id,
        "gen_ai.input.messages": _json(list(episode.prompt_messages)),
        "gen_ai.output.messages": _json([answer]),
        "strop.uid": prompt.uid,
        "strop.row": prompt.row,
        "strop.validate": not is_visit(prompt.uid),
        "strop.sample_index": episode.sample_index,
        "strop.data_source": prompt.data_source,
    }
    if outcome is not None:
        attributes |= {"strop.outcome": outcome.kind, "strop.reward_parts": _json(outcome.parts)}
        if outcome.score is not None:
            attributes["strop.score"] = outcome.score
    if episode.trajectory is not None:
        versions = [
            version for sequence in episode.sequences for version in sequence.versions if version >= 0
        ]
        attributes["strop.stop_reason"] = episode.trajectory.stop_reason
        attributes["strop.num_turns"] = episode.trajectory.num_turns
        if versions:
            attributes |= {"strop.version.first": min(versions), "strop.version.last": max(versions)}
    return attributes


def _of_span(span: Span, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    facts = span.facts
    if span.kind == "answer":
        text = tokenizer.decode(facts["token_ids"], skip_special_tokens=False)
        return {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.usage.input_tokens": facts["num_prompt_tokens"],
            "gen_ai.usage.output_tokens": len(facts["token_ids"]),
            "gen_ai.response.finish_reasons": [facts["stop_reason"]],
            "gen_ai.output.messages": _json([{"role": "assistant", "content": text}]),
        }
    if span.kind == "tool":
        return {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": span.name,
            "gen_ai.tool.call.arguments": _cut(facts["arguments"]),
            "gen_ai.tool.call.result": _cut(facts["result"]),
        }
    return {"strop.outcome": facts["outcome"], **_number("strop.score", facts["score"])}


def _number(name: str, value: float | None) -> Mapping[str, float]:
    return {} if value is None else {name: value}


def _json(value: object) -> str:
    return _cut(json.dumps(storable(value), ensure_ascii=False))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT_CHARS else text[:MAX_TEXT_CHARS] + "...(cut)"


def _nanos(seconds: float) -> int:
    return int(seconds * 1e9)
