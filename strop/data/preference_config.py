"""Settings of training on preferences: data and optimization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any

from strop.algorithms.preference_loss_config import PreferenceLossConfig
from strop.config.sections import section
from strop.data.config import Column, JsonMessages, check_template_kwargs
from strop.data.sft.config import files_named
from strop.engines.config import EngineConfig, OptimizerConfig
from strop.utils.field_types import PositiveInt


@section("prefer.data")
class PreferDataConfig:
    """Answers that were compared, or rated."""

    train_files: tuple[str, ...] = ()
    """Files with one comparison per row: .parquet, .jsonl, .json, folders of them or written by `datasets`
    (FOLDER@split), hub:owner/name[:config][@split][#revision] (or modelscope:), or URLs. Relative paths start
    at the current directory."""
    val_files: tuple[str, ...] = ()
    """The same for validation; empty means no validation."""
    prompt_key: Column = "prompt"
    """Column with the prompt, a string (one user message) or a list of messages. A row without it, whose answers
    are whole conversations, has their common beginning as its prompt."""
    json_messages: JsonMessages = "refuse"
    """Treatment of a column that holds a list of messages as JSON text: it is refused, read as messages, or taken
    as a text."""
    chosen_key: Column = "chosen"
    """Column with the better answer, a string (one assistant message) or a list of messages."""
    rejected_key: Column = "rejected"
    """Column with the other one."""
    completion_key: Column = "completion"
    """With loss=kto: column with the answer."""
    margin_key: Column = "margin"
    """With loss=reward: column with how much better the better answer is; 0 for a row without it."""
    label_key: Column = "label"
    """With loss=kto: column that says whether it is good, true or false, 1 or 0."""
    max_tokens: PositiveInt = 1024
    """Longest conversation, in tokens after the chat template; rows with a longer one are dropped and counted."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""

    def __post_init__(self) -> None:
        check_template_kwargs("prefer.data.chat_template_kwargs", self.chat_template_kwargs)


@section("prefer")
class PreferConfig(PreferenceLossConfig):
    """Training on preferences: read by `strop prefer`, `strop dpo` and `strop reward-model` alone."""

    data: PreferDataConfig = field(default_factory=PreferDataConfig)
    """Comparisons to train on."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-6))
    """Optimizer."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Micro-batches of forward and backward passes."""
    examples_per_update: PositiveInt = 32
    """Comparisons (kto: answers) per optimizer step."""
    num_epochs: PositiveInt = 1
    """Visits of each row."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps, if the epochs are not over before."""

    def __post_init__(self) -> None:
        if self.engine.max_tokens_per_device <= self.data.max_tokens:
            raise ValueError(
                f"prefer.engine.max_tokens_per_device is {self.engine.max_tokens_per_device}, but one conversation may "
                f"have {self.data.max_tokens} tokens (prefer.data.max_tokens), and one more is read behind it: raise "
                f"the first above that, or lower the second"
            )
        super().__post_init__()

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """Files that are fetched; see strop.config.sections.code_of."""
        yield from files_named(self.data)


CHANGEABLE = ("prefer.engine.",)
"""Settings that a run may be continued with anew and stays the same."""
LENGTH, LEARNING = ("prefer.num_epochs", "prefer.max_steps"), ("prefer.optim.",)
"""Settings of the length of a run, and of its optimizer."""
