"""Wire format between the reward pool and its worker processes: JSON lines in both directions.

Nothing is pickled: a worker's message is data that its parent checks, whatever the scored text or the
reward function made of it. A message is one line (strop.utils.json_lines). `call_of` makes the calls.

    to the worker      [call, *comparisons]                     score this; these comparisons have ended a process
                       [[call, ...], *comparisons]              the same of all answers to a prompt
    from the worker    ["ready", wants_conversation, takes_groups, coroutines]  the functions are loaded
                       ["failed", sentence]                     the function cannot be loaded
                       ["start"]                                the deadline of the oldest call counts from here
                       ["grading", comparison]                  a comparison of it begins; null: it ended
                       ["away", seconds]                        the deadline stands still, for at most so long
                       ["back"]                                 it counts again
                       ["done", kind, score, parts, token_rewards, error, s]  its result
                       ["all", [[kind, score, parts, error], ...], s]  that of all answers to a prompt

Where functions are coroutines, several calls are under way: they are numbered from 0 as they are sent, and the worker
says ["call", number, "start"], ["call", number, "done" or "all", ...] as above, ["call", number, "memory", error, s]
where memory ran out, or ["call", number, "timeout", location, s]; and between these ["alive"], ten times a second.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from strop.protocol.trajectory import with_answer
from strop.rewards.outcome import Outcome
from strop.utils.json_lines import encode, plain, type_name
from strop.utils.sanitize import usable
from strop.utils.sanitize.text import describe_object

if TYPE_CHECKING:
    from strop.protocol.trajectory import Prompt, Trajectory

MAX_PARTS_BYTES = 1 << 20
"""Upper limit of one result; a reward function has no reason to return more than a megabyte."""
NOT_SENT = "which cannot be sent to the processes that score"
"""Said of a value of a row that no function can be given."""


def call_of(prompt: Prompt, trajectory: Trajectory, text: str, *, wants_conversation: bool) -> dict[str, Any]:
    """Call of one answer, as a worker process is sent it.

    Args:
        prompt: the row; its ground truth, columns and extra_info reach the function.
        trajectory: its turn count and extra facts are added to extra_info.
        text: the decoded response.
        wants_conversation: prompt, answer and columns are sent as such, too.
    """
    call: dict[str, Any] = {
        "data_source": prompt.data_source,
        "solution_str": text,
        "ground_truth": prompt.ground_truth,
        "extra_info": {
            **prompt.extra_info, "num_turns": trajectory.num_turns, "rollout_reward_scores": {}, "turn_scores": [],
            "tool_rewards": [], **trajectory.extra,
        },
    }  # fmt: skip
    if wants_conversation:
        # As TRL has it: texts for a text prompt, message lists for a conversation; an answer has what it continues.
        text_prompt = prompt.columns.get("prompt")
        is_text = isinstance(text_prompt, str)
        conversation = with_answer(prompt.messages, text)
        call |= {
            "prompt": text_prompt if is_text else list(conversation[:-1]),
            "completion": text if is_text else [conversation[-1]],
            "completion_ids": list(trajectory.response_ids),
            "response_mask": [int(is_sampled) for is_sampled in trajectory.sampled],
            "columns": {name: value for name, value in prompt.columns.items() if name != "prompt"},
            "prompt_ids": list(prompt.token_ids),
            "messages": plain(prompt.messages),
            "uid": prompt.uid,
        }
    return call


def refusal(call: Mapping[str, Any], row: int, error: Exception) -> str:
    """Error sentence about the value of a call that cannot be sent; `error` was raised by `encode`."""
    with contextlib.suppress(RecursionError):
        for key, value in _leaves(call, ""):
            try:
                encode([value])
            except (TypeError, ValueError):
                name = type_name(value)
                return (
                    f"row {row} has {'an' if name[0] in 'aeiou' else 'a'} {name} in {key}, {NOT_SENT} "
                    f"({describe_object(value):.80}): write it as text or a number into the data, or leave it out"
                )
    return f"row {row} has a value {NOT_SENT}: {error}"


def _leaves(value: object, key: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no list or mapping, with its dotted key: `extra_info.price`."""
    if isinstance(value, Mapping):
        for child, item in value.items():
            name = child if isinstance(child, str) else describe_object(child)
            yield from _leaves(item, f"{key}.{name}" if key else name)
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{key}[{number}]")
    else:
        yield key.removeprefix("columns."), value


def outcome_of(message: list[Any]) -> Outcome:
    """The outcome in a "done" message, every field checked.

    Raises:
        ValueError: the message has another form than a worker of ours writes.
    """
    match message:
        case [
            "done", str(kind), score, dict(parts), list(token_rewards), str(error), int() | float() as seconds
        ] if all(
            isinstance(key, str) and isinstance(value, (bool, int, float, str))
            for key, value in parts.items()
        ) and all(map(_is_token_reward, token_rewards)):  # fmt: skip
            if error and kind in ("error", "infrastructure"):
                return Outcome(
                    kind="error" if kind == "error" else "infrastructure", error=error, seconds=seconds
                )
            if kind == "score" and not error and usable(score) is not None:
                return Outcome(
                    kind="score",
                    score=float(score),
                    parts=parts,
                    token_rewards=token_rewards,
                    seconds=seconds,
                )
    raise ValueError(f"not the result of a reward worker: {str(message)[:200]}")


def _is_token_reward(pair: object) -> bool:
    match pair:
        case [int(place), int() | float() as reward]:
            return place >= 0 and usable(reward) is not None
    return False


def outcomes_of(message: list[Any]) -> list[Outcome]:
    """The outcomes in an "all" message, as `outcome_of` checks them; each took its share of the time.

    Raises:
        ValueError: as there.
    """
    match message:
        case ["all", [_, *_] as results, int() | float() as seconds] if all(
            isinstance(result, list) and len(result) == 4 for result in results
        ):
            return [
                outcome_of(["done", *result[:3], [], result[3], seconds / len(results)]) for result in results
            ]
    raise ValueError(f"not the results of a reward worker: {str(message)[:200]}")
