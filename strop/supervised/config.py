"""What a fine-tuning reads and how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from strop.base.field_types import PositiveInt
from strop.base.sections import section
from strop.data.config import Column
from strop.data.sources import fetched
from strop.engines.config import EngineConfig, OptimizerConfig


@section("sft.data")
class SftDataConfig:
    """Conversations for supervised fine-tuning."""

    train_files: tuple[str, ...] = ()
    """Files with one conversation per row: .parquet, .jsonl, .json, folders of them or written by `datasets`
    (FOLDER@split), hub:owner/name[:config][@split], or URLs. Relative paths start at the current directory."""
    val_files: tuple[str, ...] = ()
    """The same for validation; empty means no validation."""
    messages_key: Column = "messages"
    """Column with the chat messages; all assistant turns are trained."""
    prompt_key: Column = "prompt"
    """Without messages: column with what is given, a string (one user message) or a list of messages; with dots what
    lies inside a column, such as extra_info.question."""
    completion_key: Column = "completion"
    """Without messages: column with what is trained, a string (one assistant message) or a list of
    messages."""
    image_key: Column = "images"
    """Column with the images of a row, in the order of the placeholders `<image>` in its messages."""
    max_tokens: PositiveInt = 1024
    """Longest conversation, in tokens after the chat template."""
    truncation: Literal["drop", "error", "left", "right"] = "drop"
    """What becomes of longer ones: drop leaves them out, error ends the command, left cuts their beginning off and
    right their end, never inside of an image. One with nothing left to train is left out, too; all are counted."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""


@section("sft")
class SftConfig:
    """Supervised fine-tuning: read by `strop sft` alone."""

    data: SftDataConfig = field(default_factory=SftDataConfig)
    """Conversations to imitate."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How forward and backward passes are cut."""
    examples_per_update: PositiveInt = 32
    """Conversations per optimizer step."""
    num_epochs: PositiveInt = 1
    """Visits of each conversation."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps, if the epochs are not over before."""

    def __post_init__(self) -> None:
        if self.engine.max_tokens_per_device < self.data.max_tokens:
            raise ValueError(
                f"sft.engine.max_tokens_per_device is {self.engine.max_tokens_per_device}, but one conversation may "
                f"have {self.data.max_tokens} tokens (sft.data.max_tokens): raise the first to at least that, or lower "
                f"the second"
            )

    def code_named(self) -> Iterator[tuple[str, str, str]]:
        """Files that are fetched; see strop.base.sections.code_of_guests."""
        for name, files in (("train_files", self.data.train_files), ("val_files", self.data.val_files)):
            for entry in fetched(files):
                yield f"data.{name}", f"{entry} (fetched)", ""


CHANGEABLE = ("sft.engine.",)
"""Settings that a run may be continued with anew and stays the same."""
LENGTH, LEARNING = ("sft.num_epochs", "sft.max_steps"), ("sft.optim.",)
"""Those that steer it."""
