"""Samples as rows of the sample store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.data.chat import shown_text
from strop.protocol import DataProto, columns
from strop.protocol.trajectory import Prompt, Trajectory
from strop.utils.json_lines import encode, plain
from strop.workers.episodes import Episode
from strop.workers.reports import SampleDecision

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def saved_rows(
    episodes: DataProto, tokenizer: PreTrainedTokenizerBase, *, keeps_row: bool
) -> list[dict[str, Any]]:
    """Rows of the sample store; arguments as of `RolloutWorker.write_samples`."""
    texts: dict[tuple[str, tuple[int, ...]], str] = {}
    rows = []
    objects = episodes.non_tensor_batch
    numbers = {
        {"log_probs": "old_log_probs"}.get(name, name): columns.rows(values)
        for name, values in episodes.tensors().items()
    }
    for index, (episode, decided, has_numbers) in enumerate(
        zip(objects["episode"], objects["decided"], objects["has_numbers"], strict=True)
    ):
        prompt, first = episode.prompt, episode.first
        is_of_row = first is None or first.prompt_ids == prompt.token_ids
        prompt_ids = prompt.token_ids if is_of_row else first.prompt_ids
        key = (prompt.uid, prompt_ids)
        if key not in texts:
            media = (
                prompt.media
                if is_of_row
                else [part for part in first.media if part.span[1] <= len(prompt_ids)]
            )
            texts[key] = shown_text(tokenizer, prompt_ids, media)
        row = sample_row(episode, decided, prompt_text=texts[key], keeps_row=keeps_row)
        if has_numbers:
            row |= {name: values[index].tolist() for name, values in numbers.items()}
        rows.append(row)
    return rows


def sample_row(
    episode: Episode, decided: SampleDecision, *, prompt_text: str, keeps_row: bool = False
) -> dict[str, Any]:
    """One sample as a row of the sample store.

    Args:
        episode: the sample.
        decided: what came of it.
        prompt_text: the prompt that the model was shown, as text.
        keeps_row: add what a reward function gets of the dataset row, for data that cannot be read again by number.
    """
    trajectory, outcome = episode.trajectory, episode.outcome
    row: dict[str, Any] = {
        "id": episode.id,
        "uid": episode.prompt.uid,
        "sample_index": episode.sample_index,
        "data_source": episode.prompt.data_source,
        "agent_name": episode.prompt.agent_name,
        "prompt": prompt_text,
        "response": episode.text,
        "ground_truth": episode.prompt.ground_truth,
        "prompt_ids": list(episode.prompt.token_ids),
        "advantage": decided.advantage,
        "fate": decided.fate or None,
        "fate_reason": decided.reason,
    }
    if keeps_row:
        row["dataset_row"] = _row_text(episode.prompt)
    if trajectory is not None:
        row |= _sequence(trajectory)
        if episode.first is not None and episode.first.prompt_ids != episode.prompt.token_ids:
            row["row_prompt_ids"] = list(episode.prompt.token_ids)
        row |= {"num_turns": trajectory.num_turns, "timings": dict(trajectory.timings)}
        if trajectory.messages:
            row["messages"] = list(trajectory.messages)
        if trajectory.extra or trajectory.numbers:
            row["agent_facts"] = {**trajectory.numbers, **trajectory.extra}
        if episode.earlier:
            row["earlier_sequences"] = [_sequence(sequence) for sequence in episode.earlier]
    if outcome is not None:
        row |= {
            "score": outcome.score,
            "outcome": outcome.kind,
            "error": outcome.error,
            "reward_parts": dict(outcome.parts),
        }
    else:
        row["error"] = episode.failure
    return row


def _row_text(prompt: Prompt) -> str:
    """Messages, extra_info and further columns of a prompt, as a reward worker would get them; what cannot be sent to
    one becomes text."""
    fields = {
        "messages": plain(prompt.messages),
        "extra_info": {name: plain(value) for name, value in prompt.extra_info.items()},
        "columns": {name: plain(value) for name, value in prompt.columns.items()},
    }
    return encode([fields]).decode("ascii").strip()


def _sequence(trajectory: Trajectory) -> dict[str, Any]:
    """A training sequence under the names of the sample store's columns."""
    row: dict[str, Any] = {
        "prompt_ids": list(trajectory.prompt_ids),
        "response_ids": list(trajectory.response_ids),
        "response_mask": list(trajectory.sampled),
        "rollout_log_probs": list(trajectory.log_probs),
        "versions": list(trajectory.versions),
        "stop_reason": trajectory.stop_reason,
    }
    if trajectory.turn_rewards:
        row["turn_rewards"] = [[index, value] for index, value in trajectory.turn_rewards]
    if trajectory.stands_alone:
        row["stands_alone"] = True
    if trajectory.anchor:
        row["anchor"] = trajectory.anchor
    return row
