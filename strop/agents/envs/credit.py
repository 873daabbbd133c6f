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
        sequences: as returned by `Conversation.finish`; the messages of the last one have each answer's token span.
        rewards: of the answers in order; None and missing ones are 0.
        each_alone: make every answer a sequence of its own, whose prompt is all that was before it.
        anchors: state of the environment at each answer, for sequences of their own; missing ones are unknown.
    """
    last = sequences[-1]
    rewards_of_answers = [0.0 if reward is None else float(reward) for reward in rewards]
    answers: list[tuple[int, int, int, float]] = []
    messages: list[Mapping[str, Any]] = []
    for message in last.messages:
        if message["role"] == "assistant":
            number = len(answers)
            reward = rewards_of_answers[number] if number < len(rewards_of_answers) else 0.0
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
    samples: list[Trajectory] = []
    spans: list[tuple[int, int]] = []  # per answer: its sequence and its length
    for number, (at, start, stop, reward) in enumerate(answers):
        spans.append((len(samples), stop - start))
        if stop == start:
            continue
        sequence_of_answer = sequences[at]
        samples.append(
            Trajectory(
                uid=sequence_of_answer.uid,
                sample_index=sequence_of_answer.sample_index,
                prompt_ids=sequence_of_answer.prompt_ids + sequence_of_answer.response_ids[:start],
                response_ids=sequence_of_answer.response_ids[start:stop],
                sampled=sequence_of_answer.sampled[start:stop],
                log_probs=sequence_of_answer.log_probs[start:stop],
                versions=sequence_of_answer.versions[start:stop],
                stop_reason="turn",
                turn_rewards=((stop - start - 1, reward),),
                stands_alone=True,
                anchor=anchors[number] if number < len(anchors) else "",
                prompt_messages=() if samples else sequences[0].prompt_messages,
                media=tuple(
                    item
                    for item in sequence_of_answer.media
                    if item.start < len(sequence_of_answer.prompt_ids) + start
                ),
            )
        )
    if not samples:
        return tuple(sequences)
    new_messages: list[Mapping[str, Any]] = []
    number = -1
    for message in messages:
        is_answer = message["role"] == "assistant"
        number += is_answer
        sequence, length = spans[max(number, 0)]
        new_messages.append({**message, "sequence": sequence, "tokens": [0 if is_answer else length, length]})
    final = replace(
        samples[-1],
        num_turns=last.num_turns,
        stop_reason=last.stop_reason,
        extra=last.extra,
        numbers=last.numbers,
        timings=last.timings,
        messages=tuple(new_messages),
    )
    return (*samples[:-1], final)
