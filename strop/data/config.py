"""What a run reads: files, column names, limits and order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Prompts for training and validation."""

    train_files: tuple[str, ...] = ()
    """Files with one prompt per row: .parquet, .jsonl, .json, folders of them or written by `datasets`
    (FOLDER@split), hub:owner/name[:config][@split], or URLs. Relative paths start at the current directory."""
    val_files: tuple[str, ...] = ()
    """The same for validation; empty means no validation."""
    cache_dir: str = ""
    """Folder for fetched files and for the token ids of large sets; empty means ~/.cache/strop. May be deleted
    at any time."""
    prompt_key: str = "prompt"
    """Column with the prompt: a list of chat messages, or a string that becomes one user message."""
    data_source_key: str = "data_source"
    """Column that selects the scorer and groups the validation metrics."""
    ground_truth_key: str | None = "reward_model.ground_truth"
    """Column with the right answer, a dot for each level inside it (`answer` for a plain column); null when
    the rows have none and the reward function needs none."""
    default_data_source: str = ""
    """The data source of rows without one; empty means that each row must name its own."""
    source_weights: dict[str, float] = field(default_factory=dict)
    """How often the training rows of a data source are visited per epoch, by its name: 2 is twice, 0.5 in every
    other epoch, 0 never. 1 for sources that are not named."""
    max_prompt_tokens: int = 512
    """Longest prompt, in tokens after the chat template."""
    max_response_tokens: int = 512
    """Longest response, in tokens."""
    prompts_per_step: int = 64
    """Prompts per training step; each is sampled rollout.samples_per_prompt times. Need not divide
    anything."""
    shuffle: bool = True
    """Visit the rows of each epoch in an order drawn from the seed; false: in the order of the files."""
    filter_overlong_prompts: bool = True
    """Drop prompts over max_prompt_tokens and report how many; false: data.truncation says what becomes of
    them."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What becomes of prompts over max_prompt_tokens that are not dropped: the first one is an error, or tokens
    are cut off on the left (the end stays, with the generation prompt), on the right, or in the middle."""
    max_train_prompts: int | None = None
    """Train on at most this many prompts, spread evenly over the rows; null means all."""
    max_val_prompts: int | None = None
    """Validate on at most this many prompts, spread evenly over the rows; null means all."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""

    def __post_init__(self) -> None:
        _check_positive("data.prompts_per_step", self.prompts_per_step)
        _check_positive("data.max_prompt_tokens", self.max_prompt_tokens)
        _check_positive("data.max_response_tokens", self.max_response_tokens)
        for name, limit in (("train", self.max_train_prompts), ("val", self.max_val_prompts)):
            if limit is not None:
                _check_positive(f"data.max_{name}_prompts", limit)
        _check_named("data.prompt_key", self.prompt_key)
        _check_named("data.data_source_key", self.data_source_key)
        if self.ground_truth_key == "":
            raise ValueError(
                "data.ground_truth_key is empty; name the column with the right answer, or set it to null "
                "when the reward function needs none"
            )
        if self.truncation != "error" and self.filter_overlong_prompts:
            raise ValueError(
                f"data.truncation={self.truncation} cuts long prompts, but data.filter_overlong_prompts=true "
                f"drops them before; set data.filter_overlong_prompts=false to cut them"
            )
        for source, weight in self.source_weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ValueError(
                    f"data.source_weights of {source!r} is {weight}; use the number of visits per epoch, 0 for "
                    f"none"
                )


@dataclass(frozen=True, kw_only=True)
class SftDataConfig:
    """Conversations for supervised fine-tuning."""

    train_files: tuple[str, ...] = ()
    """Files with one conversation per row: .parquet, .jsonl, .json, folders of them or written by `datasets`
    (FOLDER@split), hub:owner/name[:config][@split], or URLs. Relative paths start at the current directory."""
    val_files: tuple[str, ...] = ()
    """The same for validation; empty means no validation."""
    messages_key: str = "messages"
    """Column with the chat messages; all assistant turns are trained."""
    prompt_key: str = "prompt"
    """Without messages: column with what is given, a string (one user message) or a list of messages."""
    completion_key: str = "completion"
    """Without messages: column with what is trained, a string (one assistant message) or a list of
    messages."""
    max_tokens: int = 1024
    """Longest conversation, in tokens after the chat template; longer ones are dropped and counted."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""

    def __post_init__(self) -> None:
        _check_positive("data.max_tokens", self.max_tokens)
        _check_named("data.messages_key", self.messages_key)
        _check_named("data.prompt_key", self.prompt_key)
        _check_named("data.completion_key", self.completion_key)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")


def _check_named(name: str, value: str) -> None:
    if not value:
        raise ValueError(f"{name} is empty; name a column, or leave it out for the usual one")
