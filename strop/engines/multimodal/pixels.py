"""Images and videos into the pixels that a vision tower takes: what all families of models have in common.

How many tokens there will be follows from sizes and times alone: pixels are not made before a model needs them. They
are made once per process: they are kept, up to a bound, under the key of the picture.
"""

from __future__ import annotations

import hashlib
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoImageProcessor

from strop.engines.model_folder import model_json
from strop.engines.multimodal.video_settings import VideoSettings
from strop.protocol.trajectory import Media

PROCESSOR_FILE = "preprocessor_config.json"
_WHOLE_FILE = "processor_config.json"
SETTINGS = (PROCESSOR_FILE, "video_preprocessor_config.json", _WHOLE_FILE, "chat_template.json")
"""Files of a model folder that say how its media are read."""
MAX_KEPT_BYTES = 1 << 30
"""Pixels kept per process: those of a few hundred pictures of 448 x 448, a step's worth."""


class MediaProcessor(ABC):
    """Image and video processor of one model: sizes into tokens, files into pixels."""

    token_ids: Mapping[str, int]
    """Kind of media -> id of the token that stands for a part of it."""
    placeholder_ids: Mapping[str, int]
    """Kind of media -> id of the token that a chat template writes in its place."""
    border_ids: frozenset[int] = frozenset()
    """Ids of tokens that a chat template writes around a picture, and that stay with it."""
    video: VideoSettings | None = None
    """Settings of its videos; None for a model that is given none here."""
    around_step: tuple[int, ...] = ()
    """Tokens before and after those of a patch of time between time stamps."""
    most_tokens: int | None = None
    """Number of tokens of the largest image; None where that is not bounded."""

    def __init__(self, folder: Path) -> None:
        """Nothing is made yet; `folder` is where the settings are."""
        self.folder = folder
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._kept_bytes = 0
        self.num_made = 0
        """Pictures turned into pixels so far."""

    @abstractmethod
    def grid(self, kind: str, size: tuple[int, int], num_frames: int = 1) -> tuple[int, int, int]:
        """`Media.grid` of a picture of this width and height.

        Raises:
            ValueError: the model cannot be shown such a picture.
        """

    @abstractmethod
    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Number of placeholder tokens of this grid."""

    def image_ids(self, grid: tuple[int, int, int]) -> tuple[int, ...]:
        """Token ids of an image in a prompt, in place of the one token that the chat template writes."""
        return (self.token_ids["image"],) * self.num_tokens(grid)

    def check_around(self, before: Sequence[int], behind: Sequence[int]) -> None:  # noqa: B027 (most take any text)
        """Refuse text in which an image may not stand; any may, unless a family says otherwise.

        Args:
            before, behind: the token ids on both sides of what the chat template writes for it.

        Raises:
            ValueError: the model's own processor would have written something else there.
        """

    @abstractmethod
    def _make(self, media: Media) -> Tensor:
        """Pixels of a picture."""

    def pixels(self, media: Media) -> Tensor:
        """Pixels float32 of a picture, from its files or from an earlier call: patches [t h w, C t p p] or tiles
        [n, C, H, W].

        Raises:
            ValueError: a file is missing, no picture, or has other sizes than when its tokens were counted.
        """
        key = f"{media.kind} {media.key}"
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        with torch.inference_mode(False):  # generation makes them, and training uses them
            pixels = self._make(media)
        self.num_made += 1
        self._kept[key] = pixels
        self._kept_bytes += pixels.nbytes
        while self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return pixels

    def save(self, folder: Path) -> None:
        """Copy the settings into another model folder."""
        for name in SETTINGS:
            if (self.folder / name).is_file() and self.folder.resolve() != folder.resolve():
                shutil.copyfile(self.folder / name, folder / name)


def changed(media: Media, actual: object, counted: object, quantity: str) -> ValueError:
    """The error of a file that is no longer as large as when its tokens were counted."""
    return ValueError(
        f"a {media.kind} has {actual} {quantity}, but {counted} when its tokens were counted; did the file change "
        f"since the run started?"
    )


def film_key(digest: str, frames: Sequence[int]) -> str:
    """Equal for equal frames of equal files."""
    chosen = ",".join(map(str, frames))
    return hashlib.blake2b(f"{digest} {chosen}".encode(), digest_size=16).hexdigest()


def image_settings(folder: Path) -> Mapping[str, Any] | None:
    """Image settings of a model folder, from the file of the whole processor or else that of the image processor; None
    without either.

    Raises:
        ValueError: a file cannot be read.
    """
    complaint = f"the image processor of {str(folder)!r} cannot be used"
    whole_file, own_file = folder / _WHOLE_FILE, folder / PROCESSOR_FILE
    if whole_file.is_file() and (nested := model_json(whole_file, complaint).get("image_processor")):
        return dict(nested)
    return model_json(own_file, complaint) if own_file.is_file() else None


def load_image_processor(folder: Path) -> Any:
    """The image processor of transformers that a model folder names, with its Pillow and numpy back end, so that a
    picture gives the same pixels on every machine.

    Raises:
        ValueError: it cannot be loaded.
    """
    try:
        auto_class: Any = AutoImageProcessor
        return auto_class.from_pretrained(folder, backend="pil", trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"the image processor of {str(folder)!r} cannot be used ({reason}); install Pillow: pip install "
            f"'strop[vision]'"
        ) from error
