"""What a run reads: files, column names, limits and order."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from strop.base.field_types import NonEmptyText, NonNegativeFloat, NonNegativeInt, PositiveInt
from strop.base.sections import section

Column = Annotated[NonEmptyText, "name a column, or leave it out for the usual one"]


def check_mixture(data: Any, section: str) -> None:
    """Refuse weights and shares of sources together."""
    if data.source_weights and data.source_shares:
        raise ValueError(
            f"{section}.source_weights and {section}.source_shares both say how often the rows of a source are "
            f"visited: set one of the two"
        )


def _check_named(section: str, path: str, name: str) -> None:
    """Refuse a class without its file, and a file without its class."""
    if bool(path) != bool(name):
        given, value, missing = ("path", path, "name") if path else ("name", name, "path")
        raise ValueError(
            f"{section}.{given} is {value!r}, but {section}.{missing} is empty; set both, or none"
        )


@section("data.dataset_class")
class DatasetClassConfig:
    """A class of the user's own that makes the rows."""

    path: str = ""
    """Python file with the class, relative to the current directory. Empty: rows are read from the files as they
    are."""
    name: str = ""
    """Name of the class in that file."""

    def __post_init__(self) -> None:
        _check_named("data.dataset_class", self.path, self.name)


@section("data.datagen")
class DatagenConfig:
    """A class of the user's own that makes rows while a run goes on."""

    path: str = ""
    """Python file with the class, relative to the current directory. Empty: no rows are made."""
    name: str = ""
    """Name of the class in that file, which derives from AbstractDataGenerator."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Further settings, which the class is given."""

    def __post_init__(self) -> None:
        _check_named("data.datagen", self.path, self.name)


@section("data")
class DataConfig:
    """Prompts for training and validation."""

    train_files: tuple[str, ...] = ()
    """Files with one prompt per row: .parquet, .jsonl, .json, folders of them or written by `datasets`
    (FOLDER@split), hub:owner/name[:config][@split][#revision] (or modelscope:), or URLs. Relative paths start
    at the current directory."""
    val_files: tuple[str, ...] = ()
    """The same for validation; empty means no validation."""
    dataset_class: DatasetClassConfig = field(default_factory=DatasetClassConfig)
    """A class of your own that makes the rows of training and validation, {path: my_data.py, name: MyDataset}. It is
    called as MyDataset(data_files, tokenizer, config, processor=None, max_samples=-1) and gives a row by its number."""
    datagen: DatagenConfig = field(default_factory=DatagenConfig)
    """A class of your own that makes more rows before the first step and after each one, {path: my_rows.py, name:
    MyGenerator}; they are visited from the next epoch on."""
    streaming: bool = False
    """Read and encode each training prompt when it is visited, instead of all before the first step: for sets that do
    not fit into memory. Validation prompts are held in any case."""
    cache_dir: str = ""
    """Folder for fetched files, for the token ids of large sets and for indexes of streamed ones; empty means
    ~/.cache/strop. May be deleted at any time but while a run starts."""
    cache_max_bytes: NonNegativeInt = 50 * 2**30
    """Most that the cache folder may take, in bytes: at the start of a run what was not used for longest is removed
    from it, but nothing that this run uses or that was used within the last hour."""
    prompt_key: Column = "prompt"
    """Column with the prompt: a list of chat messages, or a string that becomes one user message."""
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
    source_weights: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """How often the training rows of a data source are visited per epoch, by its name: 2 is twice, 0.5 in every
    other epoch, 0 never. 1 for sources that are not named. Where no row has a data source of these names, they are
    those of the files: the last part without its suffix, or the whole entry of train_files where several have it."""
    source_shares: dict[str, NonNegativeFloat] = field(default_factory=dict)
    """In place of weights: the share that each source has of all visits, {math: 0.7, code: 0.3}, whatever they add up
    to. The source with the smallest share for its number of rows is visited once per epoch, others more often."""
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
    own (algorithm.extensions)."""
    reorder_every: NonNegativeInt = 0
    """Steps after which a sampler that sees results orders the rest of the epoch again; 0: at the start of each epoch
    only."""
    filter_overlong_prompts: bool = True
    """Drop prompts over max_prompt_tokens and report how many; false: data.truncation says what becomes of
    them."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What becomes of prompts over max_prompt_tokens that are not dropped: the first one is an error, or tokens
    are cut off on the left (the end stays, with the generation prompt), on the right, or in the middle."""
    max_train_prompts: PositiveInt | None = None
    """Train on at most this many prompts, spread evenly over the rows; null means all."""
    max_val_prompts: PositiveInt | None = None
    """Validate on at most this many prompts, spread evenly over the rows; null means all."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, for example {enable_thinking: false}."""

    @property
    def media_columns(self) -> dict[str, str]:
        """Kind of media -> column of a row."""
        return {"image": self.image_key, "video": self.video_key}

    def __post_init__(self) -> None:
        if self.image_key == self.video_key:
            raise ValueError(
                f"data.image_key and data.video_key are both {self.image_key!r}; give each kind a column of its own"
            )
        if self.truncation != "error" and self.filter_overlong_prompts:
            raise ValueError(
                f"data.truncation={self.truncation} cuts long prompts, but data.filter_overlong_prompts=true "
                f"drops them before; set data.filter_overlong_prompts=false to cut them"
            )
        check_mixture(self, "data")
        mixture = "source_weights" if self.source_weights else "source_shares" if self.source_shares else ""
        if self.datagen.path and (self.streaming or mixture):
            other = "data.streaming=true" if self.streaming else f"data.{mixture}"
            raise ValueError(
                f"data.datagen adds rows while the run goes on, and {other} wants to know all of them before: use one "
                f"of the two"
            )
        if self.streaming and mixture:
            raise ValueError(
                f"data.{mixture} counts the rows of every data source before the first visit, but "
                "data.streaming=true reads a row when it is visited: leave the weights out and repeat or thin out "
                "files instead, or set data.streaming=false"
            )
        if self.streaming and not self.filter_overlong_prompts and self.truncation == "error":
            raise ValueError(
                "data.streaming=true meets a prompt that is too long at its visit, in the middle of a run, where "
                "data.truncation=error would end it: set data.filter_overlong_prompts=true to pass over such "
                "prompts, or data.truncation to left, right or middle to cut them"
            )
