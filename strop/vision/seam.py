"""What the core asks of images and videos: of the media of rows, and of models that take media beside tokens.

The core knows media as tokens of a sequence, one after another, with a value that it does not look into
(`strop.trajectory.Media`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from strop.engines.attention import Span
from strop.trajectory import Media


class MediaSource(Protocol):
    """An image or a video as a row gives it."""

    @property
    def identity(self) -> list[str]:
        """Equal for media that are the same: paths, or digests of contents."""


class RowMedia(Protocol):
    """The media of a row, counted in tokens."""

    @property
    def films(self) -> list[str]:
        """Digests of its videos in files: of their contents, and of which frames are taken."""

    @property
    def notes(self) -> list[str]:
        """What a person should know of them; the model is not told."""

    def expand(self, token_ids: Sequence[int]) -> array[int]:
        """The ids with as many tokens for each medium as stand for it, where the template put one.

        Raises:
            ValueError: the template puts other media, or another number of them.
        """

    def read(self) -> None:
        """Decode what may fail beyond the head of a file, as videos do.

        Raises:
            ValueError: one cannot be decoded.
        """

    def spans(self, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """[start, end) of each medium with the tokens that open and close it: what is never cut."""

    def media(self, token_ids: Sequence[int]) -> tuple[Media, ...]:
        """What a prompt of these ids carries."""


class RowsReader(Protocol):
    """What joins at the place "media of rows"."""

    def take_media(
        self,
        source: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any]],
        columns: Mapping[str, str],
        where: str,
    ) -> tuple[tuple[dict[str, Any], ...], tuple[MediaSource, ...]]:
        """Messages as a chat template takes them, with parts {"type": "image"}, and the media in their order.

        Raises:
            ValueError: the numbers of placeholders and media differ, or a medium has an unknown form.
        """

    def row_media(
        self, tokenizer: PreTrainedTokenizerBase, sources: Sequence[MediaSource], where: str
    ) -> RowMedia:
        """The media for the model that the tokenizer belongs to.

        Raises:
            ValueError: the model takes no such media, or a file cannot be read.
        """

    def check_run(self, config: Any) -> None:
        """Refuse settings of a run (strop.trainer.config.Config) that prompts with media do not go with.

        Raises:
            ValueError: the sentence says which, and what to do.
        """

    def check_engine(self, rollout: Any, model: Any) -> None:
        """Refuse an engine that is given no media, or none of such a model; as `check_run`, with these sections."""


class MediaReader(Protocol):
    """How the models of one folder read media: what an engine needs whose model is in another process."""

    token_ids: Mapping[str, int]
    """Kind of media -> id of its token; the model is never to choose one of these."""
    tells_seconds: bool
    """Positions tell how much time lies between the patches of a video."""

    def check(self, token_ids: Sequence[int], media: Sequence[Media], where: str) -> None:
        """Refuse media tokens without media, or the other way round, with a ValueError."""

    def pixels(self, one: Media) -> Tensor:
        """The pixels of an image or a video, as the tower takes them.

        Raises:
            ValueError: it cannot be read.
        """

    def most_tokens(self, kind: str) -> int | None:
        """How many tokens stand for the largest medium of this kind; None: any number."""

    def image_encoder(self) -> Any:
        """Images of tools for this model (`strop.tools.images.ImageEncoder`); None where it cannot be shown any."""


class MediaInputs(MediaReader, Protocol):
    """The media side of one loaded model."""

    text_id: int
    """A token that stands for no media."""
    tower: nn.Module | None
    """The part of the model that reads media, up to what the language part takes."""
    hidden: Callable[..., Any] | None
    """Called as the model's base is, with media among its arguments, for a model whose base does not take them; None
    where it does."""

    def positions(self, token_ids: Tensor, media: Sequence[Media]) -> Tensor:
        """Positions [n] or [3, n] of tokens [n] with media, on the CPU; what follows goes on after the largest one."""

    def blocks(self, token_ids: Tensor) -> tuple[Span, ...]:
        """Runs of tokens [n] that see each other whatever their order (`Segment.blocks`)."""

    def arguments(self, media: Sequence[Media], *, device: torch.device) -> Mapping[str, Tensor]:
        """These media, in order, as arguments of the forward pass.

        Raises:
            ValueError: one cannot be read.
        """

    def touched(self, hidden: Tensor) -> Tensor:
        """`hidden`, with a gradient of 0 for every weight of the tower that is trained: ranks add gradients up."""

    def attention(self, name: str, *, by_formula: bool) -> str | dict[str, str]:
        """Argument of `set_attn_implementation` that gives the language part the attention of this name; the part that
        reads media keeps its own, or computes it by the formula."""

    def probe(self, device: torch.device) -> Callable[[Any], float] | None:
        """The module's own results on prompts with media; from a `CausalLM` on packed ones, the largest log-prob
        difference. None where it takes none that could be tried."""

    def save_settings(self, folder: Path) -> None:
        """Copy what says how media are read into another model folder."""


class MediaModels(Protocol):
    """A family of models with media: what joins at the place "model with media"."""

    AUTO_CLASS: Any
    """The class of transformers that loads them."""

    def takes_media(self, config: Any) -> bool:
        """Whether a model of this configuration is of the family."""

    def media_token_ids(self, config: Any) -> dict[str, int]:
        """Kind of media -> id of its token."""

    def written_template(self, config: Any, template: str) -> str:
        """A chat template as it is rendered for a model: with the text that belongs around media, where a model wants
        some, and its own template leaves it to the processor."""

    def media_inputs(self, module: Any, folder: str) -> MediaInputs | None:
        """The media side of a loaded model.

        Args:
            module: whose configuration is of the family; a classifier may have no such side.
            folder: that says how media are read; without one, or where it does not say it, the model takes text alone.
        """

    def media_reader(self, config: Any, folder: str) -> MediaReader | None:
        """How the models of a folder read media; None where that takes the model.

        Args:
            config: of the model, which is of the family.
            folder: that says how media are read; where it does not say it, none can be.
        """

    def copy_settings(self, sources: Sequence[Path], folder: Path) -> None:
        """Copy what says how media are read from the first of these model folders that has it."""
