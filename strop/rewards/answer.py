"""One answer to score, as functions are told of it."""

from __future__ import annotations

from typing import Any

from strop.rewards.wire import plain
from strop.trajectory import Prompt, Trajectory


def call_of(prompt: Prompt, trajectory: Trajectory, text: str, *, style: str) -> dict[str, Any]:
    """What a worker process is sent for functions of this calling convention.

    Args:
        prompt: the row; its ground truth, columns and extra_info reach the function.
        trajectory: its turn count and extra facts are added to extra_info.
        text: the decoded response.
        style: verl, trl, batch or manager.
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
    if style in (
        "trl",
        "manager",
    ):  # TRL's are told texts for a text prompt, message lists for a conversation
        text_prompt = prompt.columns.get("prompt")
        is_text = isinstance(text_prompt, str)
        call |= {
            "prompt": text_prompt if is_text else list(prompt.messages),
            "completion": text if is_text else [{"role": "assistant", "content": text}],
            "completion_ids": list(trajectory.response_ids),
            "columns": {name: value for name, value in prompt.columns.items() if name != "prompt"},
        }
    if style == "manager":
        call |= {"prompt_ids": list(prompt.token_ids), "messages": plain(prompt.messages), "uid": prompt.uid}
    return call
