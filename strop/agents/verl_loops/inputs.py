"""Arguments of agent loops in verl's form: settings of the run, and the row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from strop.agents.context import AgentContext
from strop.agents.tools.plugin import tools_kwargs_of
from strop.algorithms.verl_config import VerlConfig
from strop.protocol.trajectory import Media, Prompt

IMAGE_PLACEHOLDER = "<image>"
"""Stands for an image in the text of a row's messages."""


def refuse(**media: Any) -> None:
    """Refuse media that agent loops cannot show to the model."""
    for name, value in media.items():
        if value:
            raise ValueError(f"agent loops cannot show {name} to the model; send text and images")


def verl_config(context: AgentContext) -> VerlConfig:
    """The settings of a run that loops of verl read, under its names."""
    config = context.config
    rollout = {
        "response_length": context.sampling.max_tokens,
        "prompt_length": context.max_prompt_tokens,
        "multi_turn": {
            "max_assistant_turns": config.max_assistant_turns,
            "max_user_turns": config.max_user_turns,
            "max_parallel_calls": config.max_parallel_calls,
            "max_tool_response_length": config.max_tool_response_tokens,
            "tool_response_truncate_side": config.tool_response_truncation,
            "format": config.tool_format,
            "tool_config_path": config.tools or None,
        },
    }
    return VerlConfig({"agent": dataclasses.asdict(config), "actor_rollout_ref": {"rollout": rollout}})


def row_fields(prompt: Prompt) -> dict[str, Any]:
    """Keyword arguments of `run`, from the row."""
    return {
        **prompt.columns,
        "raw_prompt": _raw_prompt(prompt),
        "data_source": prompt.data_source,
        "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
        "extra_info": dict(prompt.extra_info),
        "index": prompt.extra_info.get("index", prompt.row),
        "tools_kwargs": tools_kwargs_of({**prompt.columns, "extra_info": prompt.extra_info}),
        "interaction_kwargs": prompt.extra_info.get("interaction_kwargs", {}),
        "uid": prompt.uid,
        "agent_name": prompt.agent_name,
    }


def _raw_prompt(prompt: Prompt) -> list[dict[str, Any]]:
    """The messages of a prompt; where it has images, contents are parts, and each image stands in its place.

    Raises:
        ValueError: the prompt has videos.
    """
    if not prompt.media:
        return [dict(message) for message in prompt.messages]
    refuse(videos=any(item.kind != "image" for item in prompt.media))
    images = iter(prompt.media)
    messages = []
    for message in prompt.messages:
        content = message.get("content", "")
        parts: list[dict[str, Any]] = []
        for part in [{"text": content}] if isinstance(content, str) else content:
            is_text = part.get("type", "text") == "text"
            pieces = str(part.get("text", "")).split(IMAGE_PLACEHOLDER) if is_text else ["", ""]
            for number, piece in enumerate(pieces):
                parts += [{"type": "image", "image": _next_image(images, prompt)}] if number else []
                parts += [{"type": "text", "text": piece}] if piece else []
        messages.append({**message, "content": parts})
    return messages


def _next_image(images: Iterator[Media], prompt: Prompt) -> bytes | str:
    image = next(images, None)
    if image is None:
        raise ValueError(
            f"prompt {prompt.uid} has more places for images in its messages than images ({len(prompt.media)}); agent "
            f"loops of verl cannot play it"
        )
    return image.parts[0]
