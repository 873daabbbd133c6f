"""Data settings of a run: files, column names, limits and order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from strop.config.sections import section, where_on
from strop.data.dataset_class_config import DatagenConfig, DatasetClassConfig
from strop.data.mixture.settings import check_sources
from strop.utils.field_types import NonEmptyText, NonNegativeFloat, NonNegativeInt, PositiveInt

JsonMessages = Literal["refuse", "read", "text"]
"""Treatment of a text that is a list of messages, written as JSON or by Python."""
Column = Annotated[NonEmptyText, "name a column, or leave it out for the usual one"]


@section("data")
class DataConfig:
    """Prompts for training and validation."""

    train_files: tuple[str, ...] = ()
    """Files with one prompt per row: .parquet, .jsonl, .json, folders of them or written by `datasets`
    (FOLDER@split), hub:owner/name[:config][@split][#revision] (or modelscope:), or URLs. Relative paths start
    at the current directory."""
    val_files: tuple[str, ...] = ()
    """The same for validation; empty means no validation."""
    streaming: bool = False
    """Read and encode each training prompt when it is visited, instead of all before the first step: for sets that do
    not fit into memory. Validation prompts are held in any case."""
    cache_dir: str = ""
    """Folder for fetched files, for the token ids of large sets and for indexes of streamed ones; empty means
    ~/.cache/strop. May be deleted at any time but while a run starts."""
    cache_max_bytes: Annotated[NonNegativeInt, "0 keeps only what a run uses"] = 50 * 2**30
    """Most that the cache folder may take, in bytes: at the start of a run what was not used for longest is removed
    from it, but nothing that this run uses or that was used within the last hour."""
    prompt_key: Column = "prompt"
    """Column with the prompt: a list of chat messages, or a string that becomes one user message."""
    json_messages: JsonMessages = "refuse"
    """Treatment of a prompt that is a list of messages as JSON text, as tables often hold it by accident: it is
    refused, read as messages, or taken as a text of the user."""
    continue_final_message: bool = True
    """A prompt whose last message is the assistant's is continued: the answer goes on from its last word, as in TRL.
    False refuses such rows."""
    image_key: Column = "images"
    """Column with the images of a prompt."""
    video_key: Column = "videos"
    """Column with its videos: files, or lists of frames (docs/multimodal.md)."""
    data_source_key: Column = "data_source"
    """Column that selects the scorer and groups the validation metrics."""
    ground_truth_key: Annotated[NonEmptyText, "null where the reward function needs none"] | None = (
        "reward_model.ground_truth"
    )
    """Column with the right answer, a dot for each level inside it (`answer` for a plain column); null when
    the rows have none and the reward function needs none."""
    default_data_source: str = ""
    """The data source of rows without one; empty means that each row must name its own."""
    max_prompt_tokens: PositiveInt = 512
    """Longest prompt, in tokens after the chat template."""
    max_response_tokens: PositiveInt = 512
    """Longest response, in tokens."""
    prompts_per_step: PositiveInt = 64
    """Prompts per training step; each is sampled rollout.samples_per_prompt times. Need not divide
    anything."""
    sampler: str = "shuffled"
    """Order of the rows of an epoch: shuffled (drawn from the seed), in_order (of the files); by the pass rate at their
    last visit, easy_first, hard_first or near_half (those first that passed about half of the time); or one of your
    own (algorithm.extensions) or of an installed package (docs/packages.md)."""
    reorder_every: Annotated[NonNegativeInt, "0 is at the start of each epoch only"] = 0
    """Steps after which a sampler that sees results orders the rest of the epoch again; 0: at the start of each epoch
    only."""
    filter_overlong_prompts: bool = True
    """Drop prompts over max_prompt_tokens and report how many; false: data.truncation says what becomes of
    them."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """Treatment of prompts over max_prompt_tokens that are not dropped: the first one is an error, or tokens
    are cut off on the left (the end stays, with the generation prompt), on the right, or in the middle."""
    max_train_prompts: PositiveInt | None = None
    """Train on at most this many prompts, spread evenly over the rows; null means all."""
    max_val_prompts: PositiveInt | None = None
    """Validate on at most this many prompts, spread evenly over the rows; null means all."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""
    source_weights: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """Visits per epoch of the training rows of a data source, by its name: 2 is twice, 0.5 in every
    other epoch, 0 never. 1 for sources that are not named. Where no row has a data source of these names, they are
    those of the files: the last part without its suffix; where several have it, the path from the folder that has them
    all. The whole entry of train_files names it too."""
    source_shares: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """In place of weights: the share that each source has of all visits, {math: 0.7, code: 0.3}, whatever they add up
    to. The source with the smallest share for its number of rows is visited once per epoch, others more often."""
    dataset_class: DatasetClassConfig = field(default_factory=DatasetClassConfig)
    datagen: DatagenConfig = field(default_factory=DatagenConfig)

    @property
    def media_columns(self) -> dict[str, str]:
        """Kind of media -> column of a row."""
        return {"image": self.image_key, "video": self.video_key}

    def __post_init__(self) -> None:
        check_sources(self)
        check_template_kwargs("data.chat_template_kwargs", self.chat_template_kwargs)
        if self.image_key == self.video_key:
            raise ValueError(
                f"data.image_key and data.video_key are both {self.image_key!r}; give each kind a column of its own"
            )
        if self.truncation != "error" and self.filter_overlong_prompts:
            raise ValueError(
                f"data.truncation={self.truncation} cuts long prompts, but data.filter_overlong_prompts=true "
                f"drops them before; set data.filter_overlong_prompts=false to cut them"
            )
        if self.streaming and where_on(self.datagen) is not None:
            raise ValueError(
                "data.datagen adds rows while the run goes on, and data.streaming=true wants to know all of them "
                "before: use one of the two"
            )
        if self.streaming and not self.filter_overlong_prompts and self.truncation == "error":
            raise ValueError(
                "data.streaming=true meets a prompt that is too long at its visit, in the middle of a run, where "
                "data.truncation=error would end it: set data.filter_overlong_prompts=true to pass over such "
                "prompts, or data.truncation to left, right or middle to cut them"
            )


def check_template_kwargs(name: str, options: Mapping[str, Any]) -> None:
    """Refuse arguments of `apply_chat_template` among the variables of a template, which sentences call `name`, as a
    ValueError."""
    reserved = ("add_generation_prompt", "continue_final_message", "tokenize", "tools", "return_dict")
    for key in reserved:
        if key in options:
            reason = "strop sets it"
            if (name, key) == ("data.chat_template_kwargs", "continue_final_message"):
                reason = "data.continue_final_message says so"
            raise ValueError(
                f"{name} has {key}, which is no variable of a template but an argument of apply_chat_template: leave "
                f"it out, {reason}"
            )
