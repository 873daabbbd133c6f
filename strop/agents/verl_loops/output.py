"""What agent loops in verl's form return, and the training sequence that it is."""

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
    """For the reward function, in its extra_info."""
    mm_processor_kwargs: dict[str, Any] | None = None


@dataclass(frozen=True)
class Call:
    """One call of `server_manager.generate`: what it was given, and what it gave."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]


def sequence_of(
    output: AgentLoopOutput,
    empty: Trajectory,
    calls: Sequence[Call],
    *,
    max_tokens: int,
    image_id: int | None = None,
) -> Trajectory:
    """The sequence of a loop's output; where the tokens come from is told by the calls of generate.

    So are its images. It ends before an image that no call was given: nothing was sampled after that one.

    Args:
        output: what the loop returned.
        empty: the trajectory of the sample.
        calls: what was generated.
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
    whole = prompt_ids + response_ids
    seen = max(
        (call.prompt_ids for call in calls if whole[: len(call.prompt_ids)] == call.prompt_ids),
        key=len,
        default=(),
    )
    log_probs, versions = _recorded(whole, calls)
    sampled = [bool(value) for value in output.response_mask[: len(response_ids)]]
    for place, is_trained in enumerate(sampled):
        at = len(prompt_ids) + place
        if is_trained and versions[at] == NOT_SAMPLED:
            raise ValueError(
                f"the agent loop trains response token {place} (id {whole[at]}), but no call of "
                f"server_manager.generate sampled it there: give the mask 0 to tokens that the model did not write, "
                f"and append those that it wrote as they came"
            )
        if not is_trained:
            log_probs[at], versions[at] = 0.0, NOT_SAMPLED
    first = len(prompt_ids)
    end = len(whole)
    if image_id is not None and image_id in whole[len(seen) :]:
        end = max(first, whole.index(image_id, len(seen)))
    metrics = output.metrics
    seconds = metrics if isinstance(metrics, Mapping) else vars(metrics)
    made = Trajectory(
        uid=empty.uid,
        prompt_messages=empty.prompt_messages,
        sample_index=empty.sample_index,
        prompt_ids=prompt_ids,
        response_ids=whole[first:end],
        sampled=tuple(sampled[: end - first]),
        log_probs=tuple(log_probs[first:end]),
        versions=tuple(versions[first:end]),
        num_turns=output.num_turns or len(calls) + 1,
        timings={key: float(seconds.get(key) or 0.0) for key in ("tool_calls", "compute_score")},
        extra={"turn_scores": [], "tool_rewards": [], **output.extra_fields},
        reward_score=None if output.reward_score is None else float(output.reward_score),
        media=media_of(seen),
    )
    was_cut = len(output.response_ids) > max_tokens
    return made.finish("length" if was_cut else "stop")


def _recorded(whole: tuple[int, ...], calls: Sequence[Call]) -> tuple[list[float], list[int]]:
    """Log-prob and version of each token, where a call of generate sampled it behind just what stands before it."""
    log_probs: list[float] = [0.0] * len(whole)
    versions: list[int] = [NOT_SAMPLED] * len(whole)
    for call in calls:
        start = len(call.prompt_ids)
        if whole[:start] != call.prompt_ids:
            continue
        for offset, token in enumerate(call.token_ids):
            if start + offset >= len(whole) or whole[start + offset] != token:
                break
            log_probs[start + offset] = call.log_probs[offset]
            versions[start + offset] = call.versions[offset]
    return log_probs, versions
