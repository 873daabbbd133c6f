"""Settings of supervised fine-tuning: data and optimization."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, Literal

from strop.config.sections import section
from strop.data.config import Column, JsonMessages, check_template_kwargs
from strop.data.mixture.settings import check_mixture
from strop.engines.config import EngineConfig, MoEConfig, OptimizerConfig
from strop.utils.field_types import FiniteFloat, NonNegativeFloat, PositiveFloat, PositiveInt
from strop.utils.remote_path import fetched


@section("sft.data.keep")
class SftKeepConfig:
    """Rejection sampling of answers with a score, by prompt. Off by default: all rows are imitated."""

    best: PositiveInt | None = None
    """At most so many answers to each prompt: those with the largest scores, of equal ones the first. null: all."""
    min_score: FiniteFloat | None = None
    """Answers with at least this score. null: any."""
    repeats: bool = False
    """Keep answers that say the same, token by token, more than once."""

    def __post_init__(self) -> None:
        if self.repeats and not self.is_on:
            raise ValueError(
                "sft.data.keep.repeats is true, but nothing is left out without sft.data.keep.best or "
                "sft.data.keep.min_score: set one of them, or remove it"
            )

    @property
    def is_on(self) -> bool:
        """True if some answers may be left out."""
        return self.best is not None or self.min_score is not None


@section("sft.data")
class SftDataConfig:
    """Conversations for supervised fine-tuning."""

    train_files: tuple[str, ...] = ()
    """Files with one conversation per row: .parquet, .jsonl, .json, folders of them or written by `datasets`
    (FOLDER@split), hub:owner/name[:config][@split][#revision] (or modelscope:), or URLs; or run folders, whose
    training samples are imitated, token by token. Relative paths start at the current directory."""
    val_files: tuple[str, ...] = ()
    """The same for validation; empty means no validation."""
    source_weights: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """Visits per epoch of the rows of a source, 1 where it is not named. The source is their column `data_source`, else
    the name of the file or folder without its suffix; where several have it, the path from the folder that has them
    all. The whole entry of train_files names it too."""
    source_shares: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """In place of weights: the share that each source has of all visits, whatever they add up to. The source with the
    smallest share for its number of rows is visited once per epoch, others more often."""
    keep: SftKeepConfig = field(default_factory=SftKeepConfig)
    """Rejection sampling, of rows that have a `score`."""
    messages_key: Column = "messages"
    """Column with the chat messages; assistant turns are trained."""
    trained_turns: Literal["all", "last"] = "all"
    """Of the assistant turns of `messages`: all, or the last one alone."""
    trained_key: Column = "loss_mask"
    """Key of a message that says whether it is trained, true or false, 1 or 0; where no message of a row has it,
    trained_turns says so."""
    json_messages: JsonMessages = "refuse"
    """Treatment of a column that holds a list of messages as JSON text: it is refused, read as messages, or taken
    as a text."""
    prompt_key: Column = "prompt"
    """Without messages: column with the prompt, a string (one user message) or a list of messages; with dots the
    value inside a column, such as extra_info.question."""
    completion_key: Column = "completion"
    """Without messages: column with the trained answer, a string (one assistant message) or a list of
    messages."""
    image_key: Column = "images"
    """Column with the images of a row, in the order of the placeholders `<image>` in its messages."""
    max_tokens: PositiveInt = 1024
    """Longest conversation, in tokens after the chat template."""
    truncation: Literal["drop", "error", "left", "right"] = "drop"
    """Treatment of longer ones: drop leaves them out, error ends the command, left cuts their beginning off and
    right their end, never inside of an image. One with nothing left to train is left out, too; all are counted."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""

    def __post_init__(self) -> None:
        check_mixture(self, "sft.data")
        check_template_kwargs("sft.data.chat_template_kwargs", self.chat_template_kwargs)


@section("sft.distillation")
class SftDistillationConfig:
    """Distillation from the logged top tokens of a teacher (columns teacher_ids and teacher_logprobs). Off by
    default."""

    coef: NonNegativeFloat = 0.0
    """Weight of KL(teacher || model) in the place of every trained token, over the logged tokens; 0: off."""
    nll_coef: NonNegativeFloat = 0.0
    """Weight of imitating the tokens themselves beside it."""
    with_tail: bool = True
    """Count all tokens that were not logged as one more, so that the term is a divergence, never below 0. False leaves
    them out: then nothing is lost where the model's own mass in them is too small."""

    def __post_init__(self) -> None:
        changed = [
            key for key, is_set in (("nll_coef", self.nll_coef), ("with_tail", not self.with_tail)) if is_set
        ]
        if changed and not self.is_on:
            raise ValueError(
                f"sft.distillation.{changed[0]} is set, but sft.distillation.coef is 0, so no teacher is read: "
                f"set coef, or remove it"
            )

    @property
    def is_on(self) -> bool:
        """True if the logged tokens of the teacher are read."""
        return self.coef > 0


@section("sft")
class SftConfig:
    """Supervised fine-tuning: read by `strop sft` alone."""

    data: SftDataConfig = field(default_factory=SftDataConfig)
    """Conversations to imitate."""
    distillation: SftDistillationConfig = field(default_factory=SftDistillationConfig)
    """Learning from a teacher's logged log-probs."""
    optim: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Optimizer."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Micro-batches of forward and backward passes."""
    moe: MoEConfig = field(default_factory=MoEConfig)
    """Losses of the routers of a model with experts."""
    examples_per_update: PositiveInt = 32
    """Conversations per optimizer step."""
    num_epochs: PositiveInt = 1
    """Visits of each conversation."""
    max_steps: PositiveInt | None = None
    """Stop after this many optimizer steps, if the epochs are not over before."""
    target_loss: PositiveFloat | None = None
    """End at the first validation after a step whose loss is no larger; it needs sft.data.val_files, and is looked at
    every `eval.every` steps."""

    def __post_init__(self) -> None:
        if self.engine.max_tokens_per_device < self.data.max_tokens:
            raise ValueError(
                f"sft.engine.max_tokens_per_device is {self.engine.max_tokens_per_device}, but one conversation may "
                f"have {self.data.max_tokens} tokens (sft.data.max_tokens): raise the first to at least that, or lower "
                f"the second"
            )

    def code_references(self) -> Iterator[tuple[str, str, str]]:
        """Files that are fetched; see strop.config.sections.code_of."""
        yield from files_named(self.data)


def files_named(data: object) -> Iterator[tuple[str, str, str]]:
    """The files of a section `data` that are fetched, as `code_references` says them."""
    for name in ("train_files", "val_files"):
        for entry in fetched(getattr(data, name)):
            yield f"data.{name}", f"{entry} (fetched)", ""


CHANGEABLE = ("sft.engine.",)
"""Settings that a run may be continued with anew and stays the same."""
LENGTH, LEARNING = ("sft.num_epochs", "sft.max_steps", "sft.target_loss"), ("sft.optim.",)
"""Settings of the length of a run, and of its optimizer."""
