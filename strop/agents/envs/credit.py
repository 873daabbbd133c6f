"""Rewards of single answers in the training sequences of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from strop.protocol.trajectory import Trajectory


def with_turn_rewards(
    sequences: Sequence[Trajectory],
    rewards: Sequence[float | None],
    *,
    each_alone: bool,
    anchors: Sequence[str] = (),
) -> tuple[Trajectory, ...]:
    """The sequences of an episode with the reward of each answer at the answer's last token.

    Args:
        sequences: as `Conversation.finish` gives them; the messages of the last one say where each answer is.
        rewards: of the answers in order; None and missing ones are 0.
        each_alone: make every answer a sequence of its own, whose prompt is all that was before it.
        anchors: the state in which each answer was given, for sequences of their own; missing ones are not known.
    """
    last = sequences[-1]
    given = [0.0 if reward is None else float(reward) for reward in rewards]
    answers: list[tuple[int, int, int, float]] = []
    messages: list[Mapping[str, Any]] = []
    for message in last.messages:
        if message["role"] == "assistant":
            number = len(answers)
            reward = given[number] if number < len(given) else 0.0
            start, stop = message["tokens"]
            answers.append((message["sequence"], start, stop, reward))
            message = {**message, "reward": reward}
        messages.append(message)
    if each_alone:
        return _each_alone(sequences, answers, messages, anchors)
    rewarded = [
        replace(
            sequence,
            turn_rewards=tuple(
                (stop - 1, reward) for at, start, stop, reward in answers if at == number and stop > start
            ),
        )
        for number, sequence in enumerate(sequences)
    ]
    return (*rewarded[:-1], replace(rewarded[-1], messages=tuple(messages)))


def _each_alone(
    sequences: Sequence[Trajectory],
    answers: Sequence[tuple[int, int, int, float]],
    messages: Sequence[Mapping[str, Any]],
    anchors: Sequence[str],
) -> tuple[Trajectory, ...]:
    """One sequence per answer that has tokens."""
    last = sequences[-1]
    made: list[Trajectory] = []
    place: list[tuple[int, int]] = []  # per answer: its sequence and its length
    for number, (at, start, stop, reward) in enumerate(answers):
        place.append((len(made), stop - start))
        if stop == start:
            continue
        whole = sequences[at]
        made.append(
            Trajectory(
                uid=whole.uid,
                sample_index=whole.sample_index,
                prompt_ids=whole.prompt_ids + whole.response_ids[:start],
                response_ids=whole.response_ids[start:stop],
                sampled=whole.sampled[start:stop],
                log_probs=whole.log_probs[start:stop],
                versions=whole.versions[start:stop],
                stop_reason="turn",
                turn_rewards=((stop - start - 1, reward),),
                stands_alone=True,
                anchor=anchors[number] if number < len(anchors) else "",
                prompt_messages=() if made else sequences[0].prompt_messages,
                media=tuple(one for one in whole.media if one.start < len(whole.prompt_ids) + start),
            )
        )
    if not made:
        return tuple(sequences)
    moved: list[Mapping[str, Any]] = []
    number = -1
    for message in messages:
        is_answer = message["role"] == "assistant"
        number += is_answer
        sequence, length = place[max(number, 0)]
        moved.append({**message, "sequence": sequence, "tokens": [0 if is_answer else length, length]})
    final = replace(
        made[-1],
        num_turns=last.num_turns,
        stop_reason=last.stop_reason,
        extra=last.extra,
        numbers=last.numbers,
        timings=last.timings,
        messages=tuple(moved),
    )
    return (*made[:-1], final)
