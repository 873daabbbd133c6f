"""AgentLoopOutput, returned by agent loops in verl's form, and its conversion to a training sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from strop.protocol.trajectory import NOT_SAMPLED, Trajectory, media_of


@dataclass
class AgentLoopMetrics:
    """Seconds per activity."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1
    """Preemptions by the engine; -1 where it does not count them."""


@dataclass
class AgentLoopOutput:
    """One training sequence of a loop."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    """1 for tokens that the model sampled and that are trained."""
    response_logprobs: list[float] | None = None
    """Not needed: those of the engine are used."""
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    """Not needed: the images are those that `server_manager.generate` was given."""
    reward_score: float | None = None
    """Score of the episode; None has the reward function called."""
    num_turns: int = 0
    """Messages, the prompt counted as one; 0: as many as there were calls of generate, and the prompt."""
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """For the reward function, in its extra_info; `reward_extra_info` has the parts of reward_score, such as acc."""
    mm_processor_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Call:
    """One call of `server_manager.generate`: prompt and sampled tokens."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    stop_reason: str = "stop"

    def cut_reason(self, all_ids: tuple[int, ...]) -> str:
        """Stop reason of a sequence that ends with these sampled tokens, where the answer was cut off (`length`,
        `max_tokens` by a limit of the loop's own, `aborted`); empty for any other."""
        is_last = bool(self.token_ids) and all_ids == self.prompt_ids + self.token_ids
        return self.stop_reason if is_last and self.stop_reason != "stop" else ""


def sequence_of(
    output: AgentLoopOutput,
    empty: Trajectory,
    calls: Sequence[Call],
    *,
    max_tokens: int,
    image_id: int | None = None,
) -> Trajectory:
    """The training sequence of a loop's output; sampled tokens and images come from the calls of generate.

    It ends before an image that no call contained: nothing was sampled after that one. Its stop reason is that of
    `Call.cut_reason`, else `stop`.

    Args:
        output: returned by the loop.
        empty: the trajectory of the sample.
        calls: of generate.
        max_tokens: most tokens of the response.
        image_id: the token that stands for a part of an image; None where there are no images.

    Raises:
        ValueError: mask and tokens differ in length, or the mask has a token that was not sampled at that place.
    """
    if len(output.response_ids) != len(output.response_mask):
        raise ValueError(
            f"the agent loop returned {len(output.response_ids)} response_ids and {len(output.response_mask)} "
            f"response_mask; one mask value per token"
        )
    prompt_ids, response_ids = tuple(output.prompt_ids), tuple(output.response_ids)[:max_tokens]
    all_ids = prompt_ids + response_ids
    longest_prompt = max(
        (call.prompt_ids for call in calls if all_ids[: len(call.prompt_ids)] == call.prompt_ids),
        key=len,
        default=(),
    )
    log_probs, versions = _log_probs_and_versions(all_ids, calls)
    sampled = [bool(value) for value in output.response_mask[: len(response_ids)]]
    for index, is_trained in enumerate(sampled):
        position = len(prompt_ids) + index
        if is_trained and versions[position] == NOT_SAMPLED:
            raise ValueError(
                f"the agent loop trains response token {index} (id {all_ids[position]}), but no call of "
                f"server_manager.generate sampled it there: give the mask 0 to tokens that the model did not write, "
                f"and append those that it wrote as they came"
            )
        if not is_trained:
            log_probs[position], versions[position] = 0.0, NOT_SAMPLED
    first = len(prompt_ids)
    end = len(all_ids)
    if image_id is not None and image_id in all_ids[len(longest_prompt) :]:
        end = max(first, all_ids.index(image_id, len(longest_prompt)))
    metrics = output.metrics
    seconds = metrics if isinstance(metrics, Mapping) else vars(metrics)
    sequence = Trajectory(
        uid=empty.uid,
        prompt_messages=empty.prompt_messages,
        sample_index=empty.sample_index,
        prompt_ids=prompt_ids,
        response_ids=all_ids[first:end],
        sampled=tuple(sampled[: end - first]),
        log_probs=tuple(log_probs[first:end]),
        versions=tuple(versions[first:end]),
        num_turns=output.num_turns or len(calls) + 1,
        timings={key: float(seconds.get(key) or 0.0) for key in ("tool_calls", "compute_score")},
        extra=_extra(output.extra_fields),
        reward_score=None if output.reward_score is None else float(output.reward_score),
        media=media_of(longest_prompt),
    )
    if len(output.response_ids) > max_tokens:
        return sequence.finish("length")
    reasons = (call.cut_reason(all_ids[:end]) for call in calls)
    return sequence.finish(next(filter(None, reasons), "stop"))


def _extra(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of the episode; what verl calls reward_extra_info are the parts of a reward that the loop gives."""
    parts = {"reward_parts": fields["reward_extra_info"]} if fields.get("reward_extra_info") else {}
    return {"turn_scores": [], "tool_rewards": [], **parts, **fields}


def _log_probs_and_versions(all_ids: tuple[int, ...], calls: Sequence[Call]) -> tuple[list[float], list[int]]:
    """Log-prob and version of each token, where a call of generate sampled it behind the same prefix."""
    log_probs: list[float] = [0.0] * len(all_ids)
    versions: list[int] = [NOT_SAMPLED] * len(all_ids)
    for call in calls:
        start = len(call.prompt_ids)
        if all_ids[:start] != call.prompt_ids:
            continue
        for offset, token in enumerate(call.token_ids):
            if start + offset >= len(all_ids) or all_ids[start + offset] != token:
                break
            log_probs[start + offset] = call.log_probs[offset]
            versions[start + offset] = call.versions[offset]
    return log_probs, versions
